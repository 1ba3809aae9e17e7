"""LoRA on the full causal model, with an unquantized, frozen base."""

from __future__ import annotations

from mens_exp.backends.qlora import QloraBackend


class LoraBackend(QloraBackend):
    """The QLoRA model over a base in f32 or bf16; the only difference is ``quant=none``."""
