"""Activations computed again in the backward pass, layer by layer (arXiv:1604.06174)."""

from __future__ import annotations

from typing import Any

__all__ = ["enable"]


def enable(model: Any) -> None:
    """Let every decoder layer of a transformers model compute its activations again.

    Without re-entry: then neither must the frozen embedding's output require a gradient, nor
    does PEFT's own preparation come into it, which would cast embedding and head to f32.
    """
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
