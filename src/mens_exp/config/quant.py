"""The storage and compute formats of the frozen base weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mens_exp.config.fields import Effect, setting, unless, when
from mens_exp.config.suite import OWN_GRAPH_ANSWERS


class QuantType(Enum):
    """Data type of the base weights."""

    nf4 = "nf4"
    fp4 = "fp4"
    int8 = "int8"
    none = "none"


class ComputeDtype(Enum):
    """Number format of the matrix products."""

    bf16 = "bf16"
    f32 = "f32"


class StorageDtype(Enum):
    """Element type of the tensor that stores the packed 4-bit codes."""

    u8 = "u8"
    bf16 = "bf16"
    f32 = "f32"


_IN_FOUR_BITS = when("quant.quant_type", "nf4", "fp4")
_READ = frozenset({"attribute"})


@dataclass(kw_only=True, slots=True)
class QuantConfig:
    """Quantization with bitsandbytes: blockwise 4-bit (QLoRA, arXiv:2305.14314) or 8-bit."""

    quant_type: QuantType = setting(
        QuantType.nf4,
        "nf4 or fp4, four bits; int8, eight, one scale a row (LLM.int8, arXiv:2208.07339); none "
        "leaves the weights in the compute format.",
        contract=("quant.base",),
        read_by=_READ,
        aliases={"quantize": "LitGPT", "bnb_4bit_quant_type": "Transformers and bitsandbytes"},
    )
    double_quant: bool = setting(
        True,  # the value of the setting, named by its position in the schema
        "Quantize the block scales too: 4.127 instead of 4.5 bits a weight (the paper's default).",
        contract=("quant.double_quant",),
        read_by=_READ,
        only_if=_IN_FOUR_BITS,
        idle=False,
        aliases={
            "bnb_4bit_use_double_quant": "Transformers and bitsandbytes",
            "double_quantization": "LLaMA-Factory",
        },
        label="double quantization",
    )
    compute_dtype: ComputeDtype = setting(
        ComputeDtype.bf16,
        "Format of the matrix products: bf16 or f32 (the paper's is bf16).",
        read_by=_READ,
        even_if=OWN_GRAPH_ANSWERS,
        aliases={"bnb_4bit_compute_dtype": "Transformers and bitsandbytes"},
    )
    block_size: int | None = setting(
        None,
        "Weights that share a scale: 64, 128, 256, 512, 1024, 2048 or 4096; null is 64 (the "
        "paper's). It must divide the width of every layer that is quantized.",
        ge=64,
        le=4096,
        read_by=_READ,
        only_if=_IN_FOUR_BITS,
        idle=None,
    )
    storage_dtype: StorageDtype = setting(
        StorageDtype.u8,
        "Element type of the tensor that holds the packed codes: u8, or bf16 and f32 for sharding "
        "beside weights of that type. The codes are the same.",
        changes=Effect.NOTHING,
        only_if=(_IN_FOUR_BITS, unless("backend.name", "proxy", why="which keeps no packed codes")),
        idle=StorageDtype.u8,
    )
    skip: list[str] = setting(
        [],
        "Modules left unquantized, in the compute format: targets as in lora.targets (mlp, "
        "down_proj, '*.layers.0.*'). The head always is.",
        read_by=_READ,
        only_if=unless("quant.quant_type", "none"),
        idle=[],
    )

    @property
    def is_four_bit(self) -> bool:
        """Whether base weights are quantized to 4 bits, in blocks."""
        return self.quant_type in {QuantType.nf4, QuantType.fp4}

    @property
    def is_quantized(self) -> bool:
        """Whether base weights are quantized at all."""
        return self.quant_type is not QuantType.none

    @property
    def block(self) -> int:
        """Number of weights that share a scale."""
        return self.block_size or 64
