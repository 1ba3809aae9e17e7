"""KPIs: the central table of their meanings and directions, and their values per condition.

The denominator of every share is all samples of all items (REFERENCE section 10). If one item could
not be measured, the condition's KPI is null, with that item's reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from mens_exp.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mens_exp.artifacts.scorecard import ItemEvent


class KpiGroup(StrEnum):
    """The subject of a KPI; OTHER is for KPIs that only a suite defines.

    The group matters for promotions: ``policy=burn_production`` allows no KPI of the groups SYNTAX,
    SEMANTIC and REPAIR to get worse.
    """

    SYNTAX = "syntax"
    SEMANTIC = "semantic"
    REPAIR = "repair"
    LOSS = "loss"
    COST = "cost"
    DATA = "data"
    OTHER = "other"


class Direction(StrEnum):
    """The better direction; NONE for a neutral quantity."""

    MAX = "max"
    MIN = "min"
    NONE = "none"


class Missing(StrEnum):
    """The treatment of items without a value, if other items of the run have one.

    ``FAILS`` counts them as 0, and ``ABSENT`` excludes them, because the quantity exists only for
    some items (such as the time to the first valid answer).
    """

    FAILS = "fails"
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kpi:
    """One KPI.

    Attributes:
        name: its key in comparisons, policies and reports.
        group: its subject.
        direction: the better direction.
        unit: unit of the value; ``1`` for a share.
        field: field of an item's line in events.jsonl; None for a KPI of a whole run.
        missing: treatment of an item without a value.
        results: manifest fields of the tuned model, of which the first existing one counts; the
            base model's have ``base_`` instead of ``tuned_``.
        keys: keys of a scorecard's condition, for suites that state the KPI only as an aggregate.
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
_SLIP = 0.9  # minimum similarity (difflib) of a typing error: one letter in ten
# Measured during generation, and not recoverable from the answers.
_MEASURED = frozenset({"tokens_in", "tokens_out", "latency_ms", "time_to_first_valid_ms"})
_TAKEN = {
    KpiGroup.COST: "costs",
    KpiGroup.DATA: "shares of the data",
    KpiGroup.LOSS: "losses",
}
_BY_FIELD = {kpi.field: kpi for kpi in _TABLE if kpi.field is not None}


def as_recorded(names: Collection[str]) -> list[str]:
    """List the groups of KPIs that cannot be recomputed from answers, so the record is trusted.

    Args:
        names: KPIs of a comparison.
    """
    found = {
        _TAKEN.get(kpi.group, "times")
        for name, kpi in KPIS.items()
        if name in names and (kpi.field is None or name in _MEASURED)
    }
    *others, last = sorted(found) or [""]
    named = f"{', '.join(others)} and {last}" if others else last
    return [f"unverifiable: {named} are taken as recorded"] if found else []


def misspelt(name: str) -> str | None:
    """Return the KPI that an unknown name probably means; None for a user-defined metric.

    Suites and runs may have metrics that are not in the table, so only a close match counts.
    """
    return None if name in KPIS else nearest(name, KPIS, cutoff=_SLIP)


def kpi_like(name: str) -> str | None:
    """Return the built-in KPI or item field that a user-defined KPI would be mistaken for."""
    ours = {*KPIS, *_BY_KEY, *_BY_FIELD, *_OF_ITEM, *SUMMARY_KPIS}
    return name if name in ours else nearest(name, ours, cutoff=_SLIP)


def kpi_of_field(field: str) -> Kpi | None:
    """Return the KPI with an item's field; None if there is none in the table."""
    return _BY_FIELD.get(field)


_BY_KEY = {key: kpi for kpi in _TABLE for key in kpi.keys}
# Fields of one answer shown to a reader: measurements in the order of the groups, then causes.
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
"""Names of the values shown for one answer, in order; KPIs under their names in the table."""


def name_of_key(key: str) -> str:
    """Return the table's name for a scorecard's key; an unknown key is returned unchanged."""
    kpi = _BY_KEY.get(key)
    return key if kpi is None else kpi.name


def name_under(condition: str, name: str) -> str:
    """Return a KPI's name with its condition as prefix; a whole run's KPI has no condition."""
    kpi = KPIS.get(name, _BY_KEY.get(name))
    if kpi is None or kpi.field or kpi.keys or any("tuned_" in one for one in kpi.results):
        return f"{condition}/{name_of_key(name)}"
    return name


def item_values(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one line of events.jsonl, with the KPIs' names in the table."""
    values = (event.get(field) for field in _OF_ITEM)
    return dict(zip(ITEM_VALUES, values, strict=True))


Kpis = dict[str, float | int | None]

# KPI -> the event field that it averages.
_MEANS: Final = {
    "parse_rate": "parses",
    "compile_at_1": "compile_pass_1",
    "compile_at_n": "compile_pass_n",
    "canonical": "canonical_pass",
    "strictness": "strictness",
    "task_success": "task_success",
    "semantic_task_success": "semantic_task_success",
    "anti_stub": "anti_stub_pass",
    "trivial_placeholder": "trivial_placeholder_output",
    "richness": "richness",
    "attempts_mean": "attempts",
    "errors_mean": "error_count",
    "tokens_in_mean": "tokens_in",
    "tokens_out_mean": "tokens_out",
}
_NO_K: Final = "eval.samples=1: there is no k above 1"
# In addition to the means, KPIs that `summarise` computes separately.
SUMMARY_KPIS: Final = (
    *_MEANS,
    *(
        "parsed",
        "completed",
        "placeholder",
        "pass_at_1",
        "pass_at_k",
        "repair_depth_mean",
        "repair_stall_rate",
    ),
    *("time_to_first_valid_p50_ms", "latency_p50_ms", "latency_p95_ms"),
)


def group_kpi(group: str) -> str:
    """Return the name of the task success of a group of a suite."""
    return f"{group}_task_success"


def summarise(
    events: Sequence[ItemEvent], *, items: int, samples: int, max_retries: int
) -> tuple[Kpis, dict[str, str]]:
    """Aggregate the events of one condition.

    Args:
        events: one for each sample of each item.
        items: number of items of the suite.
        samples: number of samples per item, the k of `pass_at_k`.
        max_retries: maximum number of repairs of an answer.

    Returns:
        KPI -> value, and null KPI -> reason.
    """
    kpis: Kpis = {}
    unknown: dict[str, str] = {}
    asked = items * samples
    for name, field in _MEANS.items():
        kpis[name] = _mean(events, field, name, unknown, asked)
    parsed = kpis["parse_rate"]
    kpis["parsed"] = None if parsed is None else sum(bool(event["parses"]) for event in events)
    if parsed is None:
        unknown["parsed"] = unknown["parse_rate"]
    kpis["completed"] = sum(event["finished"] for event in events)
    hits = _known(events, "placeholder_marker_hits", "placeholder", unknown)
    kpis["placeholder"] = None if hits is None else sum(one > 0 for one in hits) / asked
    _passes(events, items, samples, kpis, unknown)
    _repairs(events, max_retries, kpis, unknown, asked)
    for name, field, share in (
        ("time_to_first_valid_p50_ms", "time_to_first_valid_ms", 0.5),
        ("latency_p50_ms", "latency_ms", 0.5),
        ("latency_p95_ms", "latency_ms", 0.95),
    ):
        known = [value for e in events if (value := e[field]) is not None]  # type: ignore[literal-required]
        kpis[name] = percentile(known, share) if known else None
        if not known:
            unknown[name] = _first_reason(events, field) or "no answer is valid"
    _lints(events, kpis, unknown, asked)
    for group in sorted({event["group"] for event in events} - {""}):
        mine = [event for event in events if event["group"] == group]
        name = group_kpi(group)
        kpis[name] = _mean(mine, "task_success", name, unknown, len(mine))
    return kpis | _own(events), unknown


def _own(events: Sequence[ItemEvent]) -> Kpis:
    """Return the KPIs of a user-defined suite, each a mean over the answers that have it."""
    every: dict[str, list[float]] = {}
    for event in events:
        for name, value in (event.get("values") or {}).items():
            every.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in every.items()}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: the chance that one of k samples is correct.

    Chen et al. 2021 (https://arxiv.org/abs/2107.03374), equation 1: 1 - C(n - c, k) / C(n, k).

    Args:
        samples: n, the number of samples.
        correct: c, the number of correct ones.
        k: from 1 to n.
    """
    assert 1 <= k <= samples, f"k={k} of {samples}"
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile by linear interpolation between the two nearest values.

    Args:
        values: at least one.
        share: share of values below it; 0.5 for the median.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _passes(
    events: Sequence[ItemEvent], items: int, samples: int, kpis: Kpis, unknown: dict[str, str]
) -> None:
    """Add pass@1 and pass@k over first attempts: a repair is not an independent sample."""
    if _known(events, "pass_1", "pass_at_1", unknown) is None:
        kpis["pass_at_1"] = kpis["pass_at_k"] = None
        unknown["pass_at_k"] = unknown["pass_at_1"]
        return
    correct: dict[str, int] = {}
    for event in events:
        correct[event["item_id"]] = correct.get(event["item_id"], 0) + bool(event["pass_1"])
    for name, k in (("pass_at_1", 1), ("pass_at_k", samples)):
        kpis[name] = sum(pass_at_k(samples, c, k) for c in correct.values()) / items
    if samples == 1:
        kpis["pass_at_k"] = None
        unknown["pass_at_k"] = _NO_K


def _lints(events: Sequence[ItemEvent], kpis: Kpis, unknown: dict[str, str], asked: int) -> None:
    """Add the linter's KPIs if the suite lints: means over the answers that compile."""
    if not any("lint_clean" in event for event in events):
        return
    kpis["lint_clean"] = _mean(events, "lint_clean", "lint_clean", unknown, asked)
    counts = [count for event in events if (count := event.get("lint_warnings")) is not None]
    kpis["lint_warnings_mean"] = sum(counts) / len(counts) if counts else None
    if not counts:
        unknown["lint_warnings_mean"] = (
            _first_reason(events, "lint_warnings") or "no answer compiles"
        )


def _repairs(
    events: Sequence[ItemEvent],
    max_retries: int,
    kpis: Kpis,
    unknown: dict[str, str],
    asked: int,
) -> None:
    for name in ("repair_depth_mean", "repair_stall_rate"):
        kpis[name] = None
    if not max_retries:
        unknown["repair_depth_mean"] = unknown["repair_stall_rate"] = (
            "eval.max_retries=0: nothing is repaired"
        )
        return
    kpis["repair_stall_rate"] = _mean(events, "repair_stalled", "repair_stall_rate", unknown, asked)
    depths = [depth for event in events if (depth := event["repair_depth"]) is not None]
    if depths:
        kpis["repair_depth_mean"] = sum(depths) / len(depths)
    else:
        unknown["repair_depth_mean"] = "no answer became valid"


def _mean(
    events: Sequence[ItemEvent], field: str, name: str, unknown: dict[str, str], asked: int
) -> float | None:
    known = _known(events, field, name, unknown)
    return None if known is None else sum(known) / asked


def _known(
    events: Sequence[ItemEvent], field: str, name: str, unknown: dict[str, str]
) -> list[float] | None:
    """Return a field of all events; None, with a reason, if one of them lacks it."""
    values = [event[field] for event in events]  # type: ignore[literal-required]
    lacking = sum(value is None for value in values)
    if values and not lacking:
        return values
    reason = _first_reason(events, field) or "not measured"
    unknown[name] = reason if lacking == len(values) else f"{lacking} of {len(values)}: {reason}"
    return None


def _first_reason(events: Sequence[ItemEvent], field: str) -> str | None:
    return next((e["unknown"][field] for e in events if field in e["unknown"]), None)
