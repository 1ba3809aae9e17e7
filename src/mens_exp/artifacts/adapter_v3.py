"""The adapter on disk, schema v3: adapter_manifest.json and adapter.safetensors.

Tensors are ``{logical}.lora_a`` A_RI [r, in] and ``{logical}.lora_b`` B_OR [out, r], float32.
The layout is the Vox mens trainer's; our additions are the key `mens_exp` and, where its variant
is ``dora``, ``{logical}.lora_magnitude`` [out].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mens_exp.artifacts.adapter_tensors import HALVES, MAGNITUDE, disagreements, kind_of
from mens_exp.artifacts.atomic import write_bytes
from mens_exp.artifacts.nearest import expected_name
from mens_exp.artifacts.record import read_record, write_record
from mens_exp.errors import DataError, MensError, Problems

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

__all__ = [
    "MANIFEST_NAME",
    "TENSORS_NAME",
    "AdapterManifest",
    "AdapterProvenance",
    "Quant",
    "read_adapter",
    "write_adapter",
]

MANIFEST_NAME = "adapter_manifest.json"
TENSORS_NAME = "adapter.safetensors"
_OLDER_MANIFEST_NAME = "populi_adapter_manifest_v3.json"
_OLDER_FORMATS = ("vox_populi_adapter",)
_OPTIONAL = ("base_model", "provenance", "mens_exp")  # absent, not null, in the schema
_VARIANTS = ("lora", "rslora", "dora")


class Quant(TypedDict):
    """How the base was quantized: ``nf4``, ``fp4``, ``int8`` or ``none``, and its constants."""

    base_quant: str
    double_quant: bool


class _Origin(TypedDict):
    base_family: str
    upstream_model_id: str
    attribution_required: bool


class AdapterProvenance(_Origin, total=False):
    """Where the base model came from and what its licence asks."""

    license_class: str | None


@dataclass(kw_only=True, slots=True)
class AdapterManifest:
    """What the tensors belong to.

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
            layer, `variant` (lora where absent), `init`, and whether an adapted head is tied.
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
        """Return the layers that are repeated or lack a key, and sizes below 1."""
        found = [
            DataError("a layer without a base key", where=f"{where}: base_key_map", found=layer)
            for layer in self.layer_order
            if layer not in self.base_key_map
        ]
        if len(set(self.layer_order)) < len(self.layer_order):
            repeated = sorted({x for x in self.layer_order if self.layer_order.count(x) > 1})
            found.append(DataError("repeated", where=f"{where}: layer_order", found=repeated))
        sizes = {"vocab": self.vocab, "d_model": self.d_model, "rank": self.rank}
        sizes |= {"alpha": self.alpha}
        for name, size in sizes.items():
            if size < 1:
                place = f"{where}: {name}"
                found.append(
                    DataError("wrong value", where=place, found=size, expected="1 or more")
                )
        if self.variant not in _VARIANTS:
            place, expected = f"{where}: mens_exp.variant", expected_name(self.variant, _VARIANTS)
            found.append(DataError("unknown", where=place, found=self.variant, expected=expected))
        for name in ("rank", "alpha"):
            found += self._pattern_problems(where, name)
        return found

    def rank_of(self, layer: str) -> int:
        """Return r of one logical layer."""
        pattern = (self.mens_exp or {}).get("rank_pattern") or {}
        return int(pattern.get(layer, self.rank))

    def alpha_of(self, layer: str) -> int:
        """Return alpha of one logical layer."""
        pattern = (self.mens_exp or {}).get("alpha_pattern") or {}
        return int(pattern.get(layer, self.alpha))

    @property
    def variant(self) -> str:
        """What the matrices do to a weight: ``lora``, ``rslora`` or ``dora``."""
        return str((self.mens_exp or {}).get("variant", "lora"))

    def scale_of(self, layer: str) -> float:
        """Return the factor before ``B @ A`` of one logical layer.

        It is ``alpha / r``, in rslora ``alpha / sqrt(r)``. Where an initialisation doubled both
        (`init`), the scale is still that of the trained pair.
        """
        init = (self.mens_exp or {}).get("init") or {}
        times = 2 if init.get("doubled_rank") else 1
        rank, alpha = self.rank_of(layer) / times, self.alpha_of(layer) / times
        return alpha / (math.sqrt(rank) if self.variant == "rslora" else rank)

    def parts(self) -> tuple[str, ...]:
        """Return the names of the tensors that every layer has."""
        return (*HALVES, *((MAGNITUDE,) if self.variant == "dora" else ()))

    def _pattern_problems(self, where: str, name: str) -> list[DataError]:
        place = f"{where}: mens_exp.{name}_pattern"
        pattern = (self.mens_exp or {}).get(f"{name}_pattern") or {}
        if not isinstance(pattern, dict):
            return [DataError("wrong value", where=place, found=pattern, expected="an object")]
        found = []
        for layer, value in pattern.items():
            if layer not in self.layer_order:
                expected = expected_name(layer, self.layer_order)
                found.append(
                    DataError("unknown layer", where=place, found=layer, expected=expected)
                )
            if type(value) is not int or value < 1:
                found.append(
                    DataError(
                        f"wrong {name}",
                        where=f"{place}.{layer}",
                        found=value,
                        expected="1 or more",
                    )
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
    where = str(directory / TENSORS_NAME)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    kinds = {name: kind_of(tensor.dtype) for name, tensor in tensors.items()}
    found = manifest.problems(str(directory / MANIFEST_NAME))
    found = found or disagreements(manifest, shapes, kinds, where)
    if found:
        raise MensError(
            "an adapter could not be read back, so it is not written",
            found="; ".join(str(problem) for problem in found),
        )
    # Last the manifest: where it is, the tensors are.
    write_bytes(
        directory / TENSORS_NAME,
        save({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}),
    )
    write_record(manifest, directory / MANIFEST_NAME, omit_null=_OPTIONAL)


def read_adapter(directory: Path) -> tuple[AdapterManifest, dict[str, npt.NDArray[np.float32]]]:
    """Read both files strictly; the older format and file name are read as today's.

    Args:
        directory: holds the two files.

    Returns:
        The manifest, and float32 tensors by name.

    Raises:
        DataError: a file is missing, truncated, of a newer version or breaks one rule.
        Problems: several rules are broken.
    """
    path = directory / MANIFEST_NAME
    older = directory / _OLDER_MANIFEST_NAME
    if not path.exists() and older.exists():
        path = older
    manifest = read_record(AdapterManifest, path, older_formats=_OLDER_FORMATS)
    return manifest, _read_tensors(manifest, directory / TENSORS_NAME)


def _read_tensors(manifest: AdapterManifest, path: Path) -> dict[str, npt.NDArray[np.float32]]:
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            slices = {name: file.get_slice(name) for name in names}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            kinds = {name: str(part.get_dtype()) for name, part in slices.items()}
            Problems.raise_if(disagreements(manifest, shapes, kinds, str(path)))
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise DataError(
            "not a whole safetensors file",
            where=str(path),
            found=str(error),
            remedy="copy the adapter again, or write it again from a checkpoint of its run",
        ) from error
