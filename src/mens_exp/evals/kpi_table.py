"""The one table of KPIs: what each means, which way is better, and where its values are read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["KPIS", "Direction", "Kpi", "KpiGroup", "Missing", "kpi_of_field"]


class KpiGroup(StrEnum):
    """What a KPI speaks of; OTHER is what only a suite knows."""

    SYNTAX = "syntax"
    SEMANTIC = "semantic"
    REPAIR = "repair"
    LOSS = "loss"
    COST = "cost"
    DATA = "data"
    OTHER = "other"


class Direction(StrEnum):
    """Which way is better; a count that is neither good nor bad has NONE."""

    MAX = "max"
    MIN = "min"
    NONE = "none"


class Missing(StrEnum):
    """What an item without a value counts as, where other items of the run have one.

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
    name: str, group: KpiGroup, unit: str = "1", missing: Missing = Missing.ABSENT, key: str = ""
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
    _share("canonical_pass", KpiGroup.SYNTAX),
    _share("strictness", KpiGroup.SYNTAX),
    _share("task_success", KpiGroup.SEMANTIC),
    _share("semantic_task_success", KpiGroup.SEMANTIC),
    _share("pass_at_1", KpiGroup.SEMANTIC),
    _share("pass_at_k", KpiGroup.SEMANTIC),
    _share("anti_stub_pass", KpiGroup.SEMANTIC),
    _share("richness", KpiGroup.SEMANTIC),
    _share("coverage", KpiGroup.SEMANTIC),
    _least("placeholder_marker_hits", KpiGroup.SEMANTIC, "markers"),
    _least("trivial_placeholder_output", KpiGroup.SEMANTIC),
    _least("repair_depth", KpiGroup.REPAIR, "attempts", key="repair_depth_mean"),
    _least("repair_stalled", KpiGroup.REPAIR, key="repair_stall_rate"),
    _least("time_to_first_valid_ms", KpiGroup.REPAIR, "ms"),
    _least("attempts", KpiGroup.REPAIR, "attempts"),
    _least("latency_ms", KpiGroup.COST, "ms"),
    Kpi(
        name="tokens_in",
        group=KpiGroup.COST,
        direction=Direction.NONE,
        unit="tokens",
        field="tokens_in",
        missing=Missing.ABSENT,
    ),
    Kpi(
        name="tokens_out",
        group=KpiGroup.COST,
        direction=Direction.NONE,
        unit="tokens",
        field="tokens_out",
        missing=Missing.ABSENT,
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
_BY_FIELD = {kpi.field: kpi for kpi in _TABLE if kpi.field is not None}


def kpi_of_field(field: str) -> Kpi | None:
    """Return the KPI that an item's field is of, None where the table has none."""
    return _BY_FIELD.get(field)
