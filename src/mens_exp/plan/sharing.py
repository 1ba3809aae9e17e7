"""Memory per process in a run of several, and the ways to share the work that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mens_exp.config.rules.sharded import may_be_in_parts
from mens_exp.config.trainer import Strategy
from mens_exp.plan import machine
from mens_exp.plan.memory import memory

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape
    from mens_exp.plan.memory import Documents, Memory

__all__ = ["device_of_plan", "for_all_on_a_machine", "shared"]

_GIB = 1 << 30


def device_of_plan(config: RunConfig) -> machine.Machine:
    """Describe the device that a run is planned for: this machine's, or of the size asked for."""
    here = machine.look(config.trainer.accelerator)
    gib = config.trainer.device_gib
    if gib is None:
        return here
    size = round(gib * _GIB)
    return machine.Machine(
        kind=here.kind,
        name=f"{'GPU' if here.kind == 'cuda' else 'CPU'} with {gib:g} GiB",
        total_bytes=size,
        free_bytes=size,
    )


def for_all_on_a_machine(config: RunConfig, one: int, kind: str) -> int:
    """Return bytes that a device must hold: a GPU those of one process, a CPU those of all."""
    return one * (config.trainer.devices if kind == "cpu" else 1)


def shared(
    config: RunConfig,
    shape: Shape,
    documents: Documents,
    expected: Memory,
    device: machine.Machine,
) -> dict[str, Any] | None:
    """Say who shares the work and what each takes; None where one process is asked for.

    ``fits`` says of each strategy whether the device holds it: true, false, or null where that is
    within the estimate's interval, or where the device's memory is unknown. A strategy that the
    run cannot have is left out.

    Args:
        config: the whole configuration.
        shape: of the model.
        documents: lengths of what is trained on.
        expected: the forecast of the strategy that is chosen; the others differ from it as their
            formulas do.
        device: that each process computes on.
    """
    trainer = config.trainer
    if trainer.strategy is Strategy.one:
        return None

    def formula(strategy: Strategy) -> Memory:
        return memory(_under(config, strategy), shape, documents, kind=device.kind)

    chosen, bounds = formula(trainer.strategy), {}
    for strategy in Strategy:
        if strategy is Strategy.fsdp and not may_be_in_parts(config):
            continue
        other = formula(strategy)
        low, high = (
            round(bound * theirs / ours)
            for bound, theirs, ours in (
                (expected.low, other.low, chosen.low),
                (expected.high, other.high, chosen.high),
            )
        )
        if strategy is not Strategy.one:
            low, high = (for_all_on_a_machine(config, one, device.kind) for one in (low, high))
        bounds[strategy] = (low, high)
    return {
        "strategy": trainer.strategy.value,
        "processes": trainer.world_size,
        "on_each_machine": trainer.devices,
        "device_bytes": device.free_bytes,
        "bytes_of_each": {
            "estimate": expected.estimate,
            "low": expected.low,
            "high": expected.high,
        },
        "fits": {
            strategy.value: _fits(low, high, device.free_bytes)
            for strategy, (low, high) in bounds.items()
        },
    }


def _under(config: RunConfig, strategy: Strategy) -> RunConfig:
    """Return the run under another strategy, with as many processes; one is one."""
    trainer = replace(config.trainer, strategy=strategy)
    if strategy is Strategy.one:
        trainer = replace(trainer, devices=1, num_nodes=1)
    return replace(config, trainer=trainer)


def _fits(low: int, high: int, free: int | None) -> bool | None:
    if free is None or low <= free < high:
        return None
    return high <= free
