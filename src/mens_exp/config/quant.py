"""Settings of `quant`, and the quantizer specs used by planning, rules, records and reports.

Nothing here imports torch. :attr:`QuantizerSpec.binding` names the object that loads, dequantizes
and describes weights; :mod:`mens_exp.quant.binding` imports it.

An installed package adds a quantizer under the entry point group ``mens_exp.quantizers``
(:mod:`mens_exp.config.plugins`). Its name is the value of `quant.quant_type`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from mens_exp.config.evaluation import OWN_GRAPH_ANSWERS
from mens_exp.config.fields import Condition, Effect, plain, setting, unless, value_at, when
from mens_exp.config.plugins import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

NESTED_BLOCK = 256  # scales per second-level scale in bitsandbytes; asserted in tests/quant
PATTERNS = ("type_pattern", "block_size_pattern", "double_quant_pattern")  # per-module settings

_F32 = 32  # bits of a scale


@dataclass(frozen=True, kw_only=True)
class QuantizerSpec:
    """The spec of a quantizer; the defaults suit a user's quantizer.

    Attributes:
        name: value of `quant.quant_type`, and the name in records.
        binding: ``module:name`` of the :class:`mens_exp.quant.binding.Binding` that loads weights.
        code_bits: bits of a stored weight without its scales; None means the compute format.
        in_blocks: whether scales are per block of weights, so that blocks must divide every width.
        usual_block: default block size in weights.
        is_made_again: whether the values can be recomputed from the published weights and an
            adapter's record, as merges and error attribution require.
        starts_adapters: whether an adapter can be initialized from the quantization error.
        stays_whole: why weights cannot be sharded across processes; None if they can.
        offloads: whether the codes of its layers can stay in host memory.
        settings: the settings of the `quant` group that it reads, except its name and the
            compute format.
        backends: supported backends.
        weights_per_core_s: weights quantized per second on one CPU core; None if unknown.
        keeps_inputs: whether the backward pass keeps the input of every quantized layer.
        tolerance: relative rounding difference between evaluation and training; None means that
            of the compute format.
        differs_elsewhere: why the quantized base may compute something else in other software.
        package: the required package, which is also the name of our extra.
        keeps_codes: whether the published base is already quantized and its codes are kept; the
            checkpoint defines which layers are quantized, and how.
        usual_double_quant: default of `quant.double_quant`.
    """

    name: str
    binding: str
    code_bits: int | None
    in_blocks: bool = False
    usual_block: int = 64
    is_made_again: bool = False
    starts_adapters: bool = False
    stays_whole: str | None = "nothing says how processes could hold parts of such weights"
    offloads: bool = False
    settings: frozenset[str] = frozenset({"skip"})
    backends: tuple[str, ...] = ("qlora",)
    weights_per_core_s: float | None = None
    keeps_inputs: bool = False
    tolerance: float | None = None
    differs_elsewhere: str | None = None
    package: str | None = None
    keeps_codes: bool = False
    usual_double_quant: bool = False

    def with_levels(self, levels: Sequence[float]) -> QuantizerSpec:
        """Return the spec for `quant.levels`; the same if the quantizer does not read them."""
        del levels
        return self

    @property
    def is_quantized(self) -> bool:
        """Whether the stored weights differ from the compute format."""
        return self.code_bits is not None

    @property
    def is_kept(self) -> bool:
        """Whether its values exist only in a loaded base and cannot be recomputed."""
        return self.is_quantized and not self.is_made_again

    def bits_per_weight(
        self, *, compute_bits: int, block: int, double_quant: bool, rows_per_weight: float
    ) -> float:
        """Return the bits per stored weight, including its share of the scales.

        Args:
            compute_bits: bits per weight in the compute format.
            block: weights per scale.
            double_quant: whether the scales are quantized.
            rows_per_weight: rows divided by weights; without blocks, each row has an f32 scale.
        """
        del double_quant, block
        return compute_bits if self.code_bits is None else self.code_bits + _F32 * rows_per_weight

    def loading_arguments(self, *, double_quant: bool) -> str:
        """Return the arguments of ``from_pretrained`` that load the base, for a model card."""
        del double_quant
        return f"    # quantized as {self.name}, which transformers does not load by itself\n"


def _scale_bits(block: int, *, double_quant: bool) -> float:
    """Return the bits that a weight adds for its share of its block's scale.

    An f32 scale per block of 64 adds half a bit; quantized to 8 bits, with an f32 scale per 256
    scales, it adds 0.127.
    """
    return 8 / block + _F32 / (block * NESTED_BLOCK) if double_quant else _F32 / block


@dataclass(frozen=True, kw_only=True)
class _FourBit(QuantizerSpec):
    """Blockwise 4-bit quantization (QLoRA, arXiv:2305.14314, section 3)."""

    binding: str = "mens_exp.quant.bnb:FOUR_BIT"
    code_bits: int | None = 4
    in_blocks: bool = True
    is_made_again: bool = True
    starts_adapters: bool = True
    stays_whole: str | None = None
    offloads: bool = True
    usual_double_quant: bool = True
    settings: frozenset[str] = frozenset(
        {"double_quant", "block_size", "storage_dtype", "skip", *PATTERNS}
    )
    backends: tuple[str, ...] = ("qlora", "proxy")
    # measured: bitsandbytes 0.50, NF4 with double quantization, on one EPYC core
    weights_per_core_s: float | None = 6e6

    def bits_per_weight(
        self, *, compute_bits: int, block: int, double_quant: bool, rows_per_weight: float
    ) -> float:
        """Return 4 bits plus a share of the block's scale."""
        del compute_bits, rows_per_weight
        return 4 + _scale_bits(block, double_quant=double_quant)

    def loading_arguments(self, *, double_quant: bool) -> str:
        """Return a configuration of bitsandbytes."""
        return (
            "    quantization_config=BitsAndBytesConfig(\n"
            "        load_in_4bit=True,\n"
            f'        bnb_4bit_quant_type="{self.name}",\n'
            f"        bnb_4bit_use_double_quant={double_quant},\n"
            "        bnb_4bit_compute_dtype=torch.bfloat16,\n"
            "    ),\n"
        )


@dataclass(frozen=True, kw_only=True)
class _EightBit(QuantizerSpec):
    """8-bit quantization with one f32 scale per row (LLM.int8, arXiv:2208.07339)."""

    binding: str = "mens_exp.quant.bnb:EIGHT_BIT"
    code_bits: int | None = 8
    stays_whole: str | None = (
        "bitsandbytes keeps codes of eight bits outside of what can be in parts"
    )
    weights_per_core_s: float | None = 3.4e7  # measured: 5.6 times as many as NF4 in that minute
    keeps_inputs: bool = True
    tolerance: float | None = 0.2
    differs_elsewhere: str | None = (
        "evaluated elsewhere, 8-bit layers quantize their inputs, which on CPU they do not here"
    )

    def loading_arguments(self, *, double_quant: bool) -> str:
        """Return a configuration of bitsandbytes."""
        del double_quant
        return "    quantization_config=BitsAndBytesConfig(load_in_8bit=True),\n"


@dataclass(frozen=True, kw_only=True)
class _Codebook(QuantizerSpec):
    """Codebook quantization in plain torch: a reference that runs on every device."""

    in_blocks: bool = True
    is_made_again: bool = True
    offloads: bool = True
    settings: frozenset[str] = frozenset({"block_size", "skip", *PATTERNS})
    weights_per_core_s: float | None = 1.8e7  # measured: NVFP4, the slowest, on one EPYC core
    zero_point_bits: int = 0  # per block

    def bits_per_weight(
        self, *, compute_bits: int, block: int, double_quant: bool, rows_per_weight: float
    ) -> float:
        """Return the bits of a stored code plus a share of the block's scale and zero point."""
        del compute_bits, rows_per_weight
        assert self.code_bits is not None, "of every codebook"
        scales = _scale_bits(block, double_quant=double_quant and "double_quant" in self.settings)
        return self.code_bits + scales + self.zero_point_bits / block


@dataclass(frozen=True, kw_only=True)
class _Levels(_Codebook):
    """A codebook whose levels are a setting."""

    def with_levels(self, levels: Sequence[float]) -> QuantizerSpec:
        """Return the spec with as many bits per code as the levels need."""
        bits = max(1, (len(levels) - 1).bit_length())
        return dataclasses.replace(self, code_bits=bits) if levels else self


def _codebook(name: str, code_bits: int, **more: Any) -> _Codebook:
    own = {"binding": f"mens_exp.quant.codebook:{name.upper()}"}
    return _Codebook(name=name, code_bits=code_bits, **(own | more))


_OF_FORMAT = frozenset({"skip", *PATTERNS})  # the format has its own block
_OF_BLOCKS = frozenset({"double_quant", "block_size", "skip", *PATTERNS})


@dataclass(frozen=True, kw_only=True)
class _Prequantized(QuantizerSpec):
    """Codes from a quantized checkpoint."""

    def loading_arguments(self, *, double_quant: bool) -> str:
        """Return a comment: the checkpoint's config.json defines how to load it."""
        del double_quant
        return "    # published quantized: transformers needs the package of its format\n"


@dataclass(frozen=True, kw_only=True)
class _Unquantized(QuantizerSpec):
    """Weights in the compute format."""

    binding: str = "mens_exp.quant.binding:UNQUANTIZED"
    code_bits: int | None = None
    stays_whole: str | None = None
    settings: frozenset[str] = frozenset()
    backends: tuple[str, ...] = ("lora", "burn", "full")
    weights_per_core_s: float | None = math.inf

    def loading_arguments(self, *, double_quant: bool) -> str:
        """Return nothing: transformers needs no arguments."""
        del double_quant
        return ""


BUILT_IN: dict[str, QuantizerSpec] = {
    spec.name: spec
    for spec in (
        _FourBit(name="nf4"),
        _FourBit(name="fp4"),
        _EightBit(name="int8"),
        *(_codebook(f"nf{bits}", bits, settings=_OF_BLOCKS) for bits in (2, 3, 5, 6, 7, 8)),
        *(_codebook(f"int{bits}", bits, settings=_OF_BLOCKS) for bits in (2, 3, 4, 5, 6, 7)),
        *(_codebook(f"uint{bits}", bits, zero_point_bits=_F32) for bits in range(2, 9)),
        _Levels(
            name="codebook",
            binding="mens_exp.quant.codebook:LEVELS",
            code_bits=8,  # at most
            settings=_OF_BLOCKS | {"levels"},
        ),
        *(
            _codebook(
                f"hqq{bits}",
                bits,
                zero_point_bits=_F32,
                binding=f"mens_exp.quant.package_codes:HQQ{bits}",
                package="hqq",
                weights_per_core_s=None,
            )
            for bits in (2, 3, 4, 8)
        ),
        _codebook(
            "torchao4",
            4,
            binding="mens_exp.quant.package_codes:TORCHAO4",
            package="torchao",
            weights_per_core_s=None,
        ),
        QuantizerSpec(
            name="torchao8",
            binding="mens_exp.quant.package_codes:TORCHAO8",
            code_bits=8,
            is_made_again=True,
            settings=_OF_FORMAT,
            package="torchao",
        ),
        _codebook("mxfp4", 4, settings=_OF_FORMAT, usual_block=32),
        _codebook("nvfp4", 4, settings=_OF_FORMAT, usual_block=16),
        _Prequantized(
            name="prequantized",
            binding="mens_exp.quant.prequantized:PREQUANTIZED",
            code_bits=8,  # at most; depends on the checkpoint
            settings=frozenset(),
            weights_per_core_s=None,
            keeps_codes=True,
        ),
        _Unquantized(name="none"),
    )
}


QUANTIZERS = Registry(
    kind="quantizer",
    group="mens_exp.quantizers",
    spec=QuantizerSpec,
    built_in=BUILT_IN,
    options="quant",
)


def names_for(backend: str) -> tuple[str, ...]:
    """Return the built-in quantizers that support a backend."""
    return tuple(name for name, spec in BUILT_IN.items() if backend in spec.backends)


def names_made_again() -> tuple[str, ...]:
    """Return the built-in quantizers whose values can be recomputed from published weights."""
    return tuple(name for name, spec in BUILT_IN.items() if spec.is_made_again)


def names_that_read(setting: str) -> tuple[str, ...]:
    """Return the built-in quantizers for which a setting of the `quant` group has an effect."""
    return tuple(name for name, spec in BUILT_IN.items() if setting in spec.settings)


class QuantType(Enum):
    """Name of a quantizer; its :class:`QuantizerSpec` describes it."""

    nf4 = "nf4"
    fp4 = "fp4"
    int8 = "int8"
    nf2 = "nf2"
    nf3 = "nf3"
    nf5 = "nf5"
    nf6 = "nf6"
    nf7 = "nf7"
    nf8 = "nf8"
    int2 = "int2"
    int3 = "int3"
    int4 = "int4"
    int5 = "int5"
    int6 = "int6"
    int7 = "int7"
    uint2 = "uint2"
    uint3 = "uint3"
    uint4 = "uint4"
    uint5 = "uint5"
    uint6 = "uint6"
    uint7 = "uint7"
    uint8 = "uint8"
    codebook = "codebook"
    hqq2 = "hqq2"
    hqq3 = "hqq3"
    hqq4 = "hqq4"
    hqq8 = "hqq8"
    torchao4 = "torchao4"
    torchao8 = "torchao8"
    mxfp4 = "mxfp4"
    nvfp4 = "nvfp4"
    prequantized = "prequantized"
    none = "none"
    vars().update({name: name for name in QUANTIZERS.installed_names()})

    @property
    def spec(self) -> QuantizerSpec:
        """The quantizer."""
        return QUANTIZERS.named(self.value)


DEFAULT_QUANTIZER = QuantType.nf4  # the default of 4-bit trainers


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


def levels_are_read(config: Any) -> bool:
    """Return whether any quantizer that a configuration applies reads `quant.levels`."""
    pattern = value_at(config, "quant.type_pattern") or {}
    compared = value_at(config, "attribute.quant_types") or []
    names = {value_at(config, _KEY), *map(plain, [*pattern.values(), *compared])}
    return any("levels" in spec.settings for spec in map(QUANTIZERS.known, names) if spec)


def _where_read(name: str, otherwise: Condition) -> Condition:
    """Return the condition that the quantizer reads a setting, with the words of `otherwise`."""

    def holds(config: Any) -> bool:
        spec = QUANTIZERS.known(value_at(config, _KEY))
        return otherwise.holds(config) if spec is None else name in spec.settings

    return dataclasses.replace(otherwise, holds=holds)


_DOUBLE = _where_read(
    "double_quant",
    when(
        _KEY,
        *names_that_read("double_quant"),
        needs="quant.quant_type=nf4, fp4, codebook, nf2 to nf8 or int2 to int7",
    ),
)
_BLOCK = _where_read("block_size", when(_KEY, *names_that_read("block_size")))
_STORAGE = _where_read("storage_dtype", when(_KEY, *names_that_read("storage_dtype")))
_SKIP = _where_read("skip", unless(_KEY, "none", "prequantized"))
_LEVELS = dataclasses.replace(when(_KEY, *names_that_read("levels")), holds=levels_are_read)
_PATTERN = _where_read("type_pattern", when(_KEY, *names_that_read("type_pattern")))
_BLOCKS = _where_read("block_size_pattern", when(_KEY, *names_that_read("block_size_pattern")))
_DOUBLES = _where_read("double_quant_pattern", unless(_KEY, "int8", "prequantized", "none"))
_READ = frozenset({"attribute"})


@dataclass(kw_only=True, slots=True)
class QuantConfig:
    """Quantization of the base: by bitsandbytes (QLoRA, arXiv:2305.14314), or by a codebook."""

    quant_type: QuantType = setting(
        DEFAULT_QUANTIZER,
        "nf4 or fp4, four bits; int8, eight, one scale a row (LLM.int8, arXiv:2208.07339); nf2, "
        "nf3, nf5 to nf8, int2 to int7, uint2 to uint8, mxfp4 (OCP) or nvfp4 (NVIDIA), references "
        "in plain torch for comparisons; codebook, the levels of quant.levels; hqq2, hqq3, hqq4 or "
        "hqq8, integers whose zero points the hqq package finds; torchao4 or torchao8, torchao's "
        "own integers; prequantized "
        "keeps the codes of a quantized checkpoint (GPTQ, AWQ, FP8, bitsandbytes, "
        "compressed-tensors); none leaves the weights in the compute format.",
        contract=("quant.base",),
        read_by=_READ,
        aliases={"quantize": "LitGPT", "bnb_4bit_quant_type": "Transformers and bitsandbytes"},
    )
    double_quant: bool = setting(
        True,  # the value of the setting, named by its position in the schema
        "Quantize the block scales too: for nf4, 4.127 instead of 4.5 bits a weight (the paper's "
        "default for nf4 and fp4; false for others).",
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
    levels: list[float] = setting(
        [],
        "Levels of quant=codebook, 2 to 256 in ascending order, such as [-1,-0.4,0,0.4,1]. Each "
        "block's scale maps its largest magnitude to the largest magnitude of a level.",
        only_if=_LEVELS,
        idle=[],
        read_by=_READ,
        example="[-1,-0.4,0,0.4,1]",
    )
    storage_dtype: StorageDtype = setting(
        StorageDtype.u8,
        "Element type of the tensor that holds the packed codes: u8, or bf16 and f32 for sharding "
        "together with weights of that type. The codes are the same.",
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
        example="[lm_head,down_proj]",
    )
    type_pattern: dict[str, QuantType] = setting(
        {},
        "Quantizers of single modules, by target as in quant.skip: {mlp: nf2, down_proj: nf8}. "
        "The last match counts. Each has the block size of this group where it reads it; of "
        "quantizers other than quant_type, nf4 and fp4 alone follow double_quant.",
        only_if=_PATTERN,
        idle={},
        example="{down_proj:nf8}",
    )
    block_size_pattern: dict[str, int] = setting(
        {},
        "Block sizes of single modules, by target as in quant.skip: {mlp: 128, down_proj: 64}. "
        "The last match counts. The values are those of block_size; formats with a fixed "
        "block keep it.",
        only_if=_BLOCKS,
        idle={},
        example="{mlp:128}",
    )
    double_quant_pattern: dict[str, bool] = setting(
        {},
        "Double quantization of single modules, by target as in quant.skip: {mlp: false}. The last "
        "match counts.",
        only_if=_DOUBLES,
        idle={},
        example="{mlp:false}",
    )

    @property
    def spec(self) -> QuantizerSpec:
        """The quantizer of modules without a matching pattern."""
        return self.quant_type.spec.with_levels(self.levels)

    def of(self, quant_type: QuantType) -> QuantConfig:
        """Return the settings for modules assigned to a quantizer by a pattern."""
        spec = quant_type.spec
        reads = spec.settings
        follows = quant_type is self.quant_type or spec.usual_double_quant
        return dataclasses.replace(
            self,
            quant_type=quant_type,
            double_quant=self.double_quant and follows and "double_quant" in reads,
            block_size=self.block_size if "block_size" in reads else None,
            levels=self.levels if "levels" in reads else [],
            type_pattern={},
            block_size_pattern={},
            double_quant_pattern={},
        )

    @property
    def is_quantized(self) -> bool:
        """Whether any base weights are quantized."""
        return self.spec.is_quantized

    @property
    def block(self) -> int:
        """Number of weights that share a scale."""
        return self.block_size or self.spec.usual_block


def unquantized(compute_dtype: ComputeDtype = ComputeDtype.bf16) -> QuantConfig:
    """Return the group for unquantized base weights."""
    return QuantConfig(quant_type=QuantType.none, double_quant=False, compute_dtype=compute_dtype)
