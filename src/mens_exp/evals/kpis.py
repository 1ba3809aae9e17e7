"""Events to the KPIs of a condition (REFERENCE section 10).

The denominator of every share is all samples of all items. What one item could not be measured
in, the condition cannot be, and is null with that item's reason.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.scorecard import ItemEvent

__all__ = ["KPIS", "pass_at_k", "percentile", "summarise"]

Kpis = dict[str, float | int | None]

# KPI -> the field of an event whose mean it is.
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
# KPIs that are shares or times of their own; see `summarise`.
_NO_K: Final = "eval.samples=1: there is no k above 1"
KPIS: Final = (
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


def summarise(
    events: Sequence[ItemEvent], *, items: int, samples: int, max_retries: int
) -> tuple[Kpis, dict[str, str]]:
    """Sum up the events of one condition.

    Args:
        events: one for each sample of each item.
        items: how many items the suite has.
        samples: how many samples each item has; `pass_at_k` has this k.
        max_retries: how many repairs an answer may have had.

    Returns:
        KPI -> value, and KPI that is null -> why.
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
        name = f"{group}_task_success"
        kpis[name] = _mean(mine, "task_success", name, unknown, len(mine))
    return kpis, unknown


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the chance that one of k samples is correct, without bias.

    Chen et al. 2021 (https://arxiv.org/abs/2107.03374), equation 1: 1 - C(n - c, k) / C(n, k).

    Args:
        samples: n, how many were drawn.
        correct: c, how many of them are correct.
        k: from 1 to n.
    """
    assert 1 <= k <= samples, f"k={k} of {samples}"
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile by linear interpolation between the two nearest values.

    Args:
        values: at least one.
        share: of values below, 0.5 for the median.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _passes(
    events: Sequence[ItemEvent], items: int, samples: int, kpis: Kpis, unknown: dict[str, str]
) -> None:
    """Add pass@1 and pass@k, of first attempts: a repaired answer is no sample of its own."""
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
    """Add what a linter found, where the suite lints: a mean over the answers that compile."""
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
    """Return a field of all events; None, with a reason, where one of them lacks it."""
    values = [event[field] for event in events]  # type: ignore[literal-required]
    lacking = sum(value is None for value in values)
    if values and not lacking:
        return values
    reason = _first_reason(events, field) or "not measured"
    unknown[name] = reason if lacking == len(values) else f"{lacking} of {len(values)}: {reason}"
    return None


def _first_reason(events: Sequence[ItemEvent], field: str) -> str | None:
    return next((e["unknown"][field] for e in events if field in e["unknown"]), None)
