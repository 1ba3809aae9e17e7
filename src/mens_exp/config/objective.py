"""Which tokens are learned, and the loss over them."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["LABELLINGS", "ObjectiveConfig"]

LABELLINGS = ("assistant", "causal")  # what rows/encode knows how to label


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
