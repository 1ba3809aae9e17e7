"""Sections of a run's report: planned and measured values, facts, inputs and the record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.telemetry import own_series
from mens_exp.report import summary, wording
from mens_exp.report.document import Cell, Code, Facts, Note, Part, Section, Table, Tone, bullets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.report.summary import Records

_NEAR = 0.1  # relative error up to which a prediction is called near
_DIFFERENCES = "differs_from_default"
_METRICS = "metrics"
_CODE_KEYS = ("commit", "digest", "sha256", "path")
# JSON keys are sorted; a report shows related keys together.
_ORDER = (
    *("base_model", "base_source", "base_weights_sha256", "tokenizer_sha256"),
    *("chat_template_sha256", "data", "source", "rows_sha256", "train_rows", "val_rows"),
    *("heldout_rows", "train_sha256", "val_sha256"),
    *("device", "compute_dtype", "quant", "double_quant", "attention", "deterministic"),
    *("trainable_parameters", "trainable_matrices", "total_parameters"),
    *("seq_len", "packing", "micro_batch_size", "accumulate_grad_batches"),
    *("documents_in_first_batch", "tokens_in_first_batch", "supervised_tokens_in_first_batch"),
    *("commit", "dirty", "diff_sha256", "python", "platform", "cpu", "model", "physical_cores"),
    *("logical_cores", "flags", "memory_bytes", "accelerators"),
    *("task_success", "semantic_task_success", "pass_at_1", "pass_at_k"),
    *("parse_rate", "parsed", "completed", "tokens_out_mean"),
    *("compile_at_1", "compile_at_n", "canonical", "strictness"),
)
_OTHER_TABLES = ("packages", "environment")
# Too long (hundreds of lines), or shown in another section.
_FOR_MACHINES = ("lora_init_layers_sha256", "rounds", _DIFFERENCES, _METRICS)
_BETTER = {"min": "lower", "max": "higher", "none": ""}


def rounds(done: Sequence[Mapping[str, Any]], stopped: str | None = None) -> Section:
    """Return a table of the rounds of rejection sampling.

    Args:
        done: the finished rounds, as the manifest records them.
        stopped: why no further round began; None if all rounds were run.
    """
    kpi = next((one["kpi"] for one in done if one["kpi"] is not None), None)
    rows: list[Sequence[Cell | str]] = [
        (
            str(one["number"]),
            f"{one['passed']} of {one['sampled']}",
            f"{one['prompts'] - one['prompts_without_pass']} of {one['prompts']}",
            Cell(str(one["rows"]), detail=_of_rows(one)),
            str(one.get("train_rows") or "unknown"),  # older records lack it
            *([] if kpi is None else [_rate(one["tuned"])]),
            wording.duration(one["wall_s"]),
        )
        for one in done
    ]
    held_out = [] if kpi is None else [f"{kpi} after"]
    heads = ("round", "answers passed", "tasks solved", "rows", "trained on", *held_out, "time")
    notes = [] if stopped is None else [Note(f"No further round: {stopped}.", Tone.WARN)]
    base = next((one["base"] for one in done if one["base"] is not None), None)
    if base is not None:
        notes.append(Note(f"The base model's {kpi} is {_rate(base)}.", Tone.QUIET))
    lead = (
        "The model that a round begins with answers the tasks; the answers that pass are trained "
        "on, or all of them by their rewards. A task is solved if at least one of its answers "
        "passes. Rows that are not trained on are for validation or held out."
    )
    return Section("Rounds", [Table(heads, rows), *notes], name="rounds", lead=lead)


def lr_range(records: Records) -> Iterator[Section]:
    """Yield the outcome of a range test of learning rates, if the run was one."""
    found = records.manifest.results.get("lr_range")
    if found is None:
        return
    why = found["why_none"]
    if why is None:
        said = Note(f"Proposed: optim.lr={found['proposed']:.2g}.", Tone.GOOD)
    else:
        said = Note(f"No rate is proposed: {why}.", Tone.WARN)
    ended = "the loss diverged" if found["diverged"] else "the last step"
    rows = [
        ("Rate of the lowest change", _as_rate(found["lowest_at"])),
        ("Rates tried", f"{_as_rate(found['from_rate'])} to {_as_rate(found['to_rate'])}"),
        ("Ended by", ended),
    ]
    lead = (
        "Each step had a higher rate than the one before. The change is a step's loss less that of "
        "the base model on the same tokens. The proposal is a tenth of the rate at which the "
        "smoothed change was lowest."
    )
    parts: list[Part] = [said, Table(("", ""), rows)]
    yield Section("Range test of learning rates", parts, name="lr-range", lead=lead)


def _as_rate(value: float | None) -> str:
    return "none" if value is None else f"{value:.2g}"


def _of_rows(one: Mapping[str, Any]) -> str:
    """State the new rows of a round, or the number of its tasks that are useful for training."""
    of_both = one.get("prompts_of_both")  # absent from older records
    return f"both kinds in {of_both} tasks" if of_both else f"{one['new']} new"


def _rate(value: float | None) -> str:
    return "unknown" if value is None else wording.percent(value)


def own_metrics(records: Records) -> list[Table]:
    """Return the metrics of the objective, and those of callbacks and modules.

    Each has the run's value, how it is aggregated over the series, and its unit.
    """
    ours = summary.names_of_objective(records.manifest)
    of_objective: list[tuple[Cell, str, str, str]] = []
    others: list[tuple[Cell, str, str, str]] = []
    for name, one in sorted(own_series(records.events).items()):
        if not one.points:
            continue
        about = one.declaration
        value = "not finite" if one.value is None else f"{one.value:.6g}"
        plural = "value" if len(one.points) == 1 else "values"
        made = f"{value} ({about['reduction']} of {wording.count(len(one.points))} {plural})"
        unit = "" if about["unit"] == "1" else str(about["unit"])
        rows = of_objective if name in ours else others
        rows.append((Cell(name, code=True), made, unit, _BETTER[about["direction"]]))
    heads = ("Metric", "value", "unit", "better")
    of_objective.sort(key=lambda row: row[0].text.partition("/")[::-1])
    return [
        Table(heads, of_objective, title="Metrics of the objective"),
        Table(heads, others, title="Metrics of callbacks and modules"),
    ]


def media(records: Records) -> Iterator[Note]:
    """Yield a note on data that is only in the W&B mirror, such as images and tables."""
    found = {
        f"{name} ({kind})": None
        for payload in records.payloads("logged")
        for name, kind in (payload.get("media") or {}).items()
    }
    if found:
        yield Note(f"In the W&B mirror alone: {', '.join(found)}.", Tone.QUIET)


def planned(records: Records) -> Section:
    """Return planned values next to measurements."""
    plan = records.plan
    if plan is None:
        note = Note("There is no plan next to this run.", Tone.QUIET)
        return Section("Planned and measured", [note])
    heads = ("quantity", "planned", "measured", "measured ÷ planned", "basis of the plan")
    table = Table(heads, list(compared(records)))
    parts = " + ".join(
        f"{wording.label(name)} {wording.size(part)}"
        for name, part in components(plan.get("memory_bytes") or {})
    )
    said = [Note(f"Planned memory: {parts}.", Tone.QUIET)] if parts else []
    return Section("Planned and measured", [table, *said])


_BY_EPOCHS = "trainer.max_epochs"  # the plan's ``bound`` where steps follow from blocks


def compared(records: Records) -> Iterator[tuple[Cell | str, ...]]:
    """Yield each planned quantity next to its measurement."""
    plan = records.plan or {}
    data, time, memory = (plan.get(key) or {} for key in ("data", "time_s", "memory_bytes"))
    token_basis = "" if data.get("exact") else str(data.get("basis", ""))
    counted, by_epochs = data.get("train_blocks") is not None, plan.get("bound") == _BY_EPOCHS
    trainable = plan.get("trainable_parameters")
    gpu = "cuda" if records.manifest.results.get("peak_cuda_bytes") is not None else "rss"
    peak, basis = f"peak_{gpu}_bytes", memory.get("basis", "")
    for dotted, planned, because, is_exact in (
        ("results.steps", plan.get("steps"), "", counted or not by_epochs),
        ("facts.epochs", plan.get("epochs"), "", False),
        ("results.tokens", plan.get("tokens_total"), token_basis, counted and by_epochs),
        ("facts.trainable_parameters", trainable, "", True),
        ("results.train_s", time.get("estimate"), time.get("basis", ""), False),
        (f"results.{peak}", memory.get("estimate"), basis, False),
    ):
        yield _compared(records, dotted, planned, str(because), is_exact=is_exact)


def _compared(
    records: Records, dotted: str, planned: float | None, basis: str, *, is_exact: bool
) -> tuple[Cell | str, ...]:
    part, key = dotted.split(".")
    measured = getattr(records.manifest, part).get(key)
    known = bool(planned) and measured is not None
    ratio = measured / planned if known and planned else 0.0
    words = "as planned" if known and measured == planned else f"{ratio:.2f}" if known else ""
    tone = Tone.GOOD if abs(ratio - 1) <= _NEAR else Tone.WARN
    about = "" if is_exact else "≈ "
    return (
        "training time" if key == "train_s" else wording.label(key),
        _known(planned, key, basis or "the plan has no value", about),
        _known(measured, key, records.why_absent(dotted)),
        Cell(words, tone=tone),
        Cell(basis, tone=Tone.QUIET),
    )


def _known(value: Any, key: str, absent: str, about: str = "") -> Cell:
    if value is None:
        return Cell(absent=absent)
    return Cell(about + wording.as_text(value, key))


def components(memory: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the parts of a memory estimate, largest first.

    Args:
        memory: the plan's ``memory_bytes``.
    """
    parts = memory.get("components") or {}
    return sorted(parts.items(), key=lambda part: (-part[1], part[0]))


def ran(records: Records) -> Section:
    """Return the facts of the run."""
    absent = "No facts were recorded: the run ended before its first batch."
    lead = "Read back from the model and the first batch."
    return Section("What ran", [_facts_or(facts(records), absent)], lead=lead)


def went_in(records: Records) -> Section:
    """Return its inputs."""
    absent = "No inputs were recorded: the run ended before it read them."
    lead = "Identified by content, not by name."
    return Section("What went in", [_facts_or(inputs(records), absent)], lead=lead)


def _facts_or(cells: list[Cell], absent: str) -> Part:
    return Facts(cells) if cells else Note(absent, Tone.QUIET)


def facts(records: Records) -> list[Cell]:
    """Return the facts read back from the model and the first batch."""
    found = records.manifest.facts
    shown = {key: value for key, value in found.items() if key not in _FOR_MACHINES}
    return [*_cells(records, "facts", shown), *_differences(records)]


def _differences(records: Records) -> Iterator[Cell]:
    """Yield each setting that differs from our default, as typed.

    Settings that only the chosen option has are shown if the command names them; otherwise the
    option implies them.
    """
    named = {text.partition("=")[0].lstrip("+") for text in records.manifest.overrides}
    for path, one in sorted((records.manifest.facts.get(_DIFFERENCES) or {}).items()):
        if "default" in one or path in named:
            usual = f" (default {wording.typed(one['default'])})" if "default" in one else ""
            label = f"{wording.label(_DIFFERENCES)}: {path}"
            yield Cell(wording.typed(one["found"]) + usual, label=label)


def inputs(records: Records) -> list[Cell]:
    """Return the inputs, by content hash."""
    return _cells(records, "inputs", records.manifest.inputs)


def environment(records: Records) -> list[Cell]:
    """Return the machine and the code; packages and variables are listed separately."""
    provenance = records.manifest.provenance
    rest = {key: value for key, value in provenance.items() if key not in _OTHER_TABLES}
    return _cells(records, "provenance", rest)


def outputs(records: Records) -> list[Cell]:
    """Return the outputs of the run, by content hash."""
    written = sorted(records.manifest.outputs.items())
    return [Cell(digest, label=path, code=True) for path, digest in written]


def _cells(records: Records, part: str, values: Mapping[str, Any]) -> list[Cell]:
    """Return a cell for each leaf of a nested mapping, depth first."""
    cells = []
    for key in ordered(values):
        value, dotted, label = values[key], f"{part}.{key}", wording.label(key)
        if isinstance(value, Mapping):
            cells += [
                Cell(one.text, label=f"{label}: {one.label}", absent=one.absent, code=one.code)
                for one in _cells(records, dotted, value)
            ]
        elif value is None:
            cells.append(Cell(label=label, absent=records.why_absent(dotted)))
        else:
            text = wording.as_text(value, key) or "none"
            is_code = any(part in key for part in _CODE_KEYS)
            cells.append(Cell(text, label=label, code=is_code))
    return cells


def ordered(keys: Iterable[str]) -> list[str]:
    """Return known keys in display order, then the others by name."""
    rank = {key: number for number, key in enumerate(_ORDER)}
    return sorted(set(keys), key=lambda key: (rank.get(key, len(rank)), key))


def notes(records: Records) -> Iterator[Section]:
    """Yield the notes made during the run, if any."""
    view = summary.peft_view(records)
    lines = [*attempts(records), *records.manifest.notes, *([view] if view else [])]
    if lines:
        yield Section("Notes", bullets(lines))


def attempts(records: Records) -> list[str]:
    """Return one row per start of the run; empty if there was only one."""
    every = records.manifest.attempts
    if len(every) <= 1:
        return []
    return [_attempt(number, attempt) for number, attempt in enumerate(every, start=1)]


def _attempt(number: int, attempt: Mapping[str, Any]) -> str:
    step, ended = attempt.get("resumed_from_step"), attempt.get("ended_utc")
    start = "from the beginning" if step is None else f"resumed from step {wording.count(step)}"
    end = f"until {wording.moment(ended)}" if ended else "with no recorded end"
    began = wording.moment(str(attempt.get("started_utc", "")))
    return f"Attempt {number}, {start}: {began} {end}, {attempt.get('status', '')}"


def record(records: Records) -> Section:
    """Return the rest of the record, collapsed."""
    folds = [
        Section("Files written", [Facts(found)], count=len(found), folded=True)
        for found in [outputs(records)]
        if found
    ]
    m = records.manifest
    digests = {"commit": m.provenance.get("commit"), "config": m.config_digest}
    digests |= {"contract": m.contract["digest"]} if m.contract else {}
    cells = [Cell(str(text), label=name, code=True) for name, text in digests.items() if text]
    folds += [
        Section("Digests", [Facts(cells)], folded=True),
        Section("Environment", _environment(records), folded=True),
        Section("Configuration", _configuration(records), folded=True),
    ]
    card = records.scorecard
    unknown = {**records.manifest.unknown, **(card.unknown if card else {})}
    return Section("Record", [*folds, *unknown_fold(unknown)], name="folds")


def unknown_fold(unknown: Mapping[str, str]) -> list[Section]:
    """Return unknown values and the reasons, collapsed; nothing if all values are known."""
    cells = [Cell(why, label=name) for name, why in sorted(unknown.items())]
    fold = Section("Unknown, and why", [Facts(cells)], count=len(cells), folded=True)
    return [fold] if cells else []


def _environment(records: Records) -> list[Part]:
    found, provenance = environment(records), records.manifest.provenance
    parts: list[Part] = [_facts_or(found, "not recorded")]
    for key, title, absent in (
        ("packages", "Packages", "unknown"),
        ("environment", "Environment variables", "not set"),
    ):
        if provenance.get(key):
            cells = [
                Cell(wording.as_text(value) or absent, label=name)
                for name, value in sorted(provenance[key].items())
            ]
            parts.append(Facts(cells, title=title, dense=True))
    return parts


def _configuration(records: Records) -> list[Part]:
    choices = [
        Cell(wording.as_text(option) or "none", label=group)
        for group, option in sorted(records.manifest.choices.items())
    ]
    parts: list[Part] = [Facts(choices, dense=True)] if choices else []
    if records.config is None:
        return [*parts, Note("config.yaml is not in the run directory", Tone.QUIET)]
    return [*parts, Code(records.config)]


def data_contract(records: Records) -> list[Section]:
    """Return the data contract; nothing if the run did not measure it."""
    node = records.manifest.data_contract
    if node is None:
        return []
    lead = "What the rows became, measured before the first step."
    parts: list[Part] = [*bullets(node["violations"], Tone.BAD), Facts(contract_cells(node))]
    return [Section("Data contract", parts, lead=lead)]


def contract_cells(node: Mapping[str, Any]) -> list[Cell]:
    """Return the figures of a data contract."""
    unknown = node["unknown"]
    return [
        *token_cells(node["tokens"], unknown),
        *_rows(node["rows"]),
        *_overlap(node["overlap"], unknown),
        *_probe(node["probe"], unknown),
    ]


def token_cells(part: Mapping[str, Any], unknown: Mapping[str, str]) -> Iterator[Cell]:
    """Yield the figures of the encoded rows; nulls with their reasons."""
    for key, words in (("tokens_by_role", "tokens by role"), ("trained_by_role", "trained")):
        counts = part[key] or {}
        text = ", ".join(
            f"{wording.label(r).lower()} {wording.count(n)}" for r, n in counts.items()
        )
        yield _figure(words, text, unknown.get(f"tokens.{key}"))
    share = wording.percent(part["trained_frac"])
    yield _figure("trained share", f"{share} of {wording.count(part['tokens'])} tokens")
    yield _figure("end marker trained", _end(part), unknown.get("tokens.end_marker_trained"))
    lost = f"{wording.count(part['trained_tokens_lost'])} tokens"
    yield _figure("lost to truncation", f"{lost} ({_share(part, 'trained_tokens_lost')})")
    whole = part["documents"] + part["nothing_to_learn"]
    nothing = f"{wording.count(part['nothing_to_learn'])} documents"
    yield _figure("nothing to learn", f"{nothing} ({_share(part, 'nothing_to_learn')})")
    over = f"{wording.count(part['truncated'])} of {wording.count(whole)} documents over the limit"
    yield _figure("longest", f"{wording.count(part['longest'])} tokens; {over}")


def _share(part: Mapping[str, Any], name: str) -> str:
    return wording.percent(part[f"{name}_frac"])


def _end(part: Mapping[str, Any]) -> str:
    if part["end_marker_trained"] is None:
        return ""
    of = f"{wording.count(part['ends_trained'])} of {wording.count(part['ends'])} within the limit"
    share = f"{_share(part, 'end_marker_trained')} of the documents"
    return f"{'yes' if part['end_marker_trained'] else 'no'}, {of}, {share}"


def _rows(part: Mapping[str, Any]) -> Iterator[Cell]:
    both = part["rows_on_two_sides"] + len(part["groups_on_two_sides"])
    yield _figure("on two sides of the split", wording.count(both) if both else "nothing")
    if part["conversations"]:
        again = f"{wording.count(part['repeated_answers'])} of "
        talks = f"{wording.count(part['conversations'])} conversations"
        yield _figure("repeated answers", again + talks)
    checked, otherwise = part["prompts_checked"], part["prompts_otherwise"]
    yield _figure("prompts as in evaluation", f"{checked - otherwise} of {checked} compared")


def _overlap(parts: Sequence[Mapping[str, Any]], unknown: Mapping[str, str]) -> Iterator[Cell]:
    if not parts:
        yield _figure("overlap", "", unknown.get("overlap"))
    for part in parts:
        items = wording.count(part["items"])
        yield _figure(
            f"overlap with {part['against']}",
            f"{wording.count(part['contained'])} of {items} items are half or more in one row; "
            f"{wording.count(part['sharing'])} share a {part['ngram_words']}-gram of words with "
            f"{wording.count(part['rows_sharing'])} rows",
        )


def _probe(part: Mapping[str, Any] | None, unknown: Mapping[str, str]) -> Iterator[Cell]:
    if part is None:
        yield _figure("probe", "", unknown.get("probe"))
        return
    yield _figure("probe", f"{part['documents']} documents, {part['seconds']:.1f} s")
    moved = "not tried" if part["peek"] is None else f"moved {part['peek']:.1e} by a last token"
    shifted = "yes" if part["targets_follow"] else "no"
    yield _figure("labels shifted by one", f"{shifted}; {moved}")
    for key, words in (
        ("together", "batch against its documents"),
        ("accumulation", "batch against micro-batches"),
    ):
        found = {name: part.get(f"{key}_{name}") for name in ("loss", "hidden", "gradient")}
        text = ", ".join(f"{name} {one:.1e}" for name, one in found.items() if one is not None)
        yield _figure(words, f"{text} (relative)" if text else "", "there was one document")
    known, text = part.get("reference"), ""
    if known:
        text = f"loss {known['loss']:.1e}, gradient {known['gradient']:.1e} (relative, f32)"
    absent = part.get("reference_unknown") or "recorded by an earlier version"
    yield _figure("batch against transformers alone", text, absent)


def _figure(label: str, text: str, absent: str | None = None) -> Cell:
    return Cell(text, label=label, absent="" if text else absent or "")
