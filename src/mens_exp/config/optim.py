"""The optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = [
    "Adamw8bitConfig",
    "AdamwConfig",
    "LionConfig",
    "OptimConfig",
    "OptimizerConfig",
    "PagedAdamw8bitConfig",
]


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """What every optimizer has, one of the user's own included; it works on the adapter alone."""

    _target_: str = setting(MISSING, "Class of the optimizer; set by the option.")
    name: str = setting("own", "The option's name; set by the option.")
    lr: float = setting(
        2e-3, "Peak rate (measured on the main job: 2e-3 below 1e-3 in training loss).", gt=0
    )


@dataclass(kw_only=True, slots=True)
class OptimConfig(OptimizerConfig):
    """What ours have beside it."""

    betas: list[float] = setting([0.9, 0.999], "Decay of the two averages (torch's default).")
    weight_decay: float = setting(
        0.0, "Decoupled decay (0: adapters are small, B starts at 0).", ge=0
    )


@dataclass(kw_only=True, slots=True)
class AdamwConfig(OptimConfig):
    """AdamW (arXiv:1711.05101), both moments in f32."""

    name: str = setting("adamw", "The option's name; set by the option.")
    eps: float = setting(1e-8, "Added to the denominator (torch's default).", gt=0)


@dataclass(kw_only=True, slots=True)
class Adamw8bitConfig(AdamwConfig):
    """AdamW with moments in 8 bits, in blocks of 256 (arXiv:2110.02861).

    Matrices of fewer than 4,096 elements keep f32 moments, which is bitsandbytes' own rule.
    """

    name: str = setting("adamw_8bit", "The option's name; set by the option.")


@dataclass(kw_only=True, slots=True)
class PagedAdamw8bitConfig(Adamw8bitConfig):
    """The same, its moments in memory that the driver moves to the host when the GPU is full."""

    name: str = setting("paged_adamw_8bit", "The option's name; set by the option.")


@dataclass(kw_only=True, slots=True)
class LionConfig(OptimConfig):
    """Lion (arXiv:2302.06675): the sign of an average, one f32 number a parameter."""

    name: str = setting("lion", "The option's name; set by the option.")
    lr: float = setting(
        2e-4, "Peak rate (a tenth of AdamW's; the paper advises a third to a tenth).", gt=0
    )
    betas: list[float] = setting(
        [0.9, 0.99], "Decay of the average in the update and in the state (the paper's)."
    )
