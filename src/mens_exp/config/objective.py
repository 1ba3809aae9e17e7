"""Which tokens are learned, and the loss over them."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["LABELLINGS", "CrossEntropyConfig", "ObjectiveConfig"]

LABELLINGS = ("assistant", "causal")  # what rows/encode knows how to label


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """What every objective has, one of the user's own included."""

    _target_: str = setting(MISSING, "Class of the objective; set by the option.")
    name: str = setting(MISSING, "Its name in records; set by the option.")
    labels: str = setting(
        MISSING, "Which tokens are supervised: assistant or causal; set by the option."
    )


@dataclass(kw_only=True, slots=True)
class CrossEntropyConfig(ObjectiveConfig):
    """Next-token cross entropy over the supervised tokens."""

    chunk_tokens: int = setting(
        64,
        "Supervised positions whose logits exist at one time (memory: chunk × vocabulary × 4 B).",
        ge=1,
    )
