"""Checkpoints that store linear layers as codes: their formats, and the weights that they hold.

Supported are GPTQ (AutoGPTQ, GPTQModel), AWQ (AutoAWQ's GEMM layout), FP8 by blocks (DeepSeek-V3),
bitsandbytes in 4 and 8 bits, and compressed-tensors (llm-compressor) with one scheme for all
layers. `quantization_config` in config.json names the format, and the names of the tensors show
which layers are stored as codes. :mod:`mens_exp.model.stored_codes` reads them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mens_exp.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Shape = tuple[int, ...]
    Read = Callable[[str], bytes | None]

_WORD: Final = 32  # bits of the integers that codes are packed into
_WORD_CODES: Final = (2, 4, 8)
_F32: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFormat:
    """A format of codes.

    Attributes:
        method: its name, as in `quantization_config.quant_method`.
        layout: how codes are packed, if the method has several layouts.
        bits: bits per code.
        group: inputs that share a scale; None is a whole row.
        outputs: outputs that share a scale, if a scale covers a block of outputs and inputs.
        has_zeros: whether a group has a zero point.
        codes: suffix of the tensor of codes.
        element_bytes: size of an element of that tensor, if it packs several codes.
        marker: suffix of a tensor that only a layer stored as codes has.
        others: suffixes of the layer's other tensors, without its bias.
        orders_inputs: whether a tensor gives the group of each input (activation order).
        quantizes_inputs: whether the model was published with activation quantization.
    """

    method: str
    layout: str = ""
    bits: int
    group: int | None
    outputs: int | None = None
    has_zeros: bool = False
    codes: str
    element_bytes: int = 1
    marker: str
    others: tuple[str, ...]
    orders_inputs: bool = False
    quantizes_inputs: bool = False

    def bits_per_weight(self, width: int) -> float:
        """Return the bits of a weight in memory: its code in 2, 4 or 8 bits, and f32 scales."""
        code = next(size for size in _WORD_CODES if self.bits <= size)
        group = width if self.group is None else math.gcd(self.group, width)
        return code + _F32 * (1 + self.has_zeros) / group

    def names(self, path: str) -> set[str]:
        """Return the names of the tensors that form a layer's weight."""
        return {f"{path}.{suffix}" for suffix in (self.codes, self.marker, *self.others)}

    def layers(self, shapes: Mapping[str, Shape], where: str, read: Read) -> dict[str, Shape]:
        """Return the shape ``(O, I)`` of the weight of each layer stored as codes, by path.

        Args:
            shapes: shapes of all tensors, by name.
            where: the directory, for messages.
            read: returns the bytes of a small tensor; None if only headers are known. The shape of
                a 4-bit layer of bitsandbytes is ``(O · I,)`` then.

        Raises:
            ModelFileError: a layer lacks its codes, or their shape is invalid.
        """
        end = f".{self.marker}"
        paths = [name.removesuffix(end) for name in shapes if name.endswith(end)]
        found = {}
        for path in paths:
            try:
                found[path] = self._shape(path, shapes, read)
            except (KeyError, TypeError, ValueError) as error:
                raise ModelFileError(
                    f"these are not the tensors of a {self.method} layer",
                    where=f"{where}: {path}",
                    found=f"{type(error).__name__}: {error}",
                    remedy="download the model again",
                ) from error
        return found

    def _shape(self, path: str, shapes: Mapping[str, Shape], read: Read) -> Shape:
        rows, *columns = shapes[f"{path}.{self.codes}"]
        each = _WORD // self.bits
        if self.method == "gptq":
            return (*columns, rows * each)
        if self.method == "awq":
            return (*(many * each for many in columns), rows)
        if self.method == "bitsandbytes" and self.bits == _FOUR:
            state = read(f"{path}.{self.marker}")
            return (2 * rows * self.element_bytes,) if state is None else _stated_shape(state)
        packed = _PACKED.get(self.layout, self.bits)
        return (rows, *(many * packed // self.bits for many in columns))


def _stated_shape(state: bytes) -> Shape:
    """Return the shape in bitsandbytes' 4-bit state; the tensor of codes is a single column."""
    rows, columns = json.loads(state)["shape"]
    return int(rows), int(columns)


_OF_CACHE: Final = re.compile(r"\.([qkv]|kv)_(scale|zero_point)$")


def is_of_cache(name: str) -> bool:
    """Return whether a tensor is a scale for a quantized KV cache, which only servers use."""
    return _OF_CACHE.search(name) is not None


_FOUR: Final = 4
_FOUR_BIT_KINDS: Final = ("nf4", "fp4")
_STORAGE: Final = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of an element
_PACKED: Final = {"pack-quantized": _WORD, "nvfp4-pack-quantized": 8, "mxfp4-pack-quantized": 8}
_PLAIN: Final = ("int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLayers:
    """The layers of a checkpoint that are stored as codes.

    Attributes:
        format: the format of all of them.
        names: names of their weights; None if only config.json is known.
    """

    format: StoredFormat
    names: frozenset[str] | None

    def holds(self, path: str) -> bool:
        """Return whether a module of a decoder layer is one of them."""
        names = (f"{path}.weight", f"{path.partition('.')[2]}.weight")
        return self.names is None or any(name in self.names for name in names)


CODES: Final = "codes"  # dtype of a weight that the files hold only as codes


def format_of(config: Mapping[str, Any], where: str) -> StoredFormat | None:
    """Return the format that config.json names; None for an unquantized model.

    Raises:
        ModelFileError: the format is not supported.
    """
    named = config.get("quantization_config")
    if named is None:
        return None
    method = named.get("quant_method") if isinstance(named, dict) else named
    if isinstance(named, dict) and method is None and _is_of_bitsandbytes(named):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _READERS:
        raise _unsupported(where, method, f"one of {', '.join(sorted(_READERS))}")
    try:
        return _READERS[method](named, where)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise _unsupported(where, found, f"the settings of {method}") from error


def _is_of_bitsandbytes(named: Mapping[str, Any]) -> bool:
    """Return whether settings are bitsandbytes', whose name early transformers did not write."""
    return bool(named.get("load_in_4bit") or named.get("load_in_8bit"))


def _unsupported(where: str, found: Any, expected: str) -> ModelFileError:
    return ModelFileError(
        "unsupported quantization format",
        where=f"{where}: config.json: quantization_config",
        found=str(found),
        expected=expected,
        remedy="take the model that these weights were made from",
    )


def _word_bits(found: int, where: str) -> int:
    if found not in _WORD_CODES:
        raise _unsupported(where, f"{found} bits", "2, 4 or 8 bits")
    return found


def _group(size: Any) -> int | None:
    return None if size is None or int(size) == -1 else _positive(size)


def _positive(size: Any) -> int:
    if int(size) < 1:
        raise ValueError(f"a block of {size}")
    return int(size)


def _gptq(named: dict[str, Any], where: str) -> StoredFormat:
    layout = named.get("checkpoint_format") or named.get("format") or "gptq"
    if layout not in {"gptq", "gptq_v2"}:
        raise _unsupported(where, f"checkpoint_format {layout}", "gptq or gptq_v2")
    if named.get("dynamic"):
        raise _unsupported(
            where, "dynamic, which has settings of single layers", "one for all layers"
        )
    if named.get("lm_head"):
        raise _unsupported(where, "lm_head true", "a head that is not quantized")
    return StoredFormat(
        method="gptq",
        layout=layout,
        bits=_word_bits(named["bits"], where),
        group=_group(named["group_size"]),
        has_zeros=True,
        codes="qweight",
        marker="qweight",
        others=("qzeros", "scales", "g_idx"),
        orders_inputs=bool(named.get("desc_act")),
    )


def _awq(named: dict[str, Any], where: str) -> StoredFormat:
    layout = str(named.get("version", "gemm")).lower()
    if layout != "gemm":
        raise _unsupported(where, f"version {layout}", "gemm")
    bits = named["bits"] if "bits" in named else named["w_bit"]
    if bits != _FOUR:
        raise _unsupported(where, f"{bits} bits", "4 bits")
    return StoredFormat(
        method="awq",
        bits=bits,
        group=_group(named["group_size"] if "group_size" in named else named["q_group_size"]),
        has_zeros=True,
        codes="qweight",
        marker="qweight",
        others=("qzeros", "scales"),
    )


def _fp8(named: dict[str, Any], where: str) -> StoredFormat:
    if named.get("fmt", "e4m3") != "e4m3":
        raise _unsupported(where, f"fmt {named['fmt']}", "e4m3")
    block = named.get("weight_block_size")
    return StoredFormat(
        method="fp8",
        bits=8,
        group=None if block is None else _positive(block[1]),
        outputs=None if block is None else _positive(block[0]),
        codes="weight",
        marker="weight_scale_inv",
        others=("activation_scale", "input_scale"),
        quantizes_inputs=True,
    )


def _bitsandbytes(named: dict[str, Any], where: str) -> StoredFormat:
    if named.get("load_in_8bit"):
        return StoredFormat(
            method="bitsandbytes",
            bits=8,
            group=None,
            codes="weight",
            marker="SCB",
            others=("weight_format",),
            quantizes_inputs=True,
        )
    kind = named.get("bnb_4bit_quant_type", "fp4")
    if kind not in _FOUR_BIT_KINDS:
        raise _unsupported(where, f"bnb_4bit_quant_type {kind}", "nf4 or fp4")
    nested = ("weight.nested_absmax", "weight.nested_quant_map")
    return StoredFormat(
        method="bitsandbytes",
        layout=kind,
        bits=4,
        group=64,  # the only size that its loader makes; reading takes the size from the tensors
        codes="weight",
        element_bytes=_STORAGE.get(str(named.get("bnb_4bit_quant_storage")), 1),
        marker=f"weight.quant_state.bitsandbytes__{kind}",
        others=("weight.absmax", "weight.quant_map", *nested),
    )


def _compressed(named: dict[str, Any], where: str) -> StoredFormat:
    schemes = list(named["config_groups"].values())
    if len(schemes) != 1:
        raise _unsupported(where, f"{len(schemes)} config_groups", "one scheme for all layers")
    (scheme,) = schemes
    weight, layout = scheme["weights"], scheme.get("format") or named["format"]
    sparsity = (named.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _unsupported(where, f"sparsity_config.format {sparsity}", "dense weights")
    bits, kind, strategy = weight["num_bits"], weight["type"], weight["strategy"]
    known = {
        "nvfp4-pack-quantized": (4, "float"),
        "mxfp4-pack-quantized": (4, "float"),
        "float-quantized": (8, "float"),
        "int-quantized": (8, "int"),
    }.get(layout, (bits, kind))
    if layout not in {*_PACKED, *_PLAIN} or (bits, kind) != known:
        raise _unsupported(
            where, f"{layout} of {bits} bits, {kind}", ", ".join((*_PACKED, *_PLAIN))
        )
    outputs, group = None, None
    if strategy == "block":
        outputs, group = map(_positive, weight["block_structure"])
    elif strategy in {"group", "tensor_group"}:
        group = _group(weight["group_size"])
    packed = layout in _PACKED
    scale = ("weight_scale", "weight_global_scale", "weight_zero_point")
    return StoredFormat(
        method="compressed-tensors",
        layout=layout,
        bits=_word_bits(bits, where) if packed else 8,  # narrower codes take a byte each, too
        group=group,
        outputs=outputs,
        has_zeros=not weight.get("symmetric", True),
        codes="weight_packed" if packed else "weight",
        marker="weight_packed" if packed else "weight_scale",
        others=(
            *scale,
            *("weight_shape", "weight_g_idx", "input_global_scale"),
            *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
        ),
        orders_inputs=weight.get("actorder") in {"group", "dynamic"},
        quantizes_inputs=scheme.get("input_activations") is not None,
    )


_READERS: Final[dict[str, Callable[[dict[str, Any], str], StoredFormat]]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
}
