"""Whether activations are kept for the backward pass, or computed again there."""

from __future__ import annotations

from enum import Enum

__all__ = ["Checkpointing"]


class Checkpointing(Enum):
    """When a decoder layer's activations are computed again in the backward pass."""

    auto = "auto"
    on = "on"
    off = "off"

    @classmethod
    def read(cls, text: str) -> Checkpointing | None:
        """Return what a value of ``model.gradient_checkpointing`` means, or None.

        YAML 1.1 reads a bare ``on`` as true and ``off`` as false, so both spellings are accepted;
        that is also why the field is text: an Enum of OmegaConf's refuses truth values.
        """
        word = text.lower()
        return cls.__members__.get({"true": "on", "false": "off"}.get(word, word))
