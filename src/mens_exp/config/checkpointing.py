"""Whether activations are kept for the backward pass, or computed again there."""

from __future__ import annotations

from enum import Enum

__all__ = ["Checkpointing", "is_wanted"]

# Below it, activations of a usual micro-batch fit any GPU that computes in bf16, and computing
# them again costs a third of a step (measured on CPU: experiments/LOG.md; on a GPU a guess).
_BILLION = 1_000_000_000


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


def is_wanted(setting: str, *, parameters: int, on_gpu: bool) -> bool:
    """Resolve ``model.gradient_checkpointing``.

    Args:
        setting: auto, on or off, however spelled.
        parameters: of the base model.
        on_gpu: whether a GPU does the work.

    Returns:
        For auto, whether a GPU trains a base of at least a billion parameters. On CPU, memory is
        cheaper than the time of a second forward pass.
    """
    wanted = Checkpointing.read(setting)
    if wanted is Checkpointing.auto:
        return on_gpu and parameters >= _BILLION
    return wanted is Checkpointing.on
