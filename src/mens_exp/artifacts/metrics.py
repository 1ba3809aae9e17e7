"""The central table of metric names used by telemetry, sinks and reports.

A user's own metric is declared by its first use, or beforehand with its unit and direction::

    @declares("probe/entropy", unit="nats", direction="min")
    class EntropyProbe(Callback): ...
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from mens_exp.errors import MensError, RequestError, expected_name, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Declaring = TypeVar("_Declaring")
Direction = Literal["min", "max", "none"]
Reduction = Literal["last", "mean", "sum", "max", "min"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """The meaning of one number.

    Attributes:
        name: ``area/what``; the key in telemetry and in every sink.
        unit: unit of the value; ``1`` for a plain ratio or norm.
        direction: whether smaller or larger is better, or neither.
        reduction: how a run's series is reduced to one number.
        alias: name used by other tools; accepted by `metric`, never written.
        note: what is counted, in one clause.
    """

    name: str
    unit: str
    direction: Direction
    reduction: Reduction
    alias: tuple[str, ...] = ()
    note: str


_TABLE = (
    Metric(
        name="train/loss",
        unit="nats/token",
        direction="min",
        reduction="last",
        alias=("loss", "train_loss"),
        note="sum over the optimizer step's supervised tokens, divided by their count",
    ),
    Metric(
        name="train/base_loss",
        unit="nats/token",
        direction="none",
        reduction="last",
        note="that of the frozen base on the same tokens; recorded by schedule=lr_range",
    ),
    Metric(
        name="train/grad_norm",
        unit="1",
        direction="none",
        reduction="max",
        alias=("grad_norm",),
        note="2-norm over all adapter gradients, before clipping",
    ),
    Metric(
        name="optim/lr",
        unit="1",
        direction="none",
        reduction="last",
        alias=("lr", "learning_rate"),
        note="learning rate the step was taken with; Prodigy's times its estimate",
    ),
    Metric(
        name="data/tokens",
        unit="tokens",
        direction="none",
        reduction="last",
        alias=("num_input_tokens_seen",),
        note="cumulative, padding left out",
    ),
    Metric(
        name="data/supervised_tokens",
        unit="tokens",
        direction="none",
        reduction="last",
        note="cumulative, tokens that carry a label",
    ),
    Metric(
        name="data/epochs",
        unit="1",
        direction="none",
        reduction="last",
        alias=("epoch",),
        note="passes over the training rows; absent where rows are streamed",
    ),
    Metric(
        name="perf/step_s",
        unit="s",
        direction="min",
        reduction="mean",
        alias=("step_time",),
        note="wall time of one optimizer step, all its micro-batches included",
    ),
    Metric(
        name="perf/tokens_per_s",
        unit="tokens/s",
        direction="max",
        reduction="mean",
        alias=("tokens_per_second",),
        note="non-padding tokens over wall time",
    ),
    Metric(
        name="perf/supervised_tokens_per_s",
        unit="tokens/s",
        direction="max",
        reduction="mean",
        note="supervised tokens over wall time",
    ),
    Metric(
        name="perf/eta_s",
        unit="s",
        direction="none",
        reduction="last",
        alias=("eta",),
        note="time left at the recent rate",
    ),
    Metric(
        name="mem/rss_bytes",
        unit="bytes",
        direction="min",
        reduction="max",
        note="resident memory of the process now",
    ),
    Metric(
        name="mem/peak_rss_bytes",
        unit="bytes",
        direction="min",
        reduction="max",
        note="highest resident memory of the process",
    ),
    Metric(
        name="mem/peak_cuda_bytes",
        unit="bytes",
        direction="min",
        reduction="max",
        note="highest memory the CUDA allocator held; absent without a CUDA device",
    ),
    Metric(
        name="system/cpu_percent",
        unit="%",
        direction="none",
        reduction="mean",
        note="load of all processors of the machine since the step before",
    ),
    Metric(
        name="system/memory_percent",
        unit="%",
        direction="none",
        reduction="max",
        note="memory of the machine in use, by all processes",
    ),
    Metric(
        name="system/gpu_percent",
        unit="%",
        direction="none",
        reduction="mean",
        note="time in which the process's GPU computed, over the driver's last sample",
    ),
    Metric(
        name="system/gpu_memory_percent",
        unit="%",
        direction="none",
        reduction="max",
        note="memory of that GPU in use, by all processes",
    ),
    Metric(
        name="system/gpu_power_w",
        unit="W",
        direction="none",
        reduction="mean",
        note="power that the GPU draws, as its driver has it",
    ),
    Metric(
        name="val/loss",
        unit="nats/token",
        direction="min",
        reduction="last",
        alias=("eval_loss", "val_loss"),
        note="sum over the validation set's supervised tokens, divided by their count",
    ),
    Metric(
        name="val/supervised_tokens",
        unit="tokens",
        direction="none",
        reduction="last",
        note="tokens the validation loss is a mean of",
    ),
    Metric(
        name="val/bits_per_byte",
        unit="bits/byte",
        direction="min",
        reduction="last",
        alias=("bits_per_byte", "bpb", "val_bits_per_byte"),
        note="the same sum over the UTF-8 bytes that those tokens stand for; compares tokenizers",
    ),
)


def _during(name: str, direction: Direction, note: str, unit: str = "1") -> Metric:
    return Metric(
        name=f"eval/{name}",
        unit=unit,
        direction=direction,
        reduction="last",
        note=f"{note}; of the first items of the suite, while training runs",
    )


# Named as in the table of KPIs; a test compares unit and direction with it.
_DURING = (
    _during("parse_rate", "max", "share of answers that parse"),
    _during("compile_pass_1", "max", "share whose first attempt compiles"),
    _during("compile_pass_n", "max", "share that compiles after repairs"),
    _during("canonical_pass", "max", "share laid out as formatters do it"),
    _during("strictness", "max", "share that is code only"),
    _during("lint_clean", "max", "share that compiles and the linter finds nothing in"),
    _during("lint_warnings", "min", "mean of what the linter finds", "warnings"),
    _during("task_success", "max", "share that does the task"),
    _during("semantic_task_success", "max", "share that does it, and holds no place"),
    _during("pass_at_1", "max", "chance that one first attempt does the task"),
    _during("pass_at_k", "max", "chance that one of eval.samples first attempts does"),
    _during("anti_stub_pass", "max", "share that is neither trivial nor marked"),
    _during("richness", "max", "mean of statements that do something, 0 to 1"),
    _during("placeholder_marker_hits", "min", "mean of places left to write", "markers"),
    _during("trivial_placeholder_output", "min", "share of answers that only hold a place"),
    _during("repair_depth", "min", "mean number of the first valid attempt", "attempts"),
    _during("repair_stalled", "min", "share that repeats its errors"),
    _during("time_to_first_valid_ms", "min", "mean time to a valid answer", "ms"),
    _during("attempts", "min", "mean number of attempts", "attempts"),
    _during("latency_ms", "min", "mean time of generating an answer", "ms"),
    _during("tokens_in", "none", "mean tokens of a prompt", "tokens"),
    _during("tokens_out", "none", "mean tokens of an answer", "tokens"),
)
METRICS: dict[str, Metric] = {entry.name: entry for entry in (*_TABLE, *_DURING)}
BUILT_IN = frozenset(METRICS)  # those of objectives join the table when they are built
OF_OBJECTIVES = ("train", "val")  # the areas in which an objective's metrics are reported
_BY_ALIAS = {alias: entry for entry in _TABLE for alias in entry.alias}


def declare(metrics: Iterable[Metric]) -> None:
    """Add the metrics of an objective to the table, in both of its areas.

    Raises:
        MensError: there is another metric of that name.
    """
    for one in metrics:
        for area in OF_OBJECTIVES:
            entry = replace(one, name=f"{area}/{one.name}")
            if METRICS.setdefault(entry.name, entry) != entry:
                raise MensError(
                    "a metric of this name already exists",
                    where=f"metrics of an objective: {one.name}",
                    found=entry.name,
                    remedy="give it another name",
                )


def metric(name: str) -> Metric:
    """Return the metric with this name or alias.

    Raises:
        MensError: no such metric exists; the message suggests the nearest name.
    """
    found = METRICS.get(name) or _BY_ALIAS.get(name)
    if found is None:
        raise MensError(
            "unknown metric",
            found=name,
            expected=expected_name(name, METRICS),
            remedy="declare it in artifacts/metrics.py, or correct the name",
        )
    return found


_OWN: dict[str, Metric] = {}  # the user's metrics, by name
_ALIKE = 0.9  # similarity from which a name counts as a misspelling (unverified guess)
_USED = "declared by its first use"


def declares(
    name: str,
    *,
    unit: str = "1",
    direction: Direction = "none",
    reduction: Reduction = "last",
    note: str = "",
) -> Callable[[_Declaring], _Declaring]:
    """Declare a custom metric on the class or function that logs it.

    Reports, comparisons and sinks then know its unit and which direction is better. An undeclared
    metric has neither.

    Args:
        name: as it is logged; ``area/what`` by convention.
        unit: ``1`` for a plain ratio or count.
        direction: whether smaller (``min``) or larger (``max``) is better, or neither (``none``).
        reduction: how a run's values become one: ``last``, ``mean``, ``sum``, ``max`` or ``min``.
        note: what is counted, in one clause.

    Raises:
        RequestError: the name is one of ours, or direction or reduction is none of these.
    """
    for what, value, known in (
        ("direction", direction, get_args(Direction)),
        ("reduction", reduction, get_args(Reduction)),
    ):
        if value not in known:
            raise RequestError(
                f"unknown {what} of a metric",
                where=name,
                found=value,
                expected=expected_name(value, known),
            )
    _refuse_ours(name)
    _OWN[name] = Metric(name=name, unit=unit, direction=direction, reduction=reduction, note=note)
    return lambda declaring: declaring


def own_metric(name: str) -> Metric:
    """Return a user's metric; its first use declares it.

    Raises:
        RequestError: the name is one of ours, or looks like a misspelling of one.
    """
    found = _OWN.get(name)
    if found is not None:
        return found
    _refuse_ours(name)
    close = _misspelled(name)
    if close is not None:
        raise RequestError(
            "unknown metric",
            found=name,
            expected=f"a known name; the nearest is {close}",
            remedy=f'correct the name, or declare it: @declares("{name}", unit=…, direction=…)',
        )
    return _OWN.setdefault(
        name, Metric(name=name, unit="1", direction="none", reduction="last", note=_USED)
    )


def step_metric(name: str) -> Metric:
    """Return the metric that a step records: one of ours by name or alias, or the user's own.

    Raises:
        RequestError: a user's metric has no area in its name, or looks like a misspelling of ours.
    """
    found = METRICS.get(name) or _BY_ALIAS.get(name)
    if found is not None:
        return found
    if "/" not in name:
        raise RequestError(
            "metric names start with their area",
            where=name,
            expected=f"area/what, such as own/{name}; or {expected_name(name, METRICS)}",
        )
    return own_metric(name)


def mistaken(name: str, logged: Iterable[str]) -> str | None:
    """Return a correction for a metric that neither the run nor the user's code can log.

    Args:
        name: the metric that a setting refers to.
        logged: the metrics of the run itself that the setting may refer to.

    Returns:
        The name that was probably meant, or the first of ``logged`` for another built-in metric;
        None if the run or the user's code may log the metric.
    """
    names = [*logged, *_OWN]
    if name in names:
        return None
    close = nearest(name, names, cutoff=_ALIKE)
    if close is not None and _numbers(close) == _numbers(name):
        return close
    return names[0] if name in METRICS else None


def _refuse_ours(name: str) -> None:
    if name in METRICS:
        raise RequestError(
            "is already recorded by every run",
            where=name,
            expected="another name",
            remedy=f"log it as own/{name.rpartition('/')[2]}, say",
        )


def _misspelled(name: str) -> str | None:
    """Return the built-in name that was probably meant; it must have the same numbers.

    Lightning's own names, such as ``train_loss``, are the user's.
    """
    close = nearest(name, METRICS, cutoff=_ALIKE)
    if close is not None and name == close.replace("/", "_"):
        return None
    return close if close and _numbers(close) == _numbers(name) else None


def _numbers(name: str) -> list[str]:
    return re.findall(r"\d+", name)


def declaration(name: str) -> dict[str, Any] | None:
    """Return a metric's declaration for a record, whose readers may lack the code.

    A built-in metric needs none and yields None.

    Raises:
        MensError: no such metric exists.
    """
    if name in BUILT_IN:
        return None
    own = _OWN.get(name) or metric(name)
    return {name: value for name, value in asdict(own).items() if name != "alias"}


def reduced(values: Iterable[float | None], reduction: str) -> float | None:
    """Reduce a series to one number; None if it has no value."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    match reduction:
        case "mean":
            return math.fsum(known) / len(known)
        case "sum":
            return math.fsum(known)
        case "max":
            return max(known)
        case "min":
            return min(known)
        case _:
            return known[-1]
