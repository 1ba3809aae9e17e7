"""LoRA on the full causal model, its base unquantized and frozen."""

from __future__ import annotations

from mens_exp.backends.qlora import QloraBackend


class LoraBackend(QloraBackend):
    """The same graph as QLoRA's over a base in f32 or bf16; ``quant=none`` makes the difference."""
