"""A user's LightningModule hosted by ours, which keeps the record and the promises.

The user's module gets the backend and returns the mean loss of a micro-batch. Data order, dropout,
accumulation, the division by all tokens of a step, validation, checkpoints and adapter stay ours.
The manifest says which promises hold, and which are unproven because they rest on the user's code.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import instantiate
from lightning import LightningModule

from mens_exp.config.trainer import Promise
from mens_exp.errors import ConfigError
from mens_exp.objective.causal import LossSum
from mens_exp.training.module import TrainingModule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch

_SHARED = frozenset({"backend", "config", "objective", "total_steps"})
# Methods of ours, and the promise that rests on each.
_RESTS_ON = {
    "training_step": Promise.ASKED,
    "training_loss": Promise.ASKED,
    "passed": Promise.ASKED,
    "on_before_optimizer_step": Promise.ASKED,
    "configure_optimizers": Promise.ASKED,
    "validation_step": Promise.COMPARISON,
    "on_validation_epoch_start": Promise.COMPARISON,
    "on_validation_epoch_end": Promise.COMPARISON,
    "trained": Promise.ARTIFACT,
    "on_save_checkpoint": Promise.NOTHING_LOST,
    "on_load_checkpoint": Promise.NOTHING_LOST,
}


class HostedModule(TrainingModule):
    """Trains with the steps of a user's module; see :func:`hosting`."""

    guest: type[LightningModule]
    settings: Mapping[str, Any]

    def __init__(
        self, config: RunConfig, backend: Backend, objective: Any, *, total_steps: int
    ) -> None:
        """Initialize the user's module from its settings, then our own state.

        Raises:
            ConfigError: it uses manual optimization, or has attributes that the run reserves.
        """
        shared = {
            "backend": backend,
            "config": config,
            "objective": objective,
            "total_steps": total_steps,
        }
        taken = inspect.signature(self.guest).parameters
        given = {name: value for name, value in shared.items() if name in taken}
        arguments = instantiate(dict(self.settings), _convert_="all")
        self.guest.__init__(self, **given, **arguments)
        before = dict(vars(self))
        self.begin(config, backend, objective, total_steps=total_steps)
        both = {
            name for name in before.keys() - _SHARED if vars(self).get(name) is not before[name]
        }
        if both:
            raise ConfigError(
                "has attributes that the run reserves",
                where="module",
                found=", ".join(sorted(both)),
                expected="other names",
                remedy="rename them in the class",
            )
        if not self.automatic_optimization:
            raise ConfigError(
                f"would break the promise “{Promise.COMPARISON}”: it uses manual optimization, so "
                "a step would have other micro-batches than the contract says",
                where="module",
                found="automatic_optimization = False",
                remedy="return the loss, and leave backward and step to Lightning",
            )

    def training_loss(self, batch: Batch, batch_idx: int) -> LossSum:
        """Return the user's mean loss as a sum over the supervised tokens of the micro-batch.

        Raises:
            ConfigError: it returned no loss.
        """
        self.backend.begin(batch.index)
        made = super(TrainingModule, self).training_step(batch, batch_idx)
        mean = made.get("loss") if isinstance(made, dict) else made
        if not isinstance(mean, torch.Tensor):
            raise ConfigError(
                "training_step returned no loss",
                where="module",
                found=type(mean).__name__,
                expected="the mean loss over the micro-batch's supervised tokens, as a tensor, or "
                "a mapping with it under loss",
            )
        count = batch.targets_M.numel()
        return LossSum(total=mean * count, count=count)

    def on_train_start(self) -> None:
        """Set the rate of the next step, unless the user's module brings its own optimizer."""
        if not self.has("configure_optimizers"):
            super().on_train_start()
        super(TrainingModule, self).on_train_start()

    def configure_optimizers(self) -> Any:
        """Return the user's optimizers, or else those of the configuration."""
        if self.has("configure_optimizers"):
            return super(TrainingModule, self).configure_optimizers()
        return super().configure_optimizers()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Validate with the objective, as any run does; then call the user's hook."""
        super().validation_step(batch, batch_idx)
        if self.has("validation_step"):
            super(TrainingModule, self).validation_step(batch, batch_idx)

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the adapter's parameters, and those that the user's module adds."""
        return [*super().trained(), *self.added().values()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save added parameters too."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["added"] = {name: p.detach() for name, p in self.added().items()}
        super(TrainingModule, self).on_save_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore added parameters too."""
        super().on_load_checkpoint(checkpoint)
        with torch.no_grad():
            for name, parameter in self.added().items():
                parameter.copy_(checkpoint["added"][name])
        super(TrainingModule, self).on_load_checkpoint(checkpoint)

    def on_after_backward(self) -> None:
        """Restore averaged weights, then call the user's hook."""
        super().on_after_backward()
        super(TrainingModule, self).on_after_backward()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide by the step's tokens, then call the user's hook."""
        super().on_before_optimizer_step(optimizer)
        super(TrainingModule, self).on_before_optimizer_step(optimizer)

    def on_validation_epoch_start(self) -> None:
        """Reset the sums, then call the user's hook."""
        super().on_validation_epoch_start()
        super(TrainingModule, self).on_validation_epoch_start()

    def on_validation_epoch_end(self) -> None:
        """Set the validation loss, then call the user's hook."""
        super().on_validation_epoch_end()
        super(TrainingModule, self).on_validation_epoch_end()

    def has(self, hook: str) -> bool:
        """Return whether the user's module overrides a hook."""
        return getattr(self.guest, hook) is not getattr(LightningModule, hook)

    def added(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters that checkpoints contain, but no adapter."""
        known = {id(parameter) for parameter in self.backend.trainable().values()}
        named = self.named_parameters()
        return {name: p for name, p in named if p.requires_grad and id(p) not in known}


def hosting(guest: type[LightningModule], settings: Mapping[str, Any]) -> type[HostedModule]:
    """Return a class that inherits from ours and the user's; our methods call theirs."""
    values = {"guest": guest, "settings": dict(settings), "__module__": guest.__module__}
    made: type[HostedModule] = type(guest.__name__, (HostedModule, guest), values)
    return made


def promises(module: TrainingModule) -> dict[str, Any] | None:
    """Report which promises hold for a user's module, and why others are unproven.

    None for our own module.
    """
    kind = type(module)
    if kind is TrainingModule:
        return None
    unproven: dict[str, str] = {}
    if isinstance(module, HostedModule):
        name = module.guest.__qualname__
        unproven[Promise.ASKED] = f"the loss is {name}'s; label mask and counts are the run's"
        if module.has("configure_optimizers"):
            unproven[Promise.ASKED] += "; optim and schedule have no effect, it brings its own"
        if added := module.added():
            what = f"{len(added)} parameters of {name} are in no adapter, only in checkpoints"
            unproven[Promise.ARTIFACT] = what
        unproven[Promise.NOTHING_LOST] = f"state of {name} other than parameters may be lost"
    else:
        for method, promise in _RESTS_ON.items():
            if getattr(kind, method) is not getattr(TrainingModule, method):
                unproven.setdefault(promise, f"{kind.__qualname__} has its own {method}")
    unproven[Promise.PLANNED] = "memory and time are forecast for our own module"
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "holds": [str(one) for one in Promise if one not in unproven],
        "unproven": {str(promise): why for promise, why in unproven.items()},
    }
