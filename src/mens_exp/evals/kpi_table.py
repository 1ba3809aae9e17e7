"""The one table of KPIs: what each means, which way is better, and where its values are read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = [
    "ITEM_VALUES",
    "KPIS",
    "Direction",
    "Kpi",
    "KpiGroup",
    "Missing",
    "as_recorded",
    "item_values",
    "kpi_of_field",
    "name_of_key",
    "name_under",
]


class KpiGroup(StrEnum):
    """The subject of a KPI; OTHER is for those that only a suite knows."""

    SYNTAX = "syntax"
    SEMANTIC = "semantic"
    REPAIR = "repair"
    LOSS = "loss"
    COST = "cost"
    DATA = "data"
    OTHER = "other"


class Direction(StrEnum):
    """The better direction; a count that is neither good nor bad has NONE."""

    MAX = "max"
    MIN = "min"
    NONE = "none"


class Missing(StrEnum):
    """The value that counts for an item without one, if other items of the run have one.

    ``FAILS`` is 0 under the denominator of all items; ``ABSENT`` leaves the item out, because the
    quantity exists for some items only (how long until the first valid answer, say).
    """

    FAILS = "fails"
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kpi:
    """One KPI.

    Attributes:
        name: its key in comparisons, policies and reports.
        group: what it speaks of.
        direction: which way is better.
        unit: of the value; ``1`` for a share.
        field: of one item's line in events.jsonl; None for what a run has as a whole.
        missing: what an item without a value counts as.
        results: manifest fields of the tuned model, the first that is there counts; ``base_`` in
            the place of ``tuned_`` is the base model's.
        keys: of a scorecard's condition, for a suite that states the KPI for all items alone.
    """

    name: str
    group: KpiGroup
    direction: Direction
    unit: str = "1"
    field: str | None = None
    missing: Missing = Missing.FAILS
    results: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def _share(
    name: str, group: KpiGroup, field: str | None = None, *, keys: tuple[str, ...] = ()
) -> Kpi:
    return Kpi(
        name=name, group=group, direction=Direction.MAX, field=field or name, keys=(name, *keys)
    )


def _least(
    name: str,
    group: KpiGroup,
    unit: str = "1",
    missing: Missing = Missing.ABSENT,
    *,
    key: str = "",
) -> Kpi:
    return Kpi(
        name=name,
        group=group,
        direction=Direction.MIN,
        unit=unit,
        field=name,
        missing=missing,
        keys=(key,) if key else (),
    )


def _of_run(name: str, group: KpiGroup, direction: Direction, unit: str, *results: str) -> Kpi:
    return Kpi(name=name, group=group, direction=direction, unit=unit, results=results)


_TABLE = (
    _share("parse_rate", KpiGroup.SYNTAX, "parses"),
    _share("compile_pass_1", KpiGroup.SYNTAX, keys=("compile_at_1",)),
    _share("compile_pass_n", KpiGroup.SYNTAX, keys=("compile_at_n",)),
    _share("canonical_pass", KpiGroup.SYNTAX, keys=("canonical",)),
    _share("strictness", KpiGroup.SYNTAX),
    _share("lint_clean", KpiGroup.SYNTAX),
    _least("lint_warnings", KpiGroup.SYNTAX, "warnings", key="lint_warnings_mean"),
    _share("task_success", KpiGroup.SEMANTIC),
    _share("semantic_task_success", KpiGroup.SEMANTIC),
    _share("pass_at_1", KpiGroup.SEMANTIC, "pass_1"),
    _share("pass_at_k", KpiGroup.SEMANTIC),
    _share("anti_stub_pass", KpiGroup.SEMANTIC, keys=("anti_stub",)),
    _share("richness", KpiGroup.SEMANTIC),
    _share("coverage", KpiGroup.SEMANTIC),
    _least("placeholder_marker_hits", KpiGroup.SEMANTIC, "markers"),
    _least("trivial_placeholder_output", KpiGroup.SEMANTIC, key="trivial_placeholder"),
    _least("repair_depth", KpiGroup.REPAIR, "attempts", key="repair_depth_mean"),
    _least("repair_stalled", KpiGroup.REPAIR, key="repair_stall_rate"),
    _least("time_to_first_valid_ms", KpiGroup.REPAIR, "ms"),
    _least("attempts", KpiGroup.REPAIR, "attempts", key="attempts_mean"),
    _least("latency_ms", KpiGroup.COST, "ms"),
    Kpi(
        name="tokens_in",
        group=KpiGroup.COST,
        direction=Direction.NONE,
        unit="tokens",
        field="tokens_in",
        missing=Missing.ABSENT,
        keys=("tokens_in_mean",),
    ),
    Kpi(
        name="tokens_out",
        group=KpiGroup.COST,
        direction=Direction.NONE,
        unit="tokens",
        field="tokens_out",
        missing=Missing.ABSENT,
        keys=("tokens_out_mean",),
    ),
    _of_run("val_loss", KpiGroup.LOSS, Direction.MIN, "nats/token", "results.tuned_val_loss"),
    _of_run(
        "val_bits_per_byte",
        KpiGroup.LOSS,
        Direction.MIN,
        "bits/byte",
        "results.tuned_val_bits_per_byte",
    ),
    _of_run("tokens", KpiGroup.COST, Direction.NONE, "tokens", "results.tokens"),
    _of_run("train_s", KpiGroup.COST, Direction.MIN, "s", "results.train_s"),
    _of_run("tokens_per_s", KpiGroup.COST, Direction.MAX, "tokens/s", "results.tokens_per_s"),
    _of_run(
        "peak_bytes",
        KpiGroup.COST,
        Direction.MIN,
        "bytes",
        "results.peak_cuda_bytes",
        "results.peak_rss_bytes",
    ),
    _of_run(
        "trainable_parameters",
        KpiGroup.COST,
        Direction.NONE,
        "parameters",
        "facts.trainable_parameters",
    ),
    Kpi(name="supervised_frac", group=KpiGroup.DATA, direction=Direction.MAX),
    Kpi(name="truncated_frac", group=KpiGroup.DATA, direction=Direction.MIN),
)

KPIS: dict[str, Kpi] = {kpi.name: kpi for kpi in _TABLE}
# Counted or timed while answers were made, which no answer tells afterwards.
_MEASURED = frozenset({"tokens_in", "tokens_out", "latency_ms", "time_to_first_valid_ms"})
_BY_FIELD = {kpi.field: kpi for kpi in _TABLE if kpi.field is not None}


def as_recorded(names: Collection[str]) -> list[str]:
    """Name the KPIs that no answer gives, so that they are taken as they were recorded.

    Args:
        names: KPIs of a comparison.
    """
    found = [
        name
        for name, kpi in KPIS.items()
        if name in names and (kpi.field is None or name in _MEASURED)
    ]
    return [f"unverifiable: {', '.join(found)} are taken as recorded"] if found else []


def kpi_of_field(field: str) -> Kpi | None:
    """Return the KPI that an item's field is of, None where the table has none."""
    return _BY_FIELD.get(field)


_BY_KEY = {key: kpi for kpi in _TABLE for key in kpi.keys}
# Of one answer, for a reader: what it measured, in the order of the groups, then why.
_OF_ITEM: Final = (
    *("parses", "compile_pass_1", "compile_pass_n", "canonical_pass", "strictness"),
    *("pass_1", "task_success", "semantic_task_success", "anti_stub_pass", "richness"),
    *("placeholder_marker_hits", "trivial_placeholder_output"),
    *("attempts", "repair_depth", "repair_stalled", "time_to_first_valid_ms", "latency_ms"),
    *("error", "error_count", "outcome", "style"),
)
ITEM_VALUES: Final = tuple(
    field if field not in _BY_FIELD else _BY_FIELD[field].name for field in _OF_ITEM
)
"""Names of what a reader is shown of one answer, in order; KPIs under the table's."""


def name_of_key(key: str) -> str:
    """Return the table's name for a scorecard's key; one that the table lacks stays as it is."""
    kpi = _BY_KEY.get(key)
    return key if kpi is None else kpi.name


def name_under(condition: str, name: str) -> str:
    """Return a KPI's name under a condition; what a run has as a whole is of none."""
    kpi = KPIS.get(name, _BY_KEY.get(name))
    if kpi is None or kpi.field or kpi.keys or any("tuned_" in one for one in kpi.results):
        return f"{condition}/{name_of_key(name)}"
    return name


def item_values(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one line of events.jsonl says of its answer, KPIs under the table's names."""
    values = (event.get(field) for field in _OF_ITEM)
    return dict(zip(ITEM_VALUES, values, strict=True))
