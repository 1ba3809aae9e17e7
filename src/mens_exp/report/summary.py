"""The records of a run, read once, and its main results: base and tuned metrics, and the cost.

Report, model card and terminal take their numbers from here, so that they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mens_exp.artifacts.attribution import Attribution
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.metrics import OF_OBJECTIVES
from mens_exp.artifacts.record import parse_json
from mens_exp.artifacts.scorecard import ItemEvent, Samples, Scorecard, read_item_events
from mens_exp.artifacts.telemetry import Event, read_events
from mens_exp.config.suite import SUITES, title_of
from mens_exp.errors import DataError
from mens_exp.report import wording
from mens_exp.report.document import Answer, Cell, Item, Tone

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.scorecard import Sample

_NOT_REACHED = {
    "failed": "not reached: the run failed",
    "cancelled": "not reached: the run was cancelled",
    "started": "not reached so far",
    "succeeded": "not recorded",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """The records of a run; parts that it never reached are empty or None.

    Attributes:
        manifest: identity, inputs, facts, results and status of the run.
        events: the telemetry, one mapping per event, in the order written.
        scorecard: the KPIs; None if the run was not evaluated.
        items: one mapping per evaluated item and condition.
        samples: unscored answers; None if none were requested.
        plan: the execution plan; None if the run failed before planning.
        config: the composed configuration as YAML; None if there is none.
        attribution: the cost of quantizing the base; None if it was not measured.
        place: the directory, as written in commands.
    """

    manifest: Manifest
    events: tuple[Event, ...] = ()
    scorecard: Scorecard | None = None
    items: tuple[ItemEvent, ...] = ()
    samples: Samples | None = None
    plan: dict[str, Any] | None = None
    config: str | None = None
    attribution: Attribution | None = None
    place: str = ""

    @property
    def status(self) -> str:
        """The run's status as a plain word."""
        return str(self.manifest.status)

    def payloads(self, event: str) -> list[dict[str, Any]]:
        """Return the payloads of all telemetry events of one kind, oldest first."""
        return [record["payload"] for record in self.events if record["event"] == event]

    def why_absent(self, dotted: str) -> str:
        """Explain why a field of the manifest or scorecard has no value.

        Args:
            dotted: the field, as ``results.peak_cuda_bytes`` or ``conditions.base.parse_rate``.

        Returns:
            The recorded reason, or one derived from the run's status.
        """
        for unknown in (self.manifest.unknown, self.scorecard.unknown if self.scorecard else {}):
            if dotted in unknown:
                return unknown[dotted]
        return _NOT_REACHED.get(self.status, "not recorded")


def load(run: RunDir) -> Records:
    """Read a run directory.

    Args:
        run: the directory, of which only the manifest is required.

    Raises:
        MensError: the manifest is missing, or a record is damaged or of a newer version.
    """
    return Records(
        manifest=Manifest.read(run.manifest),
        events=tuple(read_events(run.telemetry)) if run.telemetry.is_file() else (),
        scorecard=Scorecard.read(run.scorecard) if run.scorecard.is_file() else None,
        items=tuple(read_item_events(run.events)) if run.events.is_file() else (),
        samples=Samples.read(run.samples) if run.samples.is_file() else None,
        plan=_read_plan(run.plan) if run.plan.is_file() else None,
        config=run.config.read_text(encoding="utf-8") if run.config.is_file() else None,
        attribution=Attribution.read(run.attribution) if run.attribution.is_file() else None,
        place=wording.path(run.path),
    )


def _read_plan(path: Path) -> dict[str, Any]:
    plan = parse_json(path.read_bytes(), str(path))
    if not isinstance(plan, dict):
        raise DataError(
            "the plan is not an object",
            where=str(path),
            found=type(plan).__name__,
            expected="an object",
            remedy="delete the file; the report is rendered without it",
        )
    return plan


_CONDITIONS = ("base", "tuned")
_WITHOUT_TRAINING = frozenset(
    ("evaluate", "plan", "compare", "promote", "attribute", "rejection_sampling")
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A KPI of base and tuned model, their difference in words, and whether it is better."""

    label: str
    base: Cell
    tuned: Cell
    change: str  # empty unless both values are known
    tone: Tone
    note: str  # a caveat for interpreting it
    unit: str = ""


_VERDICTS = {Tone.GOOD: " better", Tone.BAD: " worse", Tone.QUIET: ""}


def change_cell(pair: Pair, *, note: str = "") -> Cell:
    """Return the difference as a cell that shows whether it is an improvement."""
    words = f"{pair.change}{_VERDICTS[pair.tone]}" if pair.change else "unknown"
    return Cell(words, tone=pair.tone, detail=note)


def _lower_is_better(
    label: str,
    values: tuple[float | None, ...],
    cells: Sequence[Cell],
    note: str,
    unit: str = "",
    *,
    is_ratio: bool = True,
) -> Pair:
    """Return a metric and its change, relative to the base unless that may be 0 or negative."""
    base, tuned = values
    if base is None or tuned is None or (is_ratio and base <= 0):
        return Pair(label, cells[0], cells[1], "", Tone.QUIET, note, unit)
    change = (
        wording.percent(tuned / base - 1, signed=True)
        if is_ratio
        else wording.figure(tuned - base, signed=True)
    )
    return Pair(label, cells[0], cells[1], change, _tone(base - tuned), note, unit)


def _tone(gain: float) -> Tone:
    return Tone.GOOD if gain > 0 else Tone.BAD if gain < 0 else Tone.QUIET


def val_loss(records: Records) -> Pair:
    """Return the validation loss, in nats per token if the objective is a likelihood.

    For a run that ended before it wrote results, the telemetry is used.
    """
    values = tuple(_val_loss(records, name) for name in _CONDITIONS)
    details = ("", _selected(records))
    cells = [
        Cell(wording.loss(value), label=name, detail=detail)
        if value is not None
        else Cell(label=name, absent=records.why_absent(f"results.{name}_val_loss"))
        for name, value, detail in zip(_CONDITIONS, values, details, strict=True)
    ]
    note, unit = "lower is better", wording.loss_unit(records.manifest)
    spec = wording.objective_of(records.manifest)
    is_ratio = spec is None or not spec.compares_groups
    return _lower_is_better("Validation loss", values, cells, note, unit, is_ratio=is_ratio)


def _val_loss(records: Records, condition: str) -> float | None:
    recorded: float | None = records.manifest.results.get(f"{condition}_val_loss")
    if recorded is not None:
        return recorded
    seen = [p for p in records.payloads("validation") if p.get("condition") == condition]
    return seen[-1].get("val/loss") if seen else None


def _selected(records: Records) -> str:
    """State the step of the adapter if it is not the last one."""
    step, steps = (records.manifest.results.get(name) for name in ("adapter_step", "steps"))
    return "" if None in {step, steps} or step == steps else f"adapter of step {step} of {steps}"


def pairs(records: Records) -> list[Pair]:
    """Return every metric available for both base and tuned model.

    Bits per byte are included if the run recorded them, and answer rates if answers were requested.
    """
    loss, card = val_loss(records), records.scorecard
    trains = records.manifest.task not in _WITHOUT_TRAINING
    found = [loss] if trains or loss.base.text or loss.tuned.text else []
    if records.manifest.results.get("val_text_bytes") is not None:
        found.append(_bits_per_byte(records))
    own = _of_the_user(records)
    if card is None and not expects_answers(records):
        return [*found, *own]
    if card is not None and any(one.get("task_success") is not None for one in _scores(card)):
        found.append(_shares(f"Tasks of {card.suite} done", records, "task_success"))
    return [*found, parse_rate(records), *own]


_BETTER = {"min": "lower is better", "max": "higher is better"}


def _of_the_user(records: Records) -> list[Pair]:
    """Return the metrics that callbacks and modules declare with a direction."""
    values = records.manifest.results.get("metrics") or {}
    built_in = names_of_objective(records.manifest)
    found = []
    for name, about in (records.manifest.facts.get("metrics") or {}).items():
        note = _BETTER.get(about["direction"])
        if note is not None and name not in built_in:
            value = values.get(name)
            tuned = Cell("not finite" if value is None else f"{value:.6g}", label="tuned")
            base = Cell("–", label="base")  # the base model is not trained
            unit = "" if about["unit"] == "1" else str(about["unit"])
            found.append(Pair(name, base, tuned, "", Tone.QUIET, note, unit))
    return found


def names_of_objective(manifest: Manifest) -> set[str]:
    """Return the full names of the metrics that a run's objective has, such as ``val/kl``."""
    spec = wording.objective_of(manifest)
    names = [] if spec is None else [one.name for one in spec.metrics]
    return {f"{area}/{name}" for area in OF_OBJECTIVES for name in names}


def expects_answers(records: Records) -> bool:
    """Return whether a run without a scorecard may still get one, or should have one."""
    spec = SUITES.known(records.manifest.choices.get("suite") or "")
    return records.status != "succeeded" and (spec is None or spec.scores)


def _bits_per_byte(records: Records) -> Pair:
    values = tuple(records.manifest.results[f"{name}_val_bits_per_byte"] for name in _CONDITIONS)
    cells = [Cell(wording.loss(value)) for value in values]
    note = "lower is better; comparable across tokenizers"
    return _lower_is_better("Validation bits per byte", values, cells, note)


def parse_rate(records: Records) -> Pair:
    """Return the share of held-out completions that parse."""
    label = title_of(None if records.scorecard is None else records.scorecard.suite)
    return _shares(f"{label} that parse", records, "parse_rate", "parsed")


def _shares(label: str, records: Records, name: str, counted: str = "") -> Pair:
    """Pair two shares of the scorecard; higher is better."""
    card, cells, values = records.scorecard, [], []
    for condition, scores in zip(_CONDITIONS, _scores(card), strict=True):
        share, count = scores.get(name), scores.get(counted)
        values.append(share)
        if share is None or card is None:
            where = "scorecard" if card is None else f"conditions.{condition}.{name}"
            cells.append(Cell(label=condition, absent=records.why_absent(where)))
        else:
            detail = "" if count is None else f"{count} of {card.items}"
            cells.append(Cell(wording.percent(share), label=condition, detail=detail))
    base, tuned = values
    gain = None if base is None or tuned is None else tuned - base
    change = "" if gain is None else wording.points(gain)
    note = f"{card.items} items: each is worth {100 / card.items:.3g} points" if card else ""
    return Pair(label, cells[0], cells[1], change, _tone(gain or 0.0), note)


def _scores(card: Scorecard | None) -> list[dict[str, Any]]:
    return [card.conditions.get(name, {}) if card else {} for name in _CONDITIONS]


class Outcome(NamedTuple):
    """The strongest known outcome of an answer (quiet if unknown), and the verb for success."""

    tone: Tone
    words: str
    verb: str


def outcome_of(event: ItemEvent) -> Outcome:
    """Return the strongest known outcome of an answer: solves the task, or parses."""
    success, parses = event["task_success"], event["parses"]
    if success is not None:
        words = "passes" if success else event["outcome"] or "does not pass"
        tone = Tone.GOOD if success else Tone.BAD
        return Outcome(tone, words.replace("_", " "), "pass")
    if parses is None:
        return Outcome(Tone.QUIET, "answered", "parse")
    return Outcome(*((Tone.GOOD, "parses") if parses else (Tone.BAD, "does not parse")), "parse")


def items(records: Records) -> list[Item]:
    """Put the answers to each prompt side by side, in the order of first appearance."""
    if records.samples is not None:
        return [_of_sample(one) for one in records.samples.items]
    by_name: dict[str, dict[str, ItemEvent]] = {}
    for event in records.items:  # the first of several samples
        by_name.setdefault(event["item_id"], {}).setdefault(event["condition"], event)
    return [_item(name, answers) for name, answers in by_name.items()]


def _of_sample(one: Sample) -> Item:
    answers = [
        Answer(who=who, text=said["text"], detail=_detail(said["tokens"], said["finished"]))
        for who, said in one["answers"].items()
    ]
    name, prompt = one["item_id"], one["prompt"]
    return Item(name=name, prompt=prompt, answers=answers, reference=one["reference"])


def _item(name: str, answers: dict[str, ItemEvent]) -> Item:
    # Base and tuned, or the conditions of a suite with its own models.
    sides = tuple(answers) if answers.keys() - set(_CONDITIONS) else _CONDITIONS
    first = next(iter(answers.values()))
    said = [_answer(side, answers.get(side)) for side in sides]
    reference = first["reference"] or ""
    return Item(name=name, prompt=first["prompt"], answers=said, reference=reference)


def _answer(who: str, event: ItemEvent | None) -> Answer:
    if event is None:
        return Answer(who=who, text=None)
    outcome = outcome_of(event)
    details = [_detail(event["tokens_out"], event["finished"])]
    details += [] if event["style"] is None else [f"read as: {event['style']}"]
    return Answer(
        who=who,
        text=event["completion"],
        outcome=outcome.words,
        tone=outcome.tone,
        detail=", ".join(filter(None, details)),
        error=event["error"] or "",
    )


def _detail(tokens: int | None, finished: bool) -> str:
    said = [] if finished else ["cut off"]
    return ", ".join([*said, *([] if tokens is None else [f"{wording.count(tokens)} tokens"])])


def peft_view(records: Records) -> str:
    """Describe how the PEFT directory differs from the trained model, and the rounding error."""
    results, form = records.manifest.results, records.manifest.facts.get("compute_dtype")
    own, kernels = (results.get(f"peft_view_{name}") for name in ("difference", "kernels"))
    if own is None or kernels is None:
        return ""
    exact = results.get("peft_view_difference_f32")
    return (
        "Loaded with PEFT and transformers alone, adapter/peft has a loss that differs from the "
        f"trained model's by {own:.1e} in {form}"
        + (f", and by {exact:.1e} in f32" if exact is not None and form != "float32" else "")
        + " (relative, on short validation documents). Two attention kernels of transformers "
        f"differ by {kernels:.1e} from each other there: rounding alone goes so far."
    )


def unsafe(records: Records) -> str:
    """Return a warning if generated programs ran without isolation."""
    if records.scorecard is None or records.scorecard.sandbox != "unsafe":
        return ""
    return "Programs ran without isolation (sandbox=unsafe): no evidence for a promotion."


def cost(records: Records) -> list[Cell]:
    """Return throughput, peak memory, peak GPU memory and time, in this order."""
    every, train_s = (records.manifest.results.get(k) for k in ("tokens_per_s", "train_s"))
    all_tokens = "" if every is None else f"{wording.rate(every)} counting every token"
    training = "" if train_s is None else f"{wording.duration(train_s)} of it training"
    cells = [
        _result(records, "supervised_tokens_per_s", "Supervised tokens per second", all_tokens),
        _result(records, "peak_rss_bytes", "Peak memory", "resident, the whole process"),
        _result(records, "peak_cuda_bytes", "Peak GPU memory", "allocated"),
        _result(records, "wall_s", "Wall time", training),
    ]
    measures_all = records.manifest.task not in _WITHOUT_TRAINING
    return cells if measures_all else [cell for cell in cells if cell.text]


def headline(records: Records) -> str:
    """Return a one-sentence summary of the run's result."""
    loss = val_loss(records)
    if loss.base.text and loss.tuned.text and records.status == "succeeded":
        steps = records.manifest.results.get("steps")
        after = f"After {wording.count(steps)} steps the" if steps is not None else "The"
        return (
            f"{after} validation loss is {loss.tuned.text} {loss.unit}; "
            f"the base model's is {loss.base.text} ({loss.change})."
        )
    return {
        "succeeded": "The run succeeded; it measured no validation loss.",
        "failed": "The run failed; what follows is what it recorded until then.",
        "cancelled": "The run was cancelled; what follows is what it recorded until then.",
    }.get(
        records.status,
        "The run has not ended, or was killed; what follows is what it recorded so far.",
    )


def command(records: Records) -> str:
    """Return the command that repeats this run, quoted for a shell."""
    return wording.command(*records.manifest.overrides)


def base_command(records: Records) -> str | None:
    """Return the command that exports the base to a directory; None if it is available elsewhere.

    Only bundled and random base models exist nowhere else.
    """
    manifest = records.manifest
    inputs, option = manifest.inputs, manifest.choices.get("model")
    if option is None or inputs.get("base_source") not in {"bundled", "random"}:
        return None
    settings = [text for text in manifest.overrides if text.lstrip("+").startswith("model.")]
    out = ("out", str(inputs["base_model"]))
    return wording.command(
        "task=export", "path=base", "export.format=hf", f"model={option}", *settings, out
    )


def _result(records: Records, key: str, label: str, detail: str) -> Cell:
    value = records.manifest.results.get(key)
    if value is None:
        return Cell(label=label, absent=records.why_absent(f"results.{key}"))
    return Cell(wording.as_text(value, key), label=label, detail=detail)
