"""The storage and compute formats of the frozen base weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mens_exp.config.fields import Condition, Effect, setting, unless, value_at, when
from mens_exp.config.quantizers import (
    QuantizerSpec,
    installed_names,
    known,
    names_that_read,
    spec_named,
)
from mens_exp.config.suite import OWN_GRAPH_ANSWERS


class QuantType(Enum):
    """Name of a quantizer; :mod:`mens_exp.config.quantizers` knows what each of them does."""

    nf4 = "nf4"
    fp4 = "fp4"
    int8 = "int8"
    none = "none"
    vars().update({name: name for name in installed_names()})

    @property
    def spec(self) -> QuantizerSpec:
        """The quantizer."""
        return spec_named(self.value)


UNLESS_TOLD = QuantType.nf4  # what 4-bit trainers take


class ComputeDtype(Enum):
    """Number format of the matrix products."""

    bf16 = "bf16"
    f32 = "f32"


class StorageDtype(Enum):
    """Element type of the tensor that stores the packed 4-bit codes."""

    u8 = "u8"
    bf16 = "bf16"
    f32 = "f32"


_KEY = "quant.quant_type"


def _where_read(name: str, otherwise: Condition) -> Condition:
    """Return the condition that the quantizer reads a setting; its words are another's."""

    def holds(config: Any) -> bool:
        spec = known(value_at(config, _KEY))
        return otherwise.holds(config) if spec is None else name in spec.settings

    return dataclasses.replace(otherwise, holds=holds)


_DOUBLE = _where_read("double_quant", when(_KEY, *names_that_read("double_quant")))
_BLOCK = _where_read("block_size", when(_KEY, *names_that_read("block_size")))
_STORAGE = _where_read("storage_dtype", when(_KEY, *names_that_read("storage_dtype")))
_SKIP = _where_read("skip", unless(_KEY, "none"))
_READ = frozenset({"attribute"})


@dataclass(kw_only=True, slots=True)
class QuantConfig:
    """Quantization with bitsandbytes: blockwise 4-bit (QLoRA, arXiv:2305.14314) or 8-bit."""

    quant_type: QuantType = setting(
        UNLESS_TOLD,
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
        only_if=_DOUBLE,
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
        only_if=_BLOCK,
        idle=None,
    )
    storage_dtype: StorageDtype = setting(
        StorageDtype.u8,
        "Element type of the tensor that holds the packed codes: u8, or bf16 and f32 for sharding "
        "beside weights of that type. The codes are the same.",
        changes=Effect.NOTHING,
        only_if=(_STORAGE, unless("backend.name", "proxy", why="which keeps no packed codes")),
        idle=StorageDtype.u8,
    )
    skip: list[str] = setting(
        [],
        "Modules left unquantized, in the compute format: targets as in lora.targets (mlp, "
        "down_proj, '*.layers.0.*'). The head always is.",
        read_by=_READ,
        only_if=_SKIP,
        idle=[],
    )

    @property
    def spec(self) -> QuantizerSpec:
        """The quantizer."""
        return self.quant_type.spec

    @property
    def is_quantized(self) -> bool:
        """Whether base weights are quantized at all."""
        return self.spec.is_quantized

    @property
    def block(self) -> int:
        """Number of weights that share a scale."""
        return self.block_size or 64


def unquantized(compute_dtype: ComputeDtype = ComputeDtype.bf16) -> QuantConfig:
    """Return the group for base weights in a compute format."""
    return QuantConfig(quant_type=QuantType.none, double_quant=False, compute_dtype=compute_dtype)
