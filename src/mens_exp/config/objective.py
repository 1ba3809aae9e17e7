"""Which tokens are learned, and the loss over them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = [
    "LABELLINGS",
    "AssistantObjective",
    "CausalObjective",
    "ObjectiveConfig",
    "Turns",
    "loss_settings",
]

LABELLINGS = ("assistant", "causal")  # what rows/encode knows how to label


class Turns(Enum):
    """Which of the assistant's turns are learned."""

    all = "all"
    last = "last"


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """Next-token cross entropy over the supervised tokens."""

    _target_: str = setting(MISSING, "Class of the objective; set by the option.")
    name: str = setting(MISSING, "Name of the labelling rule; set by the option.")
    chunk_tokens: int = setting(
        64,
        "Supervised positions whose logits exist at one time (memory: chunk × vocabulary × 4 B).",
        ge=1,
    )


@dataclass(kw_only=True, slots=True)
class CausalObjective(ObjectiveConfig):
    """Every token is learned."""

    name: str = "causal"


@dataclass(kw_only=True, slots=True)
class AssistantObjective(ObjectiveConfig):
    """The assistant's turns are learned, each with its end marker."""

    name: str = "assistant"
    turns: Turns = setting(
        Turns.all, "Which assistant turns of a conversation are learned: all, or the last alone."
    )


def loss_settings(objective: ObjectiveConfig) -> dict[str, Any]:
    """Return what the objective's class is made from: all but what labels the tokens.

    Args:
        objective: the `objective` group.

    Returns:
        Its values by name, ``_target_`` included.
    """
    names = [field.name for field in dataclasses.fields(objective) if field.name != "turns"]
    return {name: getattr(objective, name) for name in names}
