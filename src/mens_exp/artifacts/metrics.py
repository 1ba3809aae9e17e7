"""The one table of metric names that telemetry, sinks and reports share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mens_exp.artifacts.nearest import expected_name
from mens_exp.errors import MensError

__all__ = ["METRICS", "Metric", "metric"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What one number means.

    Attributes:
        name: ``area/what``; the key in telemetry and in every sink.
        unit: of the value; ``1`` for a plain ratio or norm.
        direction: whether smaller or larger is better, or neither.
        reduction: how a run's series becomes one number.
        alias: what other tools call it; looked up by `metric`, never written.
        note: what is counted, in one clause.
    """

    name: str
    unit: str
    direction: Literal["min", "max", "none"]
    reduction: Literal["last", "mean", "sum", "max"]
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
        note="learning rate the step was taken with",
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
    Metric(
        name="suite/parse_rate",
        unit="1",
        direction="max",
        reduction="last",
        alias=("parse_rate",),
        note="share of the suite's completions that parse",
    ),
)

METRICS: dict[str, Metric] = {entry.name: entry for entry in _TABLE}
_BY_ALIAS = {alias: entry for entry in _TABLE for alias in entry.alias}


def metric(name: str) -> Metric:
    """Return the metric of this name or alias.

    Raises:
        MensError: no metric is called so; the message names the nearest.
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
