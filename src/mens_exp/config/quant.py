"""How the frozen base weights are stored and computed with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mens_exp.config.fields import setting

__all__ = ["ComputeDtype", "QuantConfig", "QuantType"]


class QuantType(Enum):
    """Four-bit data type of the base weights."""

    nf4 = "nf4"
    fp4 = "fp4"


class ComputeDtype(Enum):
    """Number format of the matrix products."""

    bf16 = "bf16"
    f32 = "f32"


@dataclass(kw_only=True, slots=True)
class QuantConfig:
    """Four-bit quantization by bitsandbytes, in blocks of 64 weights (QLoRA, arXiv:2305.14314)."""

    quant_type: QuantType = setting(QuantType.nf4, "Four-bit type: nf4 or fp4.")
    double_quant: bool = setting(
        True,  # the value of the setting, named by its position in the schema
        "Quantize the block scales too: 4.127 instead of 4.5 bits a weight (the paper's default).",
    )
    compute_dtype: ComputeDtype = setting(
        ComputeDtype.bf16, "Format of the matrix products: bf16 or f32 (the paper's is bf16)."
    )
