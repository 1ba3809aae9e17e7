"""The configured optimizer, and its learning-rate schedule."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from hydra.utils import get_class, instantiate

from mens_exp.config.fields import plain
from mens_exp.config.optim import (
    ApolloConfig,
    LowRankConfig,
    OptimConfig,
    PagedAdamw8bitConfig,
)
from mens_exp.config.schedule import ScheduleConfig
from mens_exp.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from mens_exp.config.optim import OptimizerConfig
    from mens_exp.config.schedule import AnySchedule


def build_scheduler(
    config: AnySchedule, optimizer: torch.optim.Optimizer, *, total_steps: int
) -> LRScheduler:
    """Build the learning-rate schedule, which is stepped once per optimizer step.

    A user's class gets the length of the run if it takes ``total_steps``.
    """
    from torch.optim.lr_scheduler import LambdaLR

    if not isinstance(config, ScheduleConfig):
        target = config._target_  # type: ignore[attr-defined]  # OwnSchedule has it
        settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        taken = inspect.signature(get_class(target)).parameters
        offered = {"total_steps": total_steps} if "total_steps" in taken else {}
        made: LRScheduler = instantiate({**offered, **settings}, optimizer, _convert_="all")
        return made
    return LambdaLR(optimizer, lambda step: config.multiple(step, total_steps))


# Settings that name the optimizer or form its parameter groups; all others are its arguments.
_OURS = {"_target_", "name", "loraplus_lr_ratio"}
_LORA_B = "lora_b"


def parameter_groups(
    config: OptimizerConfig,
    parameters: Mapping[str, torch.nn.Parameter],
    linear: Collection[str] = (),
) -> list[torch.nn.Parameter] | list[dict[str, Any]]:
    """Return the trained parameters, in two groups if they are treated differently.

    With LoRA+, B and every vector, such as DoRA's magnitudes, learn faster, as in PEFT
    (`peft.optimizers.create_loraplus_optimizer`). GaLore and APOLLO project large linear weights.

    Args:
        config: the `optim` group.
        parameters: by name.
        linear: names of the decoder's linear weights.
    """
    if isinstance(config, LowRankConfig):
        return _low_rank_groups(config, parameters, linear)
    ratio = config.loraplus_lr_ratio if isinstance(config, OptimConfig) else None
    if ratio is None:
        return [*parameters.values()]
    slow: list[torch.nn.Parameter] = []
    fast: list[torch.nn.Parameter] = []
    for name, parameter in parameters.items():
        is_fast = name.rpartition(".")[2] == _LORA_B or parameter.ndim == 1
        (fast if is_fast else slow).append(parameter)
    groups: list[dict[str, Any]] = [{"params": slow}, {"params": fast, "lr": config.lr * ratio}]
    return [group for group in groups if group["params"]]


def _low_rank_groups(
    config: LowRankConfig, parameters: Mapping[str, torch.nn.Parameter], linear: Collection[str]
) -> list[dict[str, Any]]:
    chosen = {name for name in linear if config.projects(*parameters[name].shape)}
    settings = {theirs: plain(getattr(config, ours)) for ours, theirs in config.in_group.items()}
    projected = [parameter for name, parameter in parameters.items() if name in chosen]
    others = [parameter for name, parameter in parameters.items() if name not in chosen]
    groups: list[dict[str, Any]] = [{"params": projected, **settings}, {"params": others}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    config: OptimizerConfig,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    linear: Collection[str] = (),
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Build the optimizer over the trained parameters, which are already on their device.

    Args:
        config: the `optim` group.
        parameters: by name; that of an adapter's ends as in its record.
        linear: names of the decoder's linear weights, if they are trained.
        seed: the run's.

    Raises:
        SetupError: a paged optimizer without a CUDA device. bitsandbytes would fall back to a
            non-paged one with a warning.
    """
    device = next(iter(parameters.values())).device.type
    if isinstance(config, PagedAdamw8bitConfig) and device != "cuda":
        raise SetupError(
            "paged memory needs CUDA",
            where="optim",
            found=f"{config.name} on {device}",
            expected="a CUDA device",
            remedy="use optim=adamw_8bit, which is the same arithmetic, or optim=adamw",
        )
    arguments = {
        field.name: plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in _OURS | {*getattr(config, "in_group", ())}
    }
    if isinstance(config, ApolloConfig):
        arguments["seed"] = seed
    cls: Any = get_class(config._target_)  # Hydra's own spelling
    optimizer: torch.optim.Optimizer = cls(
        parameter_groups(config, parameters, linear), **arguments
    )
    return optimizer


def switch(optimizers: Sequence[torch.optim.Optimizer], *, learns: bool) -> None:
    """Put into the model the point where gradients are computed, or the one that is the result.

    They differ only for :class:`mens_exp.training.schedule_free.ScheduleFreeAdamW`. A user's module
    with another optimizer of that kind switches it itself.
    """
    for optimizer in optimizers:
        change = getattr(optimizer, "to_gradient_point" if learns else "to_average", None)
        if change is not None:
            change()


def in_its_order(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.nn.Parameter]:
    """Return named parameters in the order in which the optimizer's state numbers them."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    every = [one for group in optimizer.param_groups for one in group["params"]]
    return {names.get(id(one), f"added.{number}"): one for number, one in enumerate(every)}
