"""Checks of the machine: memory, disk, kernels and number formats that a run needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.config.fields import range_problems
from mens_exp.config.quant import ComputeDtype
from mens_exp.errors import MensError
from mens_exp.layout.shape import shape_of
from mens_exp.plan import machine, messages
from mens_exp.plan.attribution import attribution_memory
from mens_exp.plan.disk import disk
from mens_exp.plan.forecast import documents_of, forecast
from mens_exp.plan.parts import WHOLE
from mens_exp.plan.sharing import for_all_on_a_machine
from mens_exp.rows.cache import cache_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.plan.disk import Disk
    from mens_exp.plan.memory import Memory

__all__ = ["check", "findings"]

_GIB = 1 << 30


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what this machine lacks for a run; a plan shows it beside its figures instead."""
    if config.task.name == "plan" or any(range_problems(config)):
        return
    try:
        shape = shape_of(config.model)
    except MensError:
        return  # told by the check of the model's files
    cache = cache_root()
    device = machine.look(config.trainer.accelerator)
    if config.task.name == "attribute":
        memory = attribution_memory(config, shape)
    else:
        memory = forecast(config, shape, documents_of(config, {}), device, cache).memory
    errors, _ = findings(config, device, memory, disk(config, shape, cache, None), cache)
    yield from errors


def findings(
    config: RunConfig, device: machine.Machine, expected: Memory, written: Disk, cache: Path
) -> tuple[list[MensError], list[str]]:
    """Return what forbids the run on this device, and what may go wrong."""
    errors = [*_formats(config, device), *_disk_errors(written, cache)]
    if config.trainer.device_gib is None:  # another device's libraries are not known
        errors = [*_kernels(device), *errors]
    warnings = []
    low, high = (
        for_all_on_a_machine(config, bound, device.kind) for bound in (expected.low, expected.high)
    )
    # On a CPU a base is whole while it is loaded too.
    scored = expected.components.get(WHOLE, 0) if device.kind == "cuda" else 0
    unscored = low * (1 - scored / expected.estimate)
    if device.free_bytes is not None:
        if low > device.free_bytes:
            error = messages.memory_too_small(
                device.name,
                low,
                device.free_bytes,
                attributes=config.task.name == "attribute",
                by_scoring=unscored <= device.free_bytes,
            )
            errors.append(error)
        elif high > device.free_bytes:
            bounds = (low, high, device.free_bytes)
            warnings.append(messages.memory_may_be_small(device.name, *bounds))
    warnings += _beyond_class(config, device, low, high)
    if device.kind == "cpu" and device.has_bf16 is False and _in_bf16(config):
        warnings.append(messages.bf16_emulated(device.name))
    return errors, warnings


def _beyond_class(config: RunConfig, device: machine.Machine, low: int, high: int) -> Iterator[str]:
    """Yield a warning where GPUs of the preset's class may not hold the run."""
    trainer = config.trainer
    if device.kind != "cuda" or trainer.class_gib is None or trainer.device_gib is not None:
        return
    if high > trainer.class_gib * _GIB:
        yield messages.memory_beyond_class(
            trainer.class_gib,
            low,
            high,
            micro_batch=config.data.micro_batch_size,
            accumulated=trainer.accumulate_grad_batches,
        )


def _kernels(device: machine.Machine) -> Iterator[MensError]:
    """Ask for the library that bitsandbytes would load (its cextension.py: same CUDA major)."""
    if device.kind == "cuda" and device.torch is not None and device.torch_cuda is None:
        yield messages.torch_without_cuda(device.torch)
        return
    if device.libraries is None:
        yield messages.no_four_bit_kernels(device.name, "no bitsandbytes", "bitsandbytes")
    elif device.kind == "cpu":
        if "cpu" not in device.libraries:
            found = ", ".join(sorted(device.libraries)) or "no library"
            yield messages.no_four_bit_kernels(device.name, found, "libbitsandbytes_cpu")
    elif device.torch_cuda is not None:
        major = device.torch_cuda.partition(".")[0]
        have = sorted(name for name in device.libraries if name.startswith("cuda"))
        if not any(name.removeprefix("cuda")[: len(major)] == major for name in have):
            found = ", ".join(have) or "no CUDA library"
            expected = f"one for CUDA {device.torch_cuda}"
            yield messages.no_four_bit_kernels(device.name, found, expected)


def _formats(config: RunConfig, device: machine.Machine) -> Iterator[MensError]:
    if device.kind == "cuda" and device.has_bf16 is False and _in_bf16(config):
        yield messages.bf16_unsupported(device.name, str(device.capability))


def _in_bf16(config: RunConfig) -> bool:
    return config.quant.compute_dtype is ComputeDtype.bf16


def _disk_errors(written: Disk, cache: Path) -> Iterator[MensError]:
    """Compare what goes into the run directory and the cache with what is free there."""
    run, run_free = machine.space(Path.cwd())
    base, base_free = machine.space(cache)
    in_run = f"checkpoints {messages.size(written.checkpoint * (written.checkpoints_kept + 1))}, "
    in_run += f"adapter {messages.size(written.adapter + written.peft)}"
    in_base = f"the base model {messages.size(written.base)}"
    if run.stat().st_dev == base.stat().st_dev:
        needed = written.in_run + written.base
        if needed > run_free:
            yield messages.disk_too_small(str(run), needed, run_free, f"{in_run}, {in_base}")
        return
    if written.in_run > run_free:
        yield messages.disk_too_small(str(run), written.in_run, run_free, in_run)
    if written.base > base_free:
        yield messages.disk_too_small(str(base), written.base, base_free, in_base)
