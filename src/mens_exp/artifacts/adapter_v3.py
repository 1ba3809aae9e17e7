"""Adapter schema v3: adapter_manifest.json and adapter.safetensors, and the deltas they stand for.

Tensors are ``{logical}.lora_a`` A_RI [r, in] and ``{logical}.lora_b`` B_OR [out, r], float32.
The layout is the Vox mens trainer's; our additions are the key `mens_exp` and, where its variant
is ``dora``, ``{logical}.lora_magnitude`` [out]. Key `mens_exp.quantizer` records how the base was
quantized, enough to reproduce its 4-bit values bit for bit.

A reader that knows nothing of `mens_exp` takes ``(B @ A) * alpha / max(rank, 1)`` for every
layer's delta. A training run writes the matrices that it trained, whose scale may be another one;
:func:`portable` makes the header's scale true of every layer.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, get_type_hints

import numpy as np

from mens_exp.artifacts.adapter_tensors import (
    HALVES,
    MAGNITUDE,
    TensorFile,
    header_problems,
    write_tensors,
)
from mens_exp.artifacts.record import check_keys, read_record, write_record
from mens_exp.errors import DataError, expected_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[np.float32]

_KNOWN = {
    "quant_type": ("nf4", "fp4"),
    "compute_dtype": ("bf16", "f32"),
    "rounded_to": ("bf16", "f32"),
}


class Quantizer(TypedDict):
    """The quantizer that made 4-bit values of a base's weights.

    Attributes:
        quant_type: ``nf4`` or ``fp4``.
        block_size: weights that share a scale.
        double_quant: whether the scales are quantized too.
        compute_dtype: ``bf16`` or ``f32``: what values are rounded to before they are used.
        rounded_to: ``bf16`` or ``f32``: what weights were rounded to before they were quantized.
        skip: paths of the projections of decoder layers that were left unquantized.
        library: its name and version.
    """

    quant_type: str
    block_size: int
    double_quant: bool
    compute_dtype: str
    rounded_to: str
    skip: list[str]
    library: str


def quantizer_problems(stored: Mapping[str, Any], where: str) -> list[DataError]:
    """List what is wrong with a record beyond its types.

    Args:
        stored: the record; a value of the wrong type is passed over.
        where: its place, for the messages.
    """
    found = [
        DataError(
            "unknown",
            where=f"{where}.{name}",
            found=stored[name],
            expected=expected_name(stored[name], known),
        )
        for name, known in _KNOWN.items()
        if isinstance(stored.get(name), str) and stored[name] not in known
    ]
    block = stored.get("block_size")
    if type(block) is int and block < 1:
        place = f"{where}.block_size"
        found.append(DataError("wrong value", where=place, found=block, expected="1 or more"))
    return found


MANIFEST_NAME = "adapter_manifest.json"
TENSORS_NAME = "adapter.safetensors"
OLDER_MANIFEST_NAME = "populi_adapter_manifest_v3.json"
FORMATS = ("vox_mens_adapter", "vox_populi_adapter")  # today's name, then older ones
_OPTIONAL = ("base_model", "provenance", "mens_exp")  # absent, not null, in the schema
_METHODS = ("lora", "qlora")
_VARIANTS = ("lora", "rslora", "dora")
_SCALES = ("header",)


class Quant(TypedDict):
    """Quantization of the base: ``nf4``, ``fp4``, ``int8`` or ``none``, and its constants."""

    base_quant: str
    double_quant: bool


class _Origin(TypedDict):
    base_family: str
    upstream_model_id: str
    attribution_required: bool


class AdapterProvenance(_Origin, total=False):
    """Source of the base model, and the terms of its licence."""

    license_class: str | None


class _Start(TypedDict, total=False):
    name: str
    doubled_rank: bool
    exactness: str
    loftq_iters: int


class _Ours(TypedDict, total=False):
    """The keys that `mens_exp` may hold."""

    alpha_pattern: dict[str, int]
    base_weights_sha256: str
    candle_qlora_graph_id: str
    embed_key: str
    init: _Start
    lane: str
    quantizer: Quantizer
    rank_pattern: dict[str, int]
    scale: str
    tied_head: bool
    variant: str


@dataclass(kw_only=True, slots=True)
class AdapterManifest:
    """Metadata of the adapter that the tensors belong to.

    Attributes:
        format: always ``vox_mens_adapter``.
        version: of the schema.
        adapter_method: ``lora`` or ``qlora``.
        quant: of the base model.
        base_key_map: logical layer -> key in the base checkpoint.
        layer_order: every logical layer that has an adapter, first to last.
        vocab: rows of the base model's embedding.
        d_model: width of the base model.
        rank: r of every layer that ``mens_exp["rank_pattern"]`` does not name.
        alpha: the delta is (B @ A) * alpha / max(r, 1), but see :meth:`scale_of`.
        base_model: the base model's name.
        provenance: of the base model.
        mens_exp: what we add: content hashes, `rank_pattern` and `alpha_pattern` by logical
            layer, `variant` (lora where absent), `scale`, `init`, the embedding's key
            (`embed_key`), what quantized the base (`quantizer`), and whether an adapted head is
            tied.
    """

    format: str = "vox_mens_adapter"
    version: int = 3
    adapter_method: str
    quant: Quant
    base_key_map: dict[str, str]
    layer_order: list[str]
    vocab: int
    d_model: int
    rank: int
    alpha: int
    base_model: str | None = None
    provenance: AdapterProvenance | None = None
    mens_exp: dict[str, Any] | None = None

    def problems(self, where: str) -> list[DataError]:
        """Return what of layers, keys, sizes and our own additions contradicts itself."""
        found = header_problems(self, where)
        names: list[tuple[str, str, tuple[str, ...]]] = [
            ("adapter_method", self.adapter_method, _METHODS)
        ]
        if self.mens_exp is not None:
            hints = get_type_hints(_Ours)
            found += check_keys(self.mens_exp, hints, (), f"{where}: mens_exp")
            quantizer = self.mens_exp.get("quantizer")
            if isinstance(quantizer, dict):
                found += quantizer_problems(quantizer, f"{where}: mens_exp.quantizer")
            names += [
                ("mens_exp.variant", self.variant, _VARIANTS),
                ("mens_exp.scale", str(self.mens_exp.get("scale", "header")), _SCALES),
            ]
        for name, value, known in names:
            if value not in known:
                place, expected = f"{where}: {name}", expected_name(value, known)
                found.append(DataError("unknown", where=place, found=value, expected=expected))
        for name in ("rank", "alpha"):
            found += self._pattern_problems(where, name)
        if self._scale_is_the_headers and (self.variant == "rslora" or self._pattern("alpha")):
            found.append(
                DataError(
                    "contradicts the variant or alpha_pattern beside it",
                    where=f"{where}: mens_exp.scale",
                    found="header",
                    expected="no such key, or lora or dora without an alpha_pattern",
                )
            )
        return found

    def rank_of(self, layer: str) -> int:
        """Return r of one logical layer."""
        return self._pattern("rank").get(layer, self.rank)

    @property
    def variant(self) -> str:
        """Effect of the matrices on a weight: ``lora``, ``rslora`` or ``dora``."""
        return str((self.mens_exp or {}).get("variant", "lora"))

    @property
    def quantizer(self) -> Quantizer | None:
        """The quantizer of the base, if the writer recorded it."""
        return (self.mens_exp or {}).get("quantizer")

    def scale_of(self, layer: str) -> float:
        """Return the factor before ``B @ A`` of one logical layer.

        It is ``alpha / r`` of the layer, in rslora ``alpha / sqrt(r)``; where `mens_exp.scale` is
        ``header``, the header's ``alpha / rank`` whatever the layer's rank. Where an
        initialisation doubled both (`init`), the scale is still that of the trained pair.
        """
        if self._scale_is_the_headers:
            return self.alpha / self.rank
        init = (self.mens_exp or {}).get("init") or {}
        times = 2 if init.get("doubled_rank") else 1
        rank = self.rank_of(layer) / times
        alpha = self._pattern("alpha").get(layer, self.alpha) / times
        return alpha / (math.sqrt(rank) if self.variant == "rslora" else rank)

    def parts(self) -> tuple[str, ...]:
        """Return the names of the tensors that every layer has."""
        return (*HALVES, *((MAGNITUDE,) if self.variant == "dora" else ()))

    @property
    def _scale_is_the_headers(self) -> bool:
        return (self.mens_exp or {}).get("scale") == "header"

    def _pattern(self, name: str) -> dict[str, int]:
        """Return a pattern; what of it is no whole number is reported, and not followed."""
        pattern = (self.mens_exp or {}).get(f"{name}_pattern")
        entries = pattern.items() if isinstance(pattern, dict) else ()
        return {layer: value for layer, value in entries if type(value) is int}

    def _pattern_problems(self, where: str, name: str) -> list[DataError]:
        place = f"{where}: mens_exp.{name}_pattern"
        found = []
        for layer, value in self._pattern(name).items():
            if layer not in self.layer_order:
                expected = expected_name(layer, self.layer_order)
                found.append(
                    DataError("unknown layer", where=place, found=layer, expected=expected)
                )
            if value < 1:
                inside = f"{place}.{layer}"
                found.append(
                    DataError(f"wrong {name}", where=inside, found=value, expected="1 or more")
                )
        return found


def write_adapter(
    directory: Path, manifest: AdapterManifest, tensors: Mapping[str, npt.NDArray[np.float32]]
) -> None:
    """Write both files, each atomically; equal inputs give equal bytes.

    Args:
        directory: made when missing; other files in it are left alone.
        manifest: what the tensors belong to.
        tensors: ``{logical}.lora_a`` [r, in], ``{logical}.lora_b`` [out, r] and, in dora,
            ``{logical}.lora_magnitude`` [out], float32.

    Raises:
        MensError: manifest and tensors disagree, or could not be read back; nothing is
            written then.
    """
    path = directory / MANIFEST_NAME
    # Last the manifest: where it is, the tensors are.
    write_tensors(manifest, tensors, directory / TENSORS_NAME, manifest.problems(str(path)))
    write_record(manifest, path, omit_null=_OPTIONAL)


def read_adapter(directory: Path) -> tuple[AdapterManifest, dict[str, npt.NDArray[np.float32]]]:
    """Read both files strictly; the older format and file name are read as today's.

    Args:
        directory: holds the two files.

    Returns:
        The manifest, and float32 tensors by name.

    Raises:
        DataError: a file is missing, truncated, of a newer version or breaks one rule.
        Problems: several rules are broken, in either file.
    """
    path = directory / MANIFEST_NAME
    older = directory / OLDER_MANIFEST_NAME
    if not path.exists() and older.exists():
        path = older
    return read_manifest(path, directory / TENSORS_NAME)


def read_manifest(
    path: Path, tensors: Path
) -> tuple[AdapterManifest, dict[str, npt.NDArray[np.float32]]]:
    """Read a manifest and a file of tensors, wherever they lie; see :func:`read_adapter`."""
    file: list[TensorFile] = []

    def further(manifest: AdapterManifest) -> list[DataError]:
        file.append(TensorFile(tensors))
        return file[0].problems(manifest)

    manifest = read_record(AdapterManifest, path, older_formats=FORMATS[1:], further=further)
    return manifest, file[0].read()


def deltas(
    manifest: AdapterManifest, tensors: Mapping[str, Array]
) -> dict[str, tuple[Array, Array, float]]:
    """Return A_RI [r, in], B_OR [out, r] and the factor before ``B @ A`` of each logical layer.

    Both float32 as they are stored, in the order of the manifest.

    Raises:
        DataError: the adapter is a DoRA, whose update depends on the weight that it changes.
    """
    if manifest.variant == "dora":
        raise _no_delta()
    return {
        layer: (
            tensors[f"{layer}.lora_a"],
            tensors[f"{layer}.lora_b"],
            manifest.scale_of(layer),
        )
        for layer in manifest.layer_order
    }


def portable(
    manifest: AdapterManifest, tensors: Mapping[str, Array]
) -> tuple[AdapterManifest, dict[str, Array]]:
    """Return the same deltas under the header's own scale, ``alpha / rank`` in every layer.

    B is multiplied by what a layer's scale is more than that (rsLoRA, patterns of alpha or rank);
    where it is not, the bytes stay. A layer of another rank keeps it.

    Raises:
        DataError: the adapter is a DoRA, which is no delta.
    """
    if manifest.variant == "dora":
        raise _no_delta()
    usual, folded = manifest.alpha / manifest.rank, dict(tensors)
    for layer in manifest.layer_order:
        factor = manifest.scale_of(layer) / usual
        if factor != 1:
            B_OR = tensors[f"{layer}.lora_b"].astype(np.float64) * factor
            folded[f"{layer}.lora_b"] = B_OR.astype(np.float32)
    ours = dict(manifest.mens_exp or {})
    ours.pop("alpha_pattern", None)
    if "variant" in ours:
        ours["variant"] = "lora"
    if ours.get("rank_pattern"):
        ours["scale"] = "header"
    return replace(manifest, mens_exp=ours or None), folded


def _no_delta() -> DataError:
    return DataError(
        "DoRA is no delta: it sets the length of each row of the weight that it changes",
        where="mens_exp.variant",
        found="dora",
        expected="lora or rslora",
        remedy="export it with format=peft, or train with lora.variant=lora",
    )
