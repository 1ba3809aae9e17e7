"""The tables of a report: facts, inputs, environment, and the plan beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.report import wording
from mens_exp.report.summary import Cell

if TYPE_CHECKING:
    from mens_exp.report.records import Records

__all__ = [
    "Compared",
    "attempts",
    "compared",
    "components",
    "environment",
    "facts",
    "inputs",
    "outputs",
    "scores",
]

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
_FOR_MACHINES = ("lora_init_layers_sha256",)  # hundreds of lines that nobody compares by eye
_DIFFERENCES = "differs_from_default"
_NEAR = 0.1  # a prediction this close to the measurement is called near


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One planned quantity beside what was measured.

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
    apart = (*_FOR_MACHINES, _DIFFERENCES)
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


def compared(records: Records) -> list[Compared]:
    """The plan beside the measurements; empty when there is no plan."""
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
