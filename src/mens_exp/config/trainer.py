"""Arguments of the Lightning Trainer; the names are its own."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["TrainerConfig"]


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The part of lightning.Trainer's arguments that an experiment sets."""

    accelerator: str = setting(MISSING, "auto, cpu or gpu; set by the option.")
    max_steps: int = setting(60, "Optimizer steps; -1: max_epochs alone decides.", ge=-1)
    max_epochs: int = setting(
        -1, "Passes over the training data, each row exactly once in each; -1: no limit.", ge=-1
    )
    accumulate_grad_batches: int = setting(4, "Micro-batches in one optimizer step.", ge=1)
    gradient_clip_val: float | None = setting(
        1.0, "Largest global gradient norm; longer ones are scaled down. 0 or null: off.", ge=0
    )
    val_check_interval: int | None = setting(
        None, "Micro-batches between validations; null validates before and after only.", ge=1
    )
    deterministic: bool | None = setting(
        None, "Deterministic algorithms; null turns them on on CPU and leaves them off on GPU."
    )
