"""When the training state is saved, so that a stopped run can go on."""

from __future__ import annotations

from dataclasses import dataclass

from mens_exp.config.fields import Condition, setting

__all__ = ["CheckpointConfig"]


_SAVES = Condition(
    holds=lambda config: "checkpoint" in config.callbacks,
    words=lambda _: "without the checkpoint callback",
    needs="callbacks=default, or another choice with checkpoint in it",
)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """The interval of saved training states, and the number of states that stay."""

    every_n_steps: int = setting(
        20,
        "Optimizer steps between checkpoints.",
        ge=1,
        only_if=_SAVES,
        idle=20,
        aliases={"save_steps": "Transformers and TRL, Axolotl and LLaMA-Factory"},
    )
    keep: int = setting(
        2,
        "Newest checkpoints kept.",
        ge=1,
        only_if=_SAVES,
        idle=2,
        aliases={"save_total_limit": "Transformers and TRL and Axolotl"},
    )
