"""Adapter schema v2, used by the Candle QLoRA trainer, and conversion between v2 and v3.

``candle_qlora_adapter.safetensors`` holds ``{logical}.lora_a`` A_RI [r, in] and
``{logical}.lora_b`` B_OR [out, r], float32. ``candle_qlora_adapter_meta.json``, the sidecar,
describes them. The delta of every layer is ``(B @ A) * alpha / max(rank, 1)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.artifacts import adapter_v3
from mens_exp.artifacts.adapter_tensors import (
    FORMS,
    HEAD,
    AdapterForm,
    TensorFile,
    header_problems,
    write_tensors,
)
from mens_exp.artifacts.adapter_v3 import AdapterManifest
from mens_exp.artifacts.record import parse_json, read_bytes, read_record, write_record
from mens_exp.errors import DataError, Problems

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

META_NAME = "candle_qlora_adapter_meta.json"
TENSORS_NAME = "candle_qlora_adapter.safetensors"
FORMATS = ("vox_mens_qlora_lora_only_v2", "vox_populi_qlora_lora_only_v2")  # current, then older
_OPTIONAL = ("base_model",)


@dataclass(kw_only=True, slots=True)
class AdapterMeta:
    """Metadata of an adapter's tensors.

    Attributes:
        format: always ``vox_mens_qlora_lora_only_v2``.
        version: version of the schema.
        embed_key: key of the embedding table in the base checkpoint.
        vocab: number of rows of that table.
        d_model: width of the base model.
        rank: rank r of every layer.
        alpha: the delta is (B @ A) * alpha / max(rank, 1).
        layer_order: every logical layer that has an adapter, first to last.
        base_key_map: logical layer -> key in the base checkpoint.
        base_model: the base model's name, if the writer recorded it.
    """

    format: str = FORMATS[0]
    version: int = 2
    embed_key: str
    vocab: int
    d_model: int
    rank: int
    alpha: int
    layer_order: list[str]
    base_key_map: dict[str, str]
    base_model: str | None = None

    def problems(self, where: str) -> list[DataError]:
        """Return the inconsistencies between layers and sizes."""
        return header_problems(self, where)

    def rank_of(self, layer: str) -> int:
        """Return the rank r, which all layers share."""
        del layer
        return self.rank

    @property
    def form(self) -> AdapterForm:
        """The tensors that each layer has: LoRA's."""
        return FORMS["lora"]


def read_adapter_v2(directory: Path) -> tuple[AdapterMeta, dict[str, npt.NDArray[np.float32]]]:
    """Read both files strictly; the older format name is accepted as the current one.

    Args:
        directory: the directory of the two files.

    Returns:
        The sidecar, and float32 tensors by name.

    Raises:
        DataError: a file is missing, truncated or of a newer version, or violates one rule.
        Problems: either file violates several rules.
    """
    return read_meta(directory / META_NAME, directory / TENSORS_NAME)


def read_meta(path: Path, tensors: Path) -> tuple[AdapterMeta, dict[str, npt.NDArray[np.float32]]]:
    """Read a sidecar and a tensor file from any path; see :func:`read_adapter_v2`."""
    file: list[TensorFile] = []

    def further(meta: AdapterMeta) -> list[DataError]:
        file.append(TensorFile(tensors))
        return file[0].problems(meta)

    meta = read_record(AdapterMeta, path, older_formats=FORMATS[1:], further=further)
    return meta, file[0].read()


def write_adapter_v2(
    directory: Path, meta: AdapterMeta, tensors: Mapping[str, npt.NDArray[np.float32]]
) -> None:
    """Write both files, each atomically; equal inputs give identical bytes.

    Args:
        directory: created if missing; other files in it are left alone.
        meta: metadata of the tensors.
        tensors: ``{logical}.lora_a`` [r, in] and ``{logical}.lora_b`` [out, r], float32.

    Raises:
        MensError: sidecar and tensors disagree, or could not be read back; nothing is
            written in that case.
    """
    path = directory / META_NAME
    # The sidecar is written last, so that its presence implies the tensors.
    write_tensors(meta, tensors, directory / TENSORS_NAME, meta.problems(str(path)))
    write_record(meta, path, omit_null=_OPTIONAL)


def lift(meta: AdapterMeta, *, double_quant: bool = True) -> AdapterManifest:
    """Convert metadata to a manifest of schema v3; the tensors are unchanged.

    Args:
        meta: metadata of schema v2, whose trainer has one method (qlora) and one format (nf4).
        double_quant: whether the base's constants were quantized again; v2 does not record this.
    """
    return AdapterManifest(
        adapter_method="qlora",
        quant={"base_quant": "nf4", "double_quant": double_quant},
        base_key_map=dict(meta.base_key_map),
        layer_order=list(meta.layer_order),
        vocab=meta.vocab,
        d_model=meta.d_model,
        rank=meta.rank,
        alpha=meta.alpha,
        base_model=meta.base_model,
        mens_exp={"embed_key": meta.embed_key},
    )


def lower(manifest: AdapterManifest, *, embed_key: str | None = None) -> AdapterMeta:
    """Convert a manifest to metadata of schema v2; the tensors are unchanged.

    The quantization of the base, and everything else that v2 cannot express, is dropped.

    Args:
        manifest: of schema v3; see :func:`mens_exp.artifacts.adapter_v3.portable` for one
            whose layers have different scales.
        embed_key: key of the embedding table in the base checkpoint, if the manifest does not
            record it.

    Raises:
        DataError: v2 cannot express the manifest.
        Problems: it cannot, for several reasons.
    """
    known = embed_key_of(manifest) or embed_key
    found = list(_obstacles(manifest))
    if known is None:
        found.append(_cannot("base_key_map", "no key of the embedding table", "mens_exp.embed_key"))
    Problems.raise_if(found)
    assert known is not None
    return AdapterMeta(
        embed_key=known,
        vocab=manifest.vocab,
        d_model=manifest.d_model,
        rank=manifest.rank,
        alpha=manifest.alpha,
        layer_order=list(manifest.layer_order),
        base_key_map=dict(manifest.base_key_map),
        base_model=manifest.base_model,
    )


def _obstacles(manifest: AdapterManifest) -> list[DataError]:
    ranks = {layer: manifest.rank_of(layer) for layer in manifest.layer_order}
    found = []
    if manifest.form.no_delta is not None:
        found.append(
            _cannot("mens_exp.variant", f"{manifest.variant}, which is not a delta", "lora")
        )
    mixed = {layer: r for layer, r in ranks.items() if r != manifest.rank}
    if mixed:
        found.append(
            _cannot("mens_exp.rank_pattern", mixed, f"rank {manifest.rank} in every layer")
        )
    usual = manifest.alpha / manifest.rank
    scales = {x: s for x in ranks if (s := manifest.scale_of(x)) != usual}
    if scales and manifest.form.no_delta is None:
        layer = next(iter(scales))
        found.append(
            _cannot(
                "mens_exp",
                f"{manifest.variant}, where {layer} has the scale {scales[layer]:g}",
                f"alpha / rank = {usual:g} in every layer",
            )
        )
    return found


def embed_key_of(manifest: AdapterManifest) -> str | None:
    """Return the key of the embedding table; None if the manifest does not record it.

    It is recorded explicitly, or given by the head's key if the two are tied.
    """
    told = (manifest.mens_exp or {}).get("embed_key")
    head = manifest.base_key_map.get(HEAD, f"{HEAD}.weight")
    tied = head if head.rpartition(f"{HEAD}.weight")[1] == "" else None
    return told or tied


def _cannot(place: str, found: object, expected: str) -> DataError:
    return DataError(
        "schema v2 cannot express this",
        where=place,
        found=found,
        expected=expected,
        remedy="write it with export.format=v3 or export.format=peft",
    )


_FORMATS = (*adapter_v3.FORMATS, *FORMATS)


def schema_in(directory: Path) -> str | None:
    """Return ``v3`` or ``v2``, the schema whose header is in a directory, or None."""
    names = {
        adapter_v3.MANIFEST_NAME: "v3",
        adapter_v3.OLDER_MANIFEST_NAME: "v3",
        META_NAME: "v2",
    }
    return next((schema for name, schema in names.items() if (directory / name).is_file()), None)


def read_adapter_directory(
    directory: Path,
) -> tuple[AdapterManifest, dict[str, npt.NDArray[np.float32]]]:
    """Read an adapter under its schema's standard file names; v3 if both are present.

    Args:
        directory: the directory of the files.

    Raises:
        DataError: a file is missing, truncated or of a newer version, or violates one rule.
        Problems: either file violates several rules.
    """
    if schema_in(directory) == "v2":
        meta, tensors = read_adapter_v2(directory)
        return lift(meta), tensors
    return adapter_v3.read_adapter(directory)


def read_adapter_files(
    tensors: Path, meta: Path, *, double_quant: bool = True
) -> tuple[AdapterManifest, dict[str, npt.NDArray[np.float32]]]:
    """Read an adapter from two files of any name; the header's `format` identifies the schema.

    Args:
        tensors: the safetensors file.
        meta: the JSON header, of schema v2 or v3 or an older name of either.
        double_quant: the value to use when converting from v2.

    Returns:
        The manifest in schema v3, and float32 tensors by name.

    Raises:
        DataError: a file is missing, truncated or of a newer version, or violates one rule.
        Problems: either file violates several rules.
    """
    value = parse_json(read_bytes(meta), str(meta))
    named = value.get("format") if isinstance(value, dict) else None
    if named in FORMATS:
        header, found = read_meta(meta, tensors)
        return lift(header, double_quant=double_quant), found
    if named in adapter_v3.FORMATS:
        return adapter_v3.read_manifest(meta, tensors)
    raise DataError(
        "not an adapter header",
        where=f"{meta}: format",
        found="no such key" if named is None else named,
        expected=f"one of {', '.join(_FORMATS)}",
        remedy="name the adapter_manifest.json or the candle_qlora_adapter_meta.json next to it",
    )
