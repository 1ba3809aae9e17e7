"""Callbacks that listen to training."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting, unless

__all__ = [
    "CallbackConfig",
    "EarlyStoppingConfig",
    "FiniteGuardConfig",
    "MemoryConfig",
    "ProgressConfig",
    "ScorecardConfig",
]


@dataclass(kw_only=True, slots=True)
class CallbackConfig:
    """A callback without settings."""

    _target_: str = setting(MISSING, "Class of the callback; set by the option.")


@dataclass(kw_only=True, slots=True)
class EarlyStoppingConfig(CallbackConfig):
    """When a run ends before its last step, because validation no longer improves."""

    patience: int = setting(
        3,
        "Validations without a lower loss before the run ends (Lightning's default).",
        ge=1,
        aliases={"early_stopping_patience": "Transformers and TRL and Axolotl"},
    )
    min_delta: float = setting(
        0.0, "Nats a token by which a loss must fall to count as lower (Lightning's default).", ge=0
    )


@dataclass(kw_only=True, slots=True)
class FiniteGuardConfig(CallbackConfig):
    """When a loss or gradient that is not finite stops the run."""

    check_every_n_steps: int = setting(1, "Optimizer steps between checks.", ge=1)


@dataclass(kw_only=True, slots=True)
class MemoryConfig(CallbackConfig):
    """The interval at which freed memory goes back to the system."""

    trim_every_n_steps: int = setting(
        2, "Optimizer steps between returns of freed pages (measured: experiments/LOG.md).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class ProgressConfig(CallbackConfig):
    """The terminal output during training."""

    plain_every_n_steps: int = setting(
        10, "Optimizer steps between lines where the output is no terminal.", ge=1
    )


@dataclass(kw_only=True, slots=True)
class ScorecardConfig(CallbackConfig):
    """The interval at which a run scores itself on its suite while it trains."""

    every_n_steps: int | None = setting(
        None,
        "Optimizer steps between scorecards of the tuned model, one after the last step included; "
        "null scores nothing before training has ended.",
        ge=1,
    )
    items: int = setting(
        8,
        "Items of each, the suite's first (unverified guess: a minute on two cores, and a share "
        "in steps of an eighth).",
        ge=1,
        only_if=unless(
            "callbacks.scorecard.every_n_steps",
            None,
            needs="callbacks.scorecard.every_n_steps beside it",
        ),
        idle=8,
    )
