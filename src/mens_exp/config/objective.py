"""The supervised tokens, and the loss over them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import Effect, setting

LABELLINGS = ("assistant", "causal", "last_k")  # the labelings that rows/encode implements


class Turns(Enum):
    """The assistant turns that are supervised."""

    all = "all"
    last = "last"


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """Settings common to all objectives, including user-defined ones."""

    _target_: str = setting(MISSING, "Class of the objective; set by the option.")
    name: str = setting(MISSING, "Its name in records; set by the option.")
    labels: str = setting(
        MISSING, "Which tokens are supervised: assistant, causal or last_k; set by the option."
    )


@dataclass(kw_only=True, slots=True)
class CrossEntropyConfig(ObjectiveConfig):
    """Next-token cross entropy over the supervised tokens."""

    chunk_tokens: int = setting(
        64,
        "Supervised positions whose logits exist at one time (memory: chunk × vocabulary × 4 B).",
        ge=1,
        changes=Effect.NOTHING,
    )


@dataclass(kw_only=True, slots=True)
class CausalObjective(CrossEntropyConfig):
    """Causal language modeling: every token is supervised."""

    name: str = "causal"
    labels: str = "causal"


@dataclass(kw_only=True, slots=True)
class AssistantObjective(CrossEntropyConfig):
    """Supervise the assistant's turns, each with its end marker."""

    name: str = "assistant"
    labels: str = "assistant"
    turns: Turns = setting(
        Turns.all, "Which assistant turns of a conversation are learned: all, or the last alone."
    )


@dataclass(kw_only=True, slots=True)
class LastKObjective(CrossEntropyConfig):
    """Supervise the last tokens of each text, including the end marker of its last answer."""

    name: str = "last_k"
    labels: str = "last_k"
    k: int = setting(
        1,
        "Tokens learned at the end of each text (1, the seeds' default, is the last one alone); "
        "0 is every token after the prompt.",
        ge=0,
        le=64,
    )
