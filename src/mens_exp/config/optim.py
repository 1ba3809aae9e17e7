"""The optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["OptimConfig", "OptimizerConfig"]


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """What every optimizer has, one of the user's own included."""

    _target_: str = setting(MISSING, "Class of the optimizer; set by the option.")
    lr: float = setting(
        2e-3, "Peak rate (measured on the main job: 2e-3 below 1e-3 in training loss).", gt=0
    )


@dataclass(kw_only=True, slots=True)
class OptimConfig(OptimizerConfig):
    """AdamW (arXiv:1711.05101) on the adapter's parameters."""

    betas: list[float] = setting([0.9, 0.999], "Decay of the two moments (torch's default).")
    eps: float = setting(1e-8, "Added to the denominator (torch's default).", gt=0)
    weight_decay: float = setting(
        0.0, "Decoupled decay (0: adapters are small, B starts at 0).", ge=0
    )
