"""The time of a run: operations by formula, divided by a measured rate.

The rate is this machine's own where the ledger knows it, else one measured on another CPU. No
rate has been measured for a GPU; until a run on it is in the ledger its time is unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.objective import LastKObjective
from mens_exp.config.quant import ComputeDtype, QuantType
from mens_exp.plan.machine import cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.objective import ObjectiveConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape
    from mens_exp.plan.ledger import Entry, Residuals

__all__ = [
    "Pace",
    "comparison_s",
    "flop_per_token",
    "learned_frac",
    "pace_of",
    "proxy_flop_per_token",
    "quantization_s",
    "time",
]

# measured: benchmarks/throughput.py, SmolLM2-135M on two AVX512-BF16 cores
_FLOPS_PER_CORE = {ComputeDtype.bf16: 1.4e11, ComputeDtype.f32: 4.0e10}
_SUPERVISED = 0.5  # share of tokens that the head runs on, as in the main job
_TABLE_SPREAD = 2.0  # another CPU may be so many times faster or slower; unverified guess
# measured: bitsandbytes 0.50, NF4 with double quantization, weights a second on one EPYC core;
# eight bits took 5.6 times as many as NF4 in the same minute
_QUANTIZED_PER_CORE_S = {
    QuantType.nf4: 6e6,
    QuantType.fp4: 6e6,
    QuantType.int8: 3.4e7,
    QuantType.none: math.inf,
}
# measured: the comparison with transformers before step 1, SmolLM2 (106 M linear weights) on one
# core: 10 s, most of them for unpacking each weight twice
_COMPARED_PER_CORE_S = 1.1e7
# measured: SmolLM2's stack (38.3 M weights), forward and backward in bf16: 4, 64, 512 and 1,024
# positions took 0.19, 0.25, 0.82 and 1.67 s of processor time on a busy machine, so 0.19 s for
# unpacking and 1.1e11 to 1.2e11 operations a second of a core beyond it, near the table's rate.
_PROXY_POSITIONS = 154  # that the unpacking of a micro-batch costs as much as
_PROXY_SPREAD = 3.0  # unverified guess


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Operations a second, with an interval and what it rests on; None where nothing is known."""

    rate: float | None
    low: float | None
    high: float | None
    runs: int
    basis: str

    def of_several(self, processes: int, kind: str) -> Pace:
        """Return the rate of several together: GPUs add up, processes of a CPU share its cores."""
        if kind == "cpu" or processes == 1 or self.rate is None:
            return self
        low, high = self.low or self.rate, self.high or self.rate
        return replace(
            self,
            rate=self.rate * processes,
            low=low * processes,
            high=high * processes,
            basis=f"{self.basis}, {processes} times over, as if none waited for another",
        )


def flop_per_token(
    shape: Shape, adapter: int, *, linears: int | None = None, again: bool = False
) -> float:
    """Return training operations for one token.

    Forward and the gradient of the inputs for frozen weights (2 + 2 a weight), all three products
    for LoRA's (6); the head runs on the supervised tokens alone. Attention scores are left out.

    Args:
        shape: dimensions of the base.
        adapter: trained parameters.
        linears: weights of the linear layers that a token goes through; None is all of them.
        again: whether activations are computed again.
    """
    through = shape.linear_parameters if linears is None else linears
    head = shape.vocab_size * shape.hidden_size
    twice = 2 * (through + adapter) if again else 0
    return twice + 4 * through + 6 * adapter + 4 * head * _SUPERVISED


def proxy_flop_per_token(
    weights: int, adapter: int, *, learned_frac: float, micro_batch_tokens: int
) -> float:
    """Return the proxy's training operations for one token of the stream.

    It computes learned positions alone, 4 a frozen weight and 6 an adapter's; unpacking the
    weights of each micro-batch costs as much as some positions more.

    Args:
        weights: of the stack, its head included.
        adapter: trained parameters.
        learned_frac: share of the tokens that are learned.
        micro_batch_tokens: tokens of one micro-batch.
    """
    positions = learned_frac + _PROXY_POSITIONS / micro_batch_tokens
    return positions * (4 * weights + 6 * adapter)


def learned_frac(objective: ObjectiveConfig, typical: float) -> float:
    """Estimate the share of tokens that an objective learns.

    Args:
        objective: the `objective` group.
        typical: tokens of a document.
    """
    if isinstance(objective, LastKObjective) and objective.k:
        return min(1.0, objective.k / typical)
    return 1.0 if objective.labels == "causal" else _SUPERVISED


def pace_of(config: RunConfig, kind: str, known: Sequence[Entry], spread: Residuals | None) -> Pace:
    """Return the rate of a device.

    Args:
        config: the run.
        kind: ``cpu`` or ``cuda``.
        known: the ledger's runs of like size on this device.
        spread: interval of the ratio of their rates to the last of them, with enough of them.
    """
    rates = [
        one.flop_per_step / one.measured_step_s
        for one in known
        if one.flop_per_step and one.measured_step_s
    ]
    if rates and spread is not None:
        last = rates[-1]
        return Pace(
            rate=last * spread.centre,
            low=last * spread.low,
            high=last * spread.high,
            runs=len(rates),
            basis=f"the rate of {len(rates)} earlier runs of like size",
        )
    if rates:
        return Pace(
            rate=rates[-1],
            low=rates[-1] / _TABLE_SPREAD,
            high=rates[-1] * _TABLE_SPREAD,
            runs=len(rates),
            basis=f"the rate of the last of {len(rates)} earlier runs of like size",
        )
    if kind != "cpu":
        reason = "unknown: no rate has been measured for a GPU; the first run here measures one"
        return Pace(rate=None, low=None, high=None, runs=0, basis=reason)
    rate = _FLOPS_PER_CORE[config.quant.compute_dtype] * cores()
    is_proxy = isinstance(config.backend, ProxyConfig)
    wide = _PROXY_SPREAD if is_proxy else _TABLE_SPREAD
    return Pace(
        rate=rate,
        low=rate / wide,
        high=rate * wide,
        runs=0,
        basis=f"training and validation{' of learned positions alone' if is_proxy else ''} "
        f"on {cores()} CPU cores at a rate measured on AVX512-BF16",
    )


def time(
    pace: Pace, per_token: float, tokens: int | None, validated: float, tokens_per_step: int
) -> dict[str, Any]:
    """Estimate seconds of training and validation, and of one optimizer step.

    Args:
        pace: the rate.
        per_token: training operations a token.
        tokens: tokens to train on; None when only max_epochs over uncounted data bounds them.
        validated: tokens to validate on, before and after together.
        tokens_per_step: tokens in one optimizer step.
    """
    rate = pace.rate
    if rate is None:
        return {"estimate": None, "low": None, "high": None, "step_s": None, "basis": pace.basis}
    step = round(tokens_per_step * per_token / rate, 3)
    if tokens is None:
        reason = "unknown: max_epochs over data not counted yet"
        return {"estimate": None, "low": None, "high": None, "step_s": step, "basis": reason}
    work = (tokens + validated / 2) * per_token  # a forward pass is about half of training
    return {
        "estimate": round(work / rate, 1),
        "low": round(work / (pace.high or rate), 1),
        "high": round(work / (pace.low or rate), 1),
        "step_s": step,
        "basis": pace.basis,
    }


def quantization_s(shape: Shape, kind: str, to: QuantType) -> float | None:
    """Estimate seconds of quantizing the base; unknown on a GPU, where it was never measured."""
    if kind != "cpu":
        return None
    return round(shape.linear_parameters / (_QUANTIZED_PER_CORE_S[to] * cores()), 1)


def comparison_s(shape: Shape, kind: str) -> float | None:
    """Estimate seconds of the comparison with transformers; unknown on a GPU, never measured there.

    Its 4 x 64 tokens take less than the weights, so that they do not count.
    """
    if kind != "cpu":
        return None
    return round(shape.linear_parameters / (_COMPARED_PER_CORE_S * cores()), 1)
