"""Activations computed again in the backward pass, layer by layer (arXiv:1604.06174)."""

from __future__ import annotations

from typing import Any

from mens_exp.config.checkpointing import Checkpointing

__all__ = ["enable", "is_wanted"]

# Below it, activations of a usual micro-batch fit any GPU that computes in bf16, and computing
# them again costs a third of a step (unverified guess; task=plan shows both figures).
_BILLION = 1_000_000_000


def is_wanted(setting: str, *, parameters: int, device_type: str) -> bool:
    """Resolve ``model.gradient_checkpointing``.

    Args:
        setting: auto, on or off.
        parameters: of the base model.
        device_type: torch's name of the device's kind.

    Returns:
        For auto, whether the model is on a GPU and has at least a billion parameters. On CPU,
        memory is cheaper than the time of a second forward pass.
    """
    wanted = Checkpointing.read(setting)
    if wanted is Checkpointing.auto:
        return device_type == "cuda" and parameters >= _BILLION
    return wanted is Checkpointing.on


def enable(model: Any) -> None:
    """Let every decoder layer of a transformers model compute its activations again.

    Without re-entry: then neither the frozen embedding's output must require a gradient, nor
    does PEFT's own preparation come into it, which would cast embedding and head to f32.
    """
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
