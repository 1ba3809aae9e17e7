"""Adapter schema v3: adapter_manifest.json and adapter.safetensors, and the deltas they encode.

Tensors are ``{logical}.lora_a`` A_RI [r, in] and ``{logical}.lora_b`` B_OR [out, r], float32.
The layout is that of the Vox mens trainer. Our additions are the key `mens_exp` and, if its variant
is ``dora``, ``{logical}.lora_magnitude`` [out]. `mens_exp.tensors` describes the tensors of another
package's method. `mens_exp.quantizer` records the quantization of the base in enough detail to
reproduce its 4-bit values bit for bit.

A reader that does not know `mens_exp` takes ``(B @ A) * alpha / max(rank, 1)`` as the delta of
every layer. A training run writes the matrices that it trained, whose scale may differ.
:func:`portable` rescales them so that the header's scale is correct for every layer.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, get_type_hints

import numpy as np

from mens_exp.artifacts.adapter_tensors import (
    FORMS,
    SIZES,
    AdapterForm,
    TensorFile,
    foreign_form,
    form_in_peft,
    header_problems,
    write_tensors,
)
from mens_exp.artifacts.quantizer_record import Quantizer, quantizer_problems
from mens_exp.artifacts.record import check_keys, read_record, write_record
from mens_exp.errors import DataError, expected_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[np.float32]

PROJECTION_SEED = 0  # PEFT's default, `projection_prng_key`


class Projections(TypedDict):
    """Random matrices A and B that all layers of VeRA or of RandLoRA share.

    VeRA has A ``[r, width]`` and B ``[out, r]``. RandLoRA has A ``[r, 1, min(out, width)]`` and B
    ``[max(out, width), n, r]``, where n bases of rank r make up the smaller side.

    Attributes:
        seed: of a Mersenne Twister (MT19937), torch's on a CPU, which draws A and then B.
        r: rank of the adapter.
        out: outputs of the largest layer.
        width: inputs of the largest layer.
        sha256: hash of the values of A and then B, f32.
    """

    seed: int
    r: int
    out: int
    width: int
    sha256: str


MANIFEST_NAME = "adapter_manifest.json"
TENSORS_NAME = "adapter.safetensors"
OLDER_MANIFEST_NAME = "populi_adapter_manifest_v3.json"
FORMATS = ("vox_mens_adapter", "vox_populi_adapter")  # the current name, then older ones
_OPTIONAL = ("base_model", "provenance", "mens_exp")  # omitted by the schema, never null
_METHODS = ("lora", "qlora")
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
    """Origin of the base model, and the terms of its licence."""

    license_class: str | None


class _Start(TypedDict, total=False):
    name: str
    doubled_rank: bool
    exactness: str
    loftq_iters: int


class _Ours(TypedDict, total=False):
    """The keys allowed in `mens_exp`."""

    alpha_pattern: dict[str, int]
    base_weights_sha256: str
    candle_qlora_graph_id: str
    embed_key: str
    init: _Start
    lane: str
    peft_config: dict[str, Any]
    projections: Projections
    quantizer: Quantizer
    rank_pattern: dict[str, int]
    scale: str
    tensors: dict[str, list[str]]
    tied_head: bool
    variant: str


@dataclass(kw_only=True, slots=True)
class AdapterManifest:
    """Metadata of an adapter's tensors.

    Attributes:
        format: always ``vox_mens_adapter``.
        version: version of the schema.
        adapter_method: ``lora`` or ``qlora``.
        quant: quantization of the base model.
        base_key_map: logical layer -> key in the base checkpoint.
        layer_order: every logical layer that has an adapter, first to last.
        vocab: number of rows of the base model's embedding.
        d_model: width of the base model.
        rank: rank r of every layer not listed in ``mens_exp["rank_pattern"]``.
        alpha: the delta is (B @ A) * alpha / max(r, 1), except as described in :meth:`scale_of`.
        base_model: the base model's name.
        provenance: origin of the base model.
        mens_exp: our additions: content hashes, `rank_pattern` and `alpha_pattern` by logical
            layer, `variant` (default lora), `scale`, `init`, the embedding's key (`embed_key`),
            the quantizer of the base (`quantizer`), `projections` of VeRA and RandLoRA, the fields
            of PEFT's configuration (`peft_config`) if the variant is ``passthrough``, whether an
            adapted head is tied, and the sizes of each tensor of a layer (`tensors`) if the variant
            is ``passthrough`` or another package's.
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
        """Return the inconsistencies of layers, keys, sizes and our own additions."""
        found = header_problems(self, where)
        names: list[tuple[str, str, tuple[str, ...]]] = [
            ("adapter_method", self.adapter_method, _METHODS)
        ]
        if self.mens_exp is not None:
            hints = get_type_hints(_Ours)
            found += check_keys(self.mens_exp, hints, (), f"{where}: mens_exp")
            quantizer = self.mens_exp.get("quantizer")
            if isinstance(quantizer, dict):
                header, place = self.quant["base_quant"], f"{where}: mens_exp.quantizer"
                found += quantizer_problems(quantizer, header, place)
            names.append(("mens_exp.scale", str(self.mens_exp.get("scale", "header")), _SCALES))
            found += self._form_problems(where)
        for name, value, known in names:
            if value not in known:
                place, expected = f"{where}: {name}", expected_name(value, known)
                found.append(DataError("unknown", where=place, found=value, expected=expected))
        for name in ("rank", "alpha"):
            found += self._pattern_problems(where, name)
        if self._scale_is_the_headers and (self.form.root_scale or self._pattern("alpha")):
            found.append(
                DataError(
                    "contradicts the variant or the alpha_pattern",
                    where=f"{where}: mens_exp.scale",
                    found="header",
                    expected="no such key, or lora or dora without an alpha_pattern",
                )
            )
        return found

    def rank_of(self, layer: str) -> int:
        """Return the rank r of one logical layer."""
        return self._pattern("rank").get(layer, self.rank)

    @property
    def variant(self) -> str:
        """The adapter method: ``lora``, ``rslora``, ``dora``, or another package's."""
        return str((self.mens_exp or {}).get("variant", "lora"))

    @property
    def form(self) -> AdapterForm:
        """The form of each layer's tensors; LoRA's if the record is invalid."""
        if self._has_known_tensors:
            return FORMS[self.variant]
        described = (self.mens_exp or {}).get("tensors")
        if not isinstance(described, dict) or list(self._size_problems(described, "")):
            return FORMS["lora"]
        if self._is_in_peft:
            return form_in_peft(described)
        return foreign_form(self.variant, described)

    @property
    def quantizer(self) -> Quantizer | None:
        """The quantizer of the base, if the writer recorded it."""
        return (self.mens_exp or {}).get("quantizer")

    def scale_of(self, layer: str) -> float:
        """Return the factor applied to ``B @ A`` for one logical layer.

        It is ``alpha / r`` of the layer, or ``alpha / sqrt(r)`` for rslora. If `mens_exp.scale` is
        ``header``, it is the header's ``alpha / rank``, whatever the layer's rank. If an
        initialization doubled both (`init`), the scale is still that of the trained pair.
        """
        if self._scale_is_the_headers:
            return self.alpha / self.rank
        init = (self.mens_exp or {}).get("init") or {}
        times = 2 if init.get("doubled_rank") else 1
        rank = self.rank_of(layer) / times
        alpha = self._pattern("alpha").get(layer, self.alpha) / times
        return self.form.scale(alpha, rank)

    @property
    def projections(self) -> Projections | None:
        """The random matrices that all layers share; None in methods without any."""
        return (self.mens_exp or {}).get("projections") if self.form.shares else None

    @property
    def peft_config(self) -> dict[str, Any]:
        """The fields of PEFT's configuration; empty unless the variant is ``passthrough``."""
        return (self.mens_exp or {}).get("peft_config") or {}

    @property
    def shared(self) -> Mapping[str, Any]:
        """The random matrices or the PEFT configuration shared by all layers; empty if none."""
        return self.projections or self.peft_config

    @property
    def _has_known_tensors(self) -> bool:
        return self.variant in FORMS and not self._is_in_peft

    @property
    def _is_in_peft(self) -> bool:
        return self.variant in FORMS and FORMS[self.variant].in_peft

    @property
    def _scale_is_the_headers(self) -> bool:
        return (self.mens_exp or {}).get("scale") == "header"

    def _form_problems(self, where: str) -> Iterator[DataError]:
        """Yield an unknown variant without a description, and a description of a known one."""
        described = (self.mens_exp or {}).get("tensors")
        if described is None:
            if not self._has_known_tensors:
                known = [name for name, form in FORMS.items() if not form.in_peft]
                yield DataError(
                    "unknown",
                    where=f"{where}: mens_exp.variant",
                    found=self.variant,
                    expected=expected_name(self.variant, known),
                )
        elif self._has_known_tensors:
            yield DataError(
                "describes the tensors of a known variant",
                where=f"{where}: mens_exp.tensors",
                found=self.variant,
                expected="no such key",
            )
        elif isinstance(described, dict):
            yield from self._size_problems(described, where)
        if ("peft_config" in (self.mens_exp or {})) != self._is_in_peft:
            yield DataError(
                "PEFT's configuration belongs to the variant passthrough, and to no other",
                where=f"{where}: mens_exp.peft_config",
                found=self.variant,
            )
        if self.form.shares:
            yield from self._projection_problems(f"{where}: mens_exp.projections")

    def _size_problems(self, described: Mapping[str, Any], where: str) -> Iterator[DataError]:
        """Yield malformed tensor names, unknown names of sizes, and an empty description."""
        for name, sizes in described.items():
            known = {f"{name}_{place}" for place in range(9)} if self._is_in_peft else SIZES
            is_list = isinstance(sizes, list) and sizes and {*map(str, sizes)} <= {*known}
            if not is_list or not re.fullmatch(r"[a-z][a-z0-9_]*", str(name)):
                yield DataError(
                    "not a tensor of a layer",
                    where=f"{where}: mens_exp.tensors.{name}",
                    found=sizes,
                    expected=f"a name, and sizes among {', '.join(sorted(known))}",
                )
        if not described:
            yield DataError("contains no tensors", where=f"{where}: mens_exp.tensors")

    def _projection_problems(self, where: str) -> Iterator[DataError]:
        """Yield missing projections, and a seed or rank other than the expected one."""
        described = (self.mens_exp or {}).get("projections")
        if described is None:
            yield DataError("is missing; it defines how the tensors change a weight", where=where)
            return
        expected = {"seed": (PROJECTION_SEED, "PEFT's default"), "r": (self.rank, "the rank")}
        for name, (value, why) in expected.items() if isinstance(described, dict) else ():
            if described.get(name) != value:
                yield DataError(
                    "wrong value",
                    where=f"{where}.{name}",
                    found=described.get(name),
                    expected=f"{value}, {why}",
                )

    def _pattern(self, name: str) -> dict[str, int]:
        """Return a pattern; entries that are not integers are reported and skipped."""
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
    """Write both files, each atomically; equal inputs give identical bytes.

    Args:
        directory: created if missing; other files in it are left alone.
        manifest: metadata of the tensors.
        tensors: ``{logical}.lora_a`` [r, in], ``{logical}.lora_b`` [out, r] and, in dora,
            ``{logical}.lora_magnitude`` [out], float32.

    Raises:
        MensError: manifest and tensors disagree, or could not be read back; nothing is
            written in that case.
    """
    path = directory / MANIFEST_NAME
    # The manifest is written last, so that its presence implies the tensors.
    write_tensors(manifest, tensors, directory / TENSORS_NAME, manifest.problems(str(path)))
    write_record(manifest, path, omit_null=_OPTIONAL)


def read_adapter(directory: Path) -> tuple[AdapterManifest, dict[str, npt.NDArray[np.float32]]]:
    """Read both files strictly; older format and file names are accepted as the current ones.

    Args:
        directory: the directory of the two files.

    Returns:
        The manifest, and float32 tensors by name.

    Raises:
        DataError: a file is missing, truncated or of a newer version, or violates one rule.
        Problems: either file violates several rules.
    """
    path = directory / MANIFEST_NAME
    older = directory / OLDER_MANIFEST_NAME
    if not path.exists() and older.exists():
        path = older
    return read_manifest(path, directory / TENSORS_NAME)


def read_manifest(
    path: Path, tensors: Path
) -> tuple[AdapterManifest, dict[str, npt.NDArray[np.float32]]]:
    """Read a manifest and a tensor file from any path; see :func:`read_adapter`."""
    file: list[TensorFile] = []

    def further(manifest: AdapterManifest) -> list[DataError]:
        file.append(TensorFile(tensors))
        return file[0].problems(manifest)

    manifest = read_record(AdapterManifest, path, older_formats=FORMATS[1:], further=further)
    return manifest, file[0].read()


def deltas(
    manifest: AdapterManifest, tensors: Mapping[str, Array]
) -> dict[str, tuple[Array, Array, float]]:
    """Return A_RI [r, in], B_OR [out, r] and the scale of each logical layer.

    Both are float32 as stored, in the order of the manifest.

    Raises:
        DataError: the adapter is a DoRA or another package's, whose update depends on the weight.
    """
    _refuse_no_delta(manifest)
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
    """Rescale the tensors so that every layer uses the header's scale, ``alpha / rank``.

    B is multiplied by the ratio of the layer's scale to the header's (rsLoRA, patterns of alpha or
    rank). If they are equal, the bytes do not change. Layers keep their own ranks.

    Raises:
        DataError: the adapter is a DoRA or another package's, which has no fixed delta.
    """
    _refuse_no_delta(manifest)
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


def _refuse_no_delta(manifest: AdapterManifest) -> None:
    if manifest.form.no_delta is not None:
        other = "export it with export.format=peft, or " if manifest.form.exports else ""
        raise DataError(
            manifest.form.no_delta,
            where="mens_exp.variant",
            found=manifest.variant,
            expected="lora or rslora",
            remedy=f"{other}train with lora.variant=lora",
        )
