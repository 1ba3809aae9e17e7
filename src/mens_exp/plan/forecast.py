"""Memory and time of a run on this machine, with the intervals that earlier runs give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import ProxyConfig
from mens_exp.plan import pace
from mens_exp.plan.ledger import Entry, Residuals, entries, is_alike, ledger_path, residuals
from mens_exp.plan.memory import Documents, Memory, memory, recomputes
from mens_exp.plan.trained import frozen_linears, trained_parameters

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape
    from mens_exp.plan.machine import Machine

__all__ = ["Forecast", "documents_of", "forecast", "tokens_per_step"]

_ALIKE = 0.95  # of the longest document: all are about as long
_RECENT = 20  # runs that an interval is taken from; older ones ran older code


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The predicted cost of a run.

    Attributes:
        memory: the estimate, corrected and bounded by earlier runs where there are enough.
        formula: the peak by formula alone, as a probe of the run would see it.
        runs: ids of the earlier runs of like size that the forecast rests on.
        pace: the rate of computing.
        per_token: training operations for one token.
    """

    memory: Memory
    formula: int
    runs: tuple[str, ...]
    pace: pace.Pace
    per_token: float


def tokens_per_step(config: RunConfig) -> int:
    """Return the tokens of one optimizer step, full blocks taken."""
    data = config.data
    return data.seq_len * data.micro_batch_size * config.trainer.accumulate_grad_batches


def documents_of(config: RunConfig, data: dict[str, Any]) -> Documents:
    """Return the lengths of documents as the plan's data part tells them; unknown is the limit."""
    limit = config.data.seq_len
    longest, typical = data.get("longest_tokens"), data.get("typical_tokens")
    return Documents(
        longest=longest or limit,
        typical=typical or limit,
        varied=not (longest and typical) or typical < _ALIKE * longest,
    )


def forecast(
    config: RunConfig, shape: Shape, documents: Documents, machine: Machine, cache: Path
) -> Forecast:
    """Estimate memory and pace of a run."""
    sizes = {"parameters": shape.parameters, "tokens_per_step": tokens_per_step(config)}
    known = [
        one
        for one in entries(ledger_path(cache))
        if (one.device, one.backend) == (machine.name, config.backend.name)
        and is_alike(one, **sizes)
    ][-_RECENT:]
    plain = memory(config, shape, documents, kind=machine.kind)
    seen = residuals(_ratios(known))
    return Forecast(
        memory=_corrected(plain, seen),
        formula=plain.estimate - plain.outside,
        runs=tuple(one.run_id for one in known),
        pace=pace.pace_of(config, machine.kind, known, _rate_spread(known)),
        per_token=_per_token(config, shape, documents, machine),
    )


def _per_token(config: RunConfig, shape: Shape, documents: Documents, machine: Machine) -> float:
    """Return training operations for one token."""
    adapter, linears = trained_parameters(config, shape), frozen_linears(config, shape)
    if isinstance(config.backend, ProxyConfig):
        return pace.proxy_flop_per_token(
            linears + shape.vocab_size * shape.hidden_size,
            adapter,
            learned_frac=pace.learned_frac(config.objective, documents.typical),
            micro_batch_tokens=config.data.micro_batch_size * config.data.seq_len,
        )
    again = recomputes(config, shape, machine.kind)
    return pace.flop_per_token(shape, adapter, linears=linears, again=again)


def _ratios(known: list[Entry]) -> list[float]:
    return [
        one.measured_peak_bytes / one.predicted_peak_bytes
        for one in known
        if one.measured_peak_bytes and one.predicted_peak_bytes
    ]


def _rate_spread(known: list[Entry]) -> Residuals | None:
    rates = [
        one.flop_per_step / one.measured_step_s
        for one in known
        if one.flop_per_step and one.measured_step_s
    ]
    return residuals([rate / rates[-1] for rate in rates])


def _corrected(plain: Memory, seen: Residuals | None) -> Memory:
    if seen is None:
        return plain
    total = plain.estimate
    correction = {"as earlier runs here": round(total * (seen.centre - 1))}
    return replace(
        plain,
        components={**plain.components, **correction},
        low=round(total * seen.low),
        high=round(total * seen.high),
        basis=f"{plain.basis}; corrected and bounded by {seen.runs} earlier runs of like size",
    )
