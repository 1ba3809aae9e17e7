"""Estimate the time of a run: operations by formula, divided by a measured rate, then corrected.

A local ledger file has one line per finished run, with predictions and measurements. A prediction
is corrected by runs of similar size on the same device and backend: by the formula's error for
them, and by their measured rate. Without such runs, a rate measured on another CPU is used. No
rate has been measured for a GPU; the time is unknown until the ledger contains a run on it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.atomic import json_line
from mens_exp.artifacts.host import file_lock
from mens_exp.config.backend import ProxyConfig
from mens_exp.config.quant import ComputeDtype
from mens_exp.planning.machine import cores

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.config.quant import QuantizerSpec
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape

_FORMAT, _VERSION = "mens_exp_ledger", 2  # version 1 had no sizes
_FEWEST = 3  # with fewer runs, a spread is meaningless
# Student's t, two-sided 90 %, by degrees of freedom (any table); beyond it, the normal's 1.645.
_T90 = {2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 10: 1.812}
_T90_MANY = 1.75
_LIKE_SIZE = 2.0  # unverified guess
_LEAST_SPREAD = 0.02  # of the log ratio: identical runs differ by this much in allocated memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run's predictions and measurements; None where either is unknown.

    Attributes:
        utc: time of writing.
        device: name of the device, as in :func:`mens_exp.planning.machine.look`.
        family: model type of the base.
        backend: the backend that ran.
        run_id: id of the run.
        contract: digest of its contract.
        parameters: parameters of the base, including the embedding.
        tokens_per_step: tokens of an optimizer step.
        predicted_peak_bytes: by formula, uncorrected.
        measured_peak_bytes: the highest resident (CPU) or allocated (GPU) memory.
        flop_per_step: floating-point operations in an optimizer step, by formula.
        predicted_step_s: None if no rate was known.
        measured_step_s: mean over the steps after the first.
    """

    utc: str
    device: str
    family: str
    backend: str
    run_id: str
    contract: str
    parameters: int
    tokens_per_step: int
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    flop_per_step: float | None
    predicted_step_s: float | None
    measured_step_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Residuals:
    """Correction factors for a prediction, from earlier runs, and the number of those runs."""

    runs: int
    centre: float
    low: float
    high: float


def is_alike(one: Entry, *, parameters: int, tokens_per_step: int) -> bool:
    """Return whether a run is of similar size: within a factor of two in both respects.

    In a small run, the error is mostly due to the framework and its kernels, which says little
    about a large run.

    Args:
        one: the run.
        parameters: parameters of the base to plan for.
        tokens_per_step: tokens of an optimizer step to plan for.
    """
    pairs = ((one.parameters, parameters), (one.tokens_per_step, tokens_per_step))
    return all(max(a, b) <= _LIKE_SIZE * min(a, b) for a, b in pairs)


def ledger_path(cache: Path) -> Path:
    """Return the ledger's path in the cache directory."""
    return cache / "ledger.jsonl"


def append(path: Path, entry: Entry) -> None:
    """Append one line; concurrent runs wait for each other.

    Raises:
        OSError: writing failed.
    """
    line = json_line({"format": _FORMAT, "version": _VERSION, **asdict(entry)}, str(path))
    with file_lock(path.with_suffix(".lock")), path.open("ab") as file:
        if file.tell() and not _ends_whole(path):
            line = b"\n" + line  # a writer died in the middle of its line; start a new one
        file.write(line)


def entries(path: Path) -> list[Entry]:
    """Read every complete line of the current version, skipping damaged ones.

    The ledger only widens or narrows an interval, so an unreadable line is not an error.
    """
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [entry for line in lines if (entry := _read(line)) is not None]


def residuals(ratios: Sequence[float]) -> Residuals | None:
    """Return the center and 90 % prediction interval of the next ratio; None with too few ratios.

    Log ratios are assumed normal: the center is their mean m, the half-width t · s · sqrt(1 + 1/n).
    """
    n = len(ratios)
    if n < _FEWEST:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / n
    spread = math.sqrt(sum((one - mean) ** 2 for one in logs) / (n - 1))
    half = _T90.get(n - 1, _T90_MANY) * max(spread, _LEAST_SPREAD) * math.sqrt(1 + 1 / n)
    return Residuals(
        runs=n, centre=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half)
    )


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _read(line: str) -> Entry | None:
    try:
        value: dict[str, Any] = json.loads(line)
        if (value.pop("format"), value.pop("version")) != (_FORMAT, _VERSION):
            return None
        return Entry(**value)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


# measured: benchmarks/throughput.py, SmolLM2-135M on two AVX512-BF16 cores
_FLOPS_PER_CORE = {ComputeDtype.bf16: 1.4e11, ComputeDtype.f32: 4.0e10}
_SUPERVISED = 0.5  # share of tokens that the head runs on, as in the main job
_TABLE_SPREAD = 2.0  # factor by which another CPU may be faster or slower; unverified guess
# measured: the comparison with transformers before step 1, SmolLM2 (106 M linear weights) on one
# core: 10 s, most of them for unpacking each weight twice
_COMPARED_PER_CORE_S = 1.1e7
# measured: SmolLM2's stack (38.3 M weights), forward and backward in bf16: 4, 64, 512 and 1,024
# positions took 0.19, 0.25, 0.82 and 1.67 s of processor time on a busy machine. Unpacking thus
# takes 0.19 s, and the rest runs at 1.1e11 to 1.2e11 operations per second and core, near the
# table's rate.
_PROXY_POSITIONS = 154  # equivalent to the cost of unpacking a micro-batch
_PROXY_SPREAD = 3.0  # unverified guess


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Operations per second, with an interval and its basis; None if unknown."""

    rate: float | None
    low: float | None
    high: float | None
    runs: int
    basis: str

    def of_several(self, processes: int, kind: str) -> Throughput:
        """Return the combined rate of several processes: GPUs add up; CPU processes share cores."""
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
    shape: Shape,
    adapter: int,
    *,
    linears: int | None = None,
    again: bool = False,
    reference: bool = False,
) -> float:
    """Return training operations per token.

    Frozen weights take the forward pass and the gradient of the inputs (2 + 2 per weight), and
    LoRA's take all three products (6). The head runs only on the supervised tokens. Attention
    scores are not counted.

    Args:
        shape: dimensions of the base.
        adapter: number of trained parameters.
        linears: weights of the linear layers that a token passes through; None means all.
        again: whether activations are recomputed.
        reference: whether the base also runs in a separate pass without gradients.
    """
    through = shape.linear_parameters if linears is None else linears
    head = shape.vocab_size * shape.hidden_size
    twice = 2 * (through + adapter) if again else 0
    apart = forward_flop_per_token(shape, linears) if reference else 0
    return twice + 4 * through + 6 * adapter + 4 * head * _SUPERVISED + apart


def forward_flop_per_token(shape: Shape, linears: int | None = None) -> float:
    """Return the operations per token of a forward pass of the base; see `flop_per_token`."""
    through = shape.linear_parameters if linears is None else linears
    return 2 * through + 2 * shape.vocab_size * shape.hidden_size * _SUPERVISED


def reference_s(
    pace: Throughput, shape: Shape, tokens: int, linears: int | None = None
) -> float | None:
    """Estimate the seconds of one pass of a model over documents before training.

    Args:
        pace: the throughput; unknown on a GPU without earlier runs.
        shape: dimensions of the model.
        tokens: tokens of the documents.
        linears: weights of the linear layers that a token passes through; None is all.
    """
    if pace.rate is None:
        return None
    return round(tokens * forward_flop_per_token(shape, linears) / pace.rate, 1)


def proxy_flop_per_token(
    weights: int, adapter: int, *, learned_frac: float, micro_batch_tokens: int
) -> float:
    """Return the proxy's training operations per token of the stream.

    It computes only supervised positions, at 4 operations per frozen weight and 6 per adapter
    weight. Unpacking the weights of each micro-batch costs as much as a few more positions.

    Args:
        weights: weights of the stack, including its head.
        adapter: number of trained parameters.
        learned_frac: fraction of the tokens that are supervised.
        micro_batch_tokens: tokens of one micro-batch.
    """
    positions = learned_frac + _PROXY_POSITIONS / micro_batch_tokens
    return positions * (4 * weights + 6 * adapter)


def throughput_of(
    config: RunConfig, kind: str, known: Sequence[Entry], spread: Residuals | None
) -> Throughput:
    """Return the throughput of a device.

    Args:
        config: the run.
        kind: ``cpu`` or ``cuda``.
        known: the ledger's runs of similar size on this device.
        spread: interval of the ratio of their rates to the most recent, if there are enough.
    """
    rates = [
        one.flop_per_step / one.measured_step_s
        for one in known
        if one.flop_per_step and one.measured_step_s
    ]
    if rates and spread is not None:
        last = rates[-1]
        return Throughput(
            rate=last * spread.centre,
            low=last * spread.low,
            high=last * spread.high,
            runs=len(rates),
            basis=f"the rate of {len(rates)} earlier runs of similar size",
        )
    if rates:
        return Throughput(
            rate=rates[-1],
            low=rates[-1] / _TABLE_SPREAD,
            high=rates[-1] * _TABLE_SPREAD,
            runs=len(rates),
            basis=f"the rate of the last of {len(rates)} earlier runs of similar size",
        )
    if kind != "cpu":
        reason = "unknown: no rate has been measured for a GPU; the first run here measures one"
        return Throughput(rate=None, low=None, high=None, runs=0, basis=reason)
    rate = _FLOPS_PER_CORE[config.quant.compute_dtype] * cores()
    is_proxy = isinstance(config.backend, ProxyConfig)
    wide = _PROXY_SPREAD if is_proxy else _TABLE_SPREAD
    return Throughput(
        rate=rate,
        low=rate / wide,
        high=rate * wide,
        runs=0,
        basis=f"training and validation{' of learned positions alone' if is_proxy else ''} "
        f"on {cores()} CPU cores at a rate measured on AVX512-BF16",
    )


def time(
    pace: Throughput, per_token: float, tokens: int | None, validated: float, tokens_per_step: int
) -> dict[str, Any]:
    """Estimate the seconds of training and validation, and of one optimizer step.

    Args:
        pace: the throughput.
        per_token: training operations per token.
        tokens: tokens to train on; None if only max_epochs over uncounted data limits them.
        validated: tokens to validate on, summed over the passes before and after training.
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


def quantization_s(shape: Shape, kind: str, to: QuantizerSpec) -> float | None:
    """Estimate seconds of quantizing the base; unknown on a GPU, where it was never measured."""
    if kind != "cpu" or to.weights_per_core_s is None:
        return None
    return round(shape.linear_parameters / (to.weights_per_core_s * cores()), 1)


def comparison_s(shape: Shape, kind: str) -> float | None:
    """Estimate the seconds of the comparison with transformers; unknown on a GPU (not measured).

    Its 4 x 64 tokens take less time than the weights and are not counted.
    """
    if kind != "cpu":
        return None
    return round(shape.linear_parameters / (_COMPARED_PER_CORE_S * cores()), 1)
