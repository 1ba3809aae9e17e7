"""task=plan: predict the actions and costs of a run without running it.

The ledger keeps the predictions of a run next to its measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.manifest import utc_now
from mens_exp.errors import MensError
from mens_exp.planning.estimate import make_plan
from mens_exp.planning.learned_settings import non_default_settings
from mens_exp.planning.preflight import untried_template, writable_cache
from mens_exp.planning.throughput_model import Entry, append, ledger_path
from mens_exp.report import plan_view, terminal, wording
from mens_exp.report.document import Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rich.text import Text

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.config.root import RunConfig
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.load import Tokenizer


def plan(config: RunConfig, run: Run) -> None:
    """Write and show plan.json, and the first training rows if `data.show` is set."""
    cache = writable_cache()
    made = planned(config, run.manifest, cache)
    made["warnings"] += untried_template(config)
    atomic.write_json(run.dir.plan, made)
    run.telemetry.emit("plan", made)
    note_plan(run.manifest, made)
    console = terminal.console(quiet=not run.prints)
    terminal.show(*plan_view.document(made).parts, on=console)
    if config.data.show:
        console.print()
        console.print(plan_view.token_legend())
        for text in _rows(config, cache):
            console.print(text, soft_wrap=True)
    if not made["problems"]:
        own = ("task=", "data.show=", "hydra.")
        kept = [text for text in run.manifest.overrides if not text.lstrip("+").startswith(own)]
        terminal.say_next([Step(wording.command(*kept), "run it")], on=console)


def _rows(config: RunConfig, cache: Path) -> Iterator[Text]:
    """Yield the first training rows as they are encoded for training."""
    from mens_exp.corpus.source import load_rows

    tokenizer = planned_tokenizer(config, cache)
    for number, pair in enumerate(load_rows(config.data, cache).train[: config.data.show], start=1):
        yield from _documents(config, tokenizer, pair, number)


def planned_tokenizer(config: RunConfig, cache: Path) -> Tokenizer:
    """Read the tokenizer of a run that has not started; build the model first if necessary."""
    from mens_exp.layout.model_cache import ready_directory
    from mens_exp.tokenizer.load import load_tokenizer

    directory = ready_directory(config.model, cache)
    if directory is None:
        from mens_exp.model.sources import resolve

        directory = resolve(config.model, cache).directory
    return load_tokenizer(config.tokenizer, directory)


def _documents(
    config: RunConfig, tokenizer: Tokenizer, pair: TrainingPair, number: int
) -> Iterator[Text]:
    import dataclasses

    from mens_exp.corpus.source import labelling_of
    from mens_exp.rows.encode import encode

    labelling = labelling_of(config)
    # Encoded again without a limit, only to report how much the limit removes.
    endless = dataclasses.replace(labelling, seq_len=2**31)
    whole = encode([pair], tokenizer, endless).lengths.sum()
    made = encode([pair], tokenizer, labelling)
    cut = int(whole) - len(made.ids)
    title = f"Row {number}, {pair.name.removeprefix('row ')}"
    for i in range(len(made)):
        part = slice(made.offsets[i], made.offsets[i + 1])
        several = f", document {i + 1} of {len(made)}" if len(made) > 1 else ""
        yield plan_view.shown_document(
            plan_view.ShownDocument(
                title=title + several,
                ids=made.ids[part].tolist(),
                supervised=made.supervised[part].tolist(),
                cut=cut if i == len(made) - 1 else 0,
            ),
            tokenizer,
        )
    if made.dropped:
        yield plan_view.dropped_row(title, made.dropped, labelling.seq_len)


_MOST_OTHERS = 0.1  # of the predicted peak, in use before the run (a rough choice)


def keep_measurement(
    manifest: Manifest, plan: dict[str, Any], cache: Path, held: Mapping[str, int]
) -> None:
    """Add a run to the ledger; a failure becomes a note and never fails the run.

    Runs of several processes are omitted, because they do not show the cost of a single process.

    Args:
        manifest: the record of the run.
        plan: its plan.
        cache: the directory of the ledger.
        held: bytes in use before the run, by kind of device. The peak of a process that held much
            else, as that of a notebook may, does not show the memory of the run.
    """
    if (plan.get("processes") or {}).get("processes", 1) > 1:
        return
    results, contract = manifest.results, manifest.contract or {}
    measured = step_s(results)
    on_cpu = plan["device"]["kind"] == "cpu"
    rate = plan["time_s"].get("flop_per_step")
    peak = results.get("peak_rss_bytes" if on_cpu else "peak_cuda_bytes")
    predicted = plan["memory_bytes"]["formula"]
    others = held.get(plan["device"]["kind"], 0)
    if on_cpu:
        others -= plan["memory_bytes"]["components"]["framework"]
    if others > _MOST_OTHERS * predicted:
        peak = None
    entry = Entry(
        utc=utc_now(),
        device=plan["device"]["name"],
        family=str((contract.get("provenance") or {}).get("base_family")),
        backend=plan["backend"],
        run_id=manifest.run_id,
        contract=str(contract.get("digest")),
        parameters=plan["parameters"],
        tokens_per_step=plan["tokens_per_step"],
        predicted_peak_bytes=predicted,
        measured_peak_bytes=peak,
        flop_per_step=rate,
        predicted_step_s=plan["time_s"]["step_s"],
        measured_step_s=measured,
    )
    try:
        append(ledger_path(cache), entry)
    except (MensError, OSError) as error:
        manifest.notes.append(f"the ledger was not written: {error}")


def planned(config: RunConfig, manifest: Manifest, cache: Path) -> dict[str, Any]:
    """Make the plan of a run; plan and manifest list differences from our defaults."""
    # A resumed run's overrides do not determine its whole configuration.
    overrides = manifest.overrides if len(manifest.attempts) == 1 else None
    changed = {"differs_from_default": non_default_settings(config, overrides)}
    plan = make_plan(config, cache)
    manifest.facts |= changed | {"comparison": plan["comparison"]}
    if manifest.contract is not None and "contract_digest" in plan:
        plan["contract_digest"] = manifest.contract["digest"]  # of an extended run, not the plan's
    return plan | changed


def note_plan(manifest: Manifest, plan: dict[str, Any]) -> None:
    """Add the plan's notes (operator's decisions, possible problems), each once."""
    said = [*plan["notes"], *plan["warnings"]]
    manifest.notes += [note for note in said if note not in manifest.notes]


def step_s(results: dict[str, Any]) -> float | None:
    """Return the mean time of an optimizer step after the first, in seconds; None if not timed."""
    rate, tokens, steps = (results.get(key) for key in ("tokens_per_s", "tokens", "steps"))
    return tokens / steps / rate if rate and tokens and steps else None
