"""Tables of a report: facts, inputs, environment, data contract, plan versus measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.telemetry import own_series
from mens_exp.report import wording
from mens_exp.report.summary import Cell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.report.summary import Records

_CODE_KEYS = ("commit", "digest", "sha256", "path")
# JSON is written with sorted keys; a reader wants what belongs together side by side.
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
_FOR_MACHINES = ("lora_init_layers_sha256",)  # hundreds of lines; not for reading by eye
_DIFFERENCES = "differs_from_default"
_METRICS = "metrics"  # has a table of its own
_NEAR = 0.1  # a prediction this close to the measurement is called near


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A planned quantity next to its measurement.

    Attributes:
        label: the quantity.
        planned: the plan's value, "≈" before it when it is an estimate.
        measured: the run's value.
        ratio: measured over planned in words, empty unless both are known.
        near: whether the plan was within a tenth.
        basis: what the plan's value rests on.
    """

    label: str
    planned: Cell
    measured: Cell
    ratio: str = ""
    near: bool = False
    basis: str = ""


def facts(records: Records) -> list[Cell]:
    """The facts that were read back from the model and the first batch."""
    found = records.manifest.facts
    apart = (*_FOR_MACHINES, _DIFFERENCES, _METRICS)
    shown = {key: value for key, value in found.items() if key not in apart}
    return [*_cells(records, "facts", shown), *_differences(records)]


def _differences(records: Records) -> list[Cell]:
    """One line for each setting that is not our default, as it is typed.

    A setting that only the chosen option has is shown where the command names it: the others are
    what that option is.
    """
    named = {text.partition("=")[0].lstrip("+") for text in records.manifest.overrides}
    return [
        Cell(
            label=f"{wording.label(_DIFFERENCES)}: {wording.visible(path)}",
            text=wording.typed(one["found"])
            + (f" (default {wording.typed(one['default'])})" if "default" in one else ""),
        )
        for path, one in sorted((records.manifest.facts.get(_DIFFERENCES) or {}).items())
        if "default" in one or path in named
    ]


def inputs(records: Records) -> list[Cell]:
    """The inputs, by content hash."""
    return _cells(records, "inputs", records.manifest.inputs)


def environment(records: Records) -> list[Cell]:
    """The machine and the code; packages and variables apart."""
    provenance = records.manifest.provenance
    rest = {key: value for key, value in provenance.items() if key not in _OTHER_TABLES}
    return _cells(records, "provenance", rest)


def outputs(records: Records) -> list[Cell]:
    """The outputs of the run, by content hash."""
    return [
        Cell(label=wording.visible(path), text=wording.visible(digest), code=True)
        for path, digest in sorted(records.manifest.outputs.items())
    ]


def attempts(records: Records) -> list[str]:
    """One line for each time the run was started; empty when there was only one."""
    every = records.manifest.attempts
    if len(every) <= 1:
        return []
    return [_attempt(number, attempt) for number, attempt in enumerate(every, start=1)]


def scores(records: Records) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The scorecard as a table.

    Returns:
        The conditions, and a row of values in their order for each KPI.
    """
    card = records.scorecard
    if card is None:
        return [], []
    conditions = list(card.conditions)
    known = {
        key for values in card.conditions.values() for key in values if values[key] is not None
    }
    keys = _ordered(
        key
        for values in card.conditions.values()
        for key in values
        if key in known or key == "parse_rate"  # why the others are null stands under unknown
    )
    return conditions, [
        (
            wording.label(key),
            [wording.as_text(card.conditions[c].get(key), key) or "unknown" for c in conditions],
        )
        for key in keys
    ]


_BETTER = {"min": "lower", "max": "higher", "none": ""}


def own_metrics(records: Records) -> list[tuple[str, str, str, str]]:
    """The user's metrics: name, the run's value and how it is made of the series, unit, better."""
    rows = []
    for name, one in sorted(own_series(records.events).items()):
        if not one.points:
            continue
        about = one.declaration
        value = "not finite" if one.value is None else f"{one.value:.6g}"
        plural = "value" if len(one.points) == 1 else "values"
        made = f"{value} ({about['reduction']} of {wording.count(len(one.points))} {plural})"
        unit = "" if about["unit"] == "1" else str(about["unit"])
        better = _BETTER[about["direction"]]
        rows.append((wording.visible(name), made, wording.visible(unit), better))
    return rows


def media(records: Records) -> list[str]:
    """The images, tables and so on that callbacks logged, which are in the W&B mirror alone."""
    found = {
        f"{name} ({kind})": None
        for payload in records.payloads("logged")
        for name, kind in (payload.get("media") or {}).items()
    }
    return [wording.visible(text) for text in found]


def compared(records: Records) -> list[Compared]:
    """The plan next to the measurements; empty when there is no plan."""
    plan = records.plan
    if plan is None:
        return []
    data, time, memory = (plan.get(key) or {} for key in ("data", "time_s", "memory_bytes"))
    token_basis = "" if data.get("exact") else str(data.get("basis", ""))
    gpu = records.manifest.results.get("peak_cuda_bytes") is not None
    rows = [
        ("steps", plan.get("steps"), "results.steps", "", True),
        ("epochs", plan.get("epochs"), "facts.epochs", "", False),
        ("tokens", plan.get("tokens_total"), "results.tokens", token_basis, not token_basis),
        (
            "trainable_parameters",
            plan.get("trainable_parameters"),
            "facts.trainable_parameters",
            "",
            True,
        ),
        ("train_s", time.get("estimate"), "results.train_s", time.get("basis", ""), False),
        (
            "peak_cuda_bytes" if gpu else "peak_rss_bytes",
            memory.get("estimate"),
            f"results.peak_{'cuda' if gpu else 'rss'}_bytes",
            memory.get("basis", ""),
            False,
        ),
    ]
    return [_compared(records, *row) for row in rows]


def components(memory: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The parts of a memory estimate, the largest first.

    Args:
        memory: the plan's ``memory_bytes``.
    """
    parts = memory.get("components") or {}
    return sorted(parts.items(), key=lambda part: (-part[1], part[0]))


def _compared(
    records: Records, key: str, planned: float | None, dotted: str, basis: str, exact: bool
) -> Compared:
    part, field = dotted.split(".")
    measured = getattr(records.manifest, part).get(field)
    label = "training time" if key == "train_s" else wording.label(key)
    known = bool(planned) and measured is not None
    ratio = measured / planned if known and planned else 0.0
    same = known and measured == planned
    return Compared(
        label=label,
        planned=_cell(label, planned, key, basis or "the plan has no value", "" if exact else "≈ "),
        measured=_cell(label, measured, key, records.why_absent(dotted)),
        ratio="as planned" if same else f"{ratio:.2f}" if known else "",
        near=known and abs(ratio - 1) <= _NEAR,
        basis=wording.visible(str(basis)),
    )


def _cell(label: str, value: Any, key: str, absent: str, prefix: str = "") -> Cell:
    if value is None:
        return Cell(label=label, absent=wording.visible(absent))
    return Cell(label=label, text=prefix + wording.as_text(value, key))


def _cells(records: Records, part: str, values: Mapping[str, Any]) -> list[Cell]:
    """One cell a leaf; a nested mapping's leaves follow each other under their own names."""
    cells = []
    for key in _ordered(values):
        value = values[key]
        dotted = f"{part}.{key}"
        if isinstance(value, Mapping):
            cells.extend(_nested(records, dotted, key, value))
        elif value is None:
            why = wording.visible(records.why_absent(dotted))
            cells.append(Cell(label=wording.label(key), absent=why))
        else:
            text = wording.as_text(value, key) or "none"
            code = any(part in key for part in _CODE_KEYS)
            cells.append(Cell(label=wording.label(key), text=text, code=code))
    return cells


def _ordered(keys: Iterable[str]) -> list[str]:
    """Known keys as `_ORDER` has them, then the others by name."""
    rank = {key: number for number, key in enumerate(_ORDER)}
    return sorted(set(keys), key=lambda key: (rank.get(key, len(rank)), key))


def _nested(records: Records, dotted: str, key: str, value: Mapping[str, Any]) -> list[Cell]:
    inner = _cells(records, dotted, value)
    return [
        Cell(
            label=f"{wording.label(key)}: {cell.label}",
            text=cell.text,
            absent=cell.absent,
            code=cell.code,
        )
        for cell in inner
    ]


def _attempt(number: int, attempt: Mapping[str, Any]) -> str:
    step = attempt.get("resumed_from_step")
    start = "from the beginning" if step is None else f"resumed from step {wording.count(step)}"
    ended = attempt.get("ended_utc")
    end = f"until {wording.moment(ended)}" if ended else "with no recorded end"
    status = wording.visible(str(attempt.get("status", "")))
    began = wording.moment(str(attempt.get("started_utc", "")))
    return f"Attempt {number}, {start}: {began} {end}, {status}"


def contract_cells(records: Records) -> list[Cell]:
    """Return the certificate of a run; nothing where it has none."""
    node = records.manifest.data_contract
    if node is None:
        return []
    unknown = node["unknown"]
    return [
        *_tokens(node["tokens"], unknown),
        *_rows(node["rows"]),
        *_overlap(node["overlap"], unknown),
        *_probe(node["probe"], unknown),
    ]


def contract_violations(records: Records) -> list[str]:
    """Return what the certificate refused."""
    node = records.manifest.data_contract
    return [wording.visible(line) for line in node["violations"]] if node else []


def contract_plan_lines(tokens: Mapping[str, Any], unknown: Mapping[str, str]) -> list[str]:
    """Return the token part in lines; nulls with their reasons."""
    return [f"{one.label}: {one.text or one.absent}" for one in _tokens(tokens, unknown)]


def _tokens(part: Mapping[str, Any], unknown: Mapping[str, str]) -> Iterator[Cell]:
    for key, words in (("tokens_by_role", "tokens by role"), ("trained_by_role", "trained")):
        counts = part[key]
        text = "" if counts is None else ", ".join(map(_of_role, counts, counts.values()))
        yield _contract_cell(words, text, unknown.get(f"tokens.{key}"))
    yield _contract_cell(
        "trained share", f"{_frac(part['trained_frac'])} of {wording.count(part['tokens'])} tokens"
    )
    yield _contract_cell("end marker trained", _end(part), unknown.get("tokens.end_marker_trained"))
    lost = f"{wording.count(part['trained_tokens_lost'])} tokens"
    yield _contract_cell(
        "lost to truncation", f"{lost} ({_frac(part['trained_tokens_lost_frac'])})"
    )
    nothing = f"{wording.count(part['nothing_to_learn'])} documents"
    yield _contract_cell("nothing to learn", f"{nothing} ({_frac(part['nothing_to_learn_frac'])})")
    cut = f"{wording.count(part['truncated'])} documents cut"
    yield _contract_cell("longest", f"{wording.count(part['longest'])} tokens, {cut}")


def _end(part: Mapping[str, Any]) -> str:
    trained = part["end_marker_trained"]
    if trained is None:
        return ""
    of = f"{wording.count(part['ends_trained'])} of {wording.count(part['ends'])} within the limit"
    share = f"{_frac(part['end_marker_trained_frac'])} of the documents"
    return f"{'yes' if trained else 'no'}, {of}, {share}"


def _rows(part: Mapping[str, Any]) -> Iterator[Cell]:
    both = part["rows_on_two_sides"] + len(part["groups_on_two_sides"])
    yield _contract_cell("on two sides of the split", wording.count(both) if both else "nothing")
    if part["conversations"]:
        again = f"{wording.count(part['repeated_answers'])} of "
        yield _contract_cell(
            "answers given again", f"{again}{wording.count(part['conversations'])} talks"
        )
    checked, otherwise = part["prompts_checked"], part["prompts_otherwise"]
    yield _contract_cell("prompts as in evaluation", f"{checked - otherwise} of {checked} compared")


def _overlap(parts: Sequence[Mapping[str, Any]], unknown: Mapping[str, str]) -> Iterator[Cell]:
    if not parts:
        yield _contract_cell("overlap", "", unknown.get("overlap"))
    for part in parts:
        items = wording.count(part["items"])
        yield _contract_cell(
            f"overlap with {part['against']}",
            f"{wording.count(part['contained'])} of {items} items are half or more in one row; "
            f"{wording.count(part['sharing'])} share a {part['ngram_words']}-gram of words with "
            f"{wording.count(part['rows_sharing'])} rows",
        )


def _probe(part: Mapping[str, Any] | None, unknown: Mapping[str, str]) -> Iterator[Cell]:
    if part is None:
        yield _contract_cell("probe", "", unknown.get("probe"))
        return
    yield _contract_cell("probe", f"{part['documents']} documents, {part['seconds']:.1f} s")
    shifted = "yes" if part["targets_follow"] else "no"
    yield _contract_cell(
        "labels shifted by one", f"{shifted}; {_moved(part['peek'])} by a last token"
    )
    for key, words in (
        ("together", "batch against its documents"),
        ("accumulation", "batch against micro-batches"),
    ):
        last = "hidden" if key == "together" else "gradient"
        loss, other = part[f"{key}_loss"], part[f"{key}_{last}"]
        text = "" if loss is None else f"loss {loss:.1e}, {last} {other:.1e} (relative)"
        yield _contract_cell(words, text, "there was one document")
    known = part.get("reference")
    text = (
        f"loss {known['loss']:.1e}, gradient {known['gradient']:.1e} (relative, f32)"
        if known
        else ""
    )
    absent = part.get("reference_unknown") or "recorded by an earlier version"
    yield _contract_cell("batch against transformers alone", text, absent)


def _moved(peek: float | None) -> str:
    return "not tried" if peek is None else f"moved {peek:.1e}"


def _of_role(role: str, count: int) -> str:
    return f"{wording.label(role).lower()} {wording.count(count)}"


def _frac(value: float) -> str:
    return wording.percent(value)


def _contract_cell(words: str, text: str, absent: str | None = None) -> Cell:
    return Cell(
        label=words,
        text=wording.visible(text),
        absent="" if text else wording.visible(absent or ""),
    )
