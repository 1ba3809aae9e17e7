"""export.format=peft|v2|v3: convert an adapter to another format with identical weight deltas.

Each format is read as (manifest, tensors) of schema v3 and written from it, so that the output can
be read back and compared with its source (:func:`mens_exp.artifacts.adapter_v3.deltas`). For an
adapter whose run is not available, a model configuration is built from its base, quantized as the
manifest states.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.artifacts import adapter_v2, adapter_v3, atomic
from mens_exp.artifacts.adapter_v2 import lower, write_adapter_v2
from mens_exp.artifacts.adapter_v3 import portable, write_adapter
from mens_exp.artifacts.digest import refuse_changed_adapter
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.quantizer_record import levels_in
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.backend import LoraGraphConfig, QloraConfig
from mens_exp.config.lora import ADAPTERS, LoraConfig, LoraVariant, PassthroughConfig
from mens_exp.config.model import HfModel
from mens_exp.config.quant import ComputeDtype, QuantConfig, QuantType, unquantized
from mens_exp.config.task import ExportFormat
from mens_exp.errors import DataError, Problems, RequestError
from mens_exp.layout import peft_adapter
from mens_exp.layout.peft_adapter import is_peft, manifest_of, read_peft, write_peft
from mens_exp.layout.targets import adaptable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from mens_exp.artifacts.adapter_v3 import AdapterManifest, Quant
    from mens_exp.layout.adapter_base import AdapterBase

    Tensors = Mapping[str, npt.NDArray[np.float32]]
    from collections.abc import Mapping

    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape
    from mens_exp.model.sources import BaseModel

_MIDDLE = re.compile(r"mid\d+")
_TENSORS = {
    "v3": adapter_v3.TENSORS_NAME,
    "v2": adapter_v2.TENSORS_NAME,
    "peft": peft_adapter.TENSORS_NAME,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPlace:
    """The location of an adapter.

    Attributes:
        directory: the directory of its files.
        form: format of the adapter: ``v3``, ``v2`` or ``peft``.
        run: the run that contains it, if any.
    """

    directory: Path
    form: str
    run: RunDir | None

    @property
    def tensors(self) -> Path:
        """Its file of tensors."""
        return self.directory / _TENSORS[self.form]


def find(directory: Path) -> AdapterPlace:
    """Return the adapter in a directory; v3 if there are several formats.

    Args:
        directory: a run's directory, its adapter's, or one with the files of a schema or of PEFT.

    Raises:
        RequestError: there is none.
    """
    for place in (directory, RunDir(directory).adapter):
        form = adapter_v2.schema_in(place) or ("peft" if is_peft(place) else None)
        if form is not None:
            return AdapterPlace(directory=place, form=form, run=_owner(place.absolute()))
    raise RequestError(
        "there is no adapter",
        where="path",
        found=f"{directory}{'' if directory.exists() else ', which does not exist'}",
        expected=f"a run directory, latest, or a directory with {adapter_v3.MANIFEST_NAME}, "
        f"{adapter_v2.META_NAME} or adapter_config.json",
        remedy="write path=latest for the newest training run, or name the directory of a run: one "
        "of outputs/train/*/*, or what hydra.run.dir named",
    )


def _owner(place: Path) -> RunDir | None:
    """Return the training run that a directory is the adapter of; None if there is none."""
    for run in (RunDir(place.parent), RunDir(place.parent.parent)):
        if place in (run.adapter, run.peft) and run.manifest.is_file():
            return run if Manifest.read(run.manifest).task == "train" else None
    return None


def needs_base(place: AdapterPlace, form: ExportFormat) -> bool:
    """Return whether a conversion needs the base model, for names and keys missing in the files."""
    if place.form == "peft" or form is ExportFormat.peft:
        return True
    if place.form == "v2" or form is not ExportFormat.v2:
        return False
    manifest, _ = adapter_v2.read_adapter_directory(place.directory)
    return adapter_v2.embed_key_of(manifest) is None


def read(
    place: AdapterPlace, base: AdapterBase | None, quant: Quant | None
) -> tuple[AdapterManifest, Tensors]:
    """Read an adapter of any form.

    Args:
        place: its location.
        base: its base model, which the adapter is checked against; None if :func:`needs_base` is
            false.
        quant: quantization of its base, for a form that does not record it; None means nf4 with
            double quantization for v2, the only option of its trainer, and none for PEFT.

    Returns:
        Its manifest in schema v3, with the trained scales, and its tensors.

    Raises:
        DataError: a file is missing or damaged, or the adapter belongs to another base.
        Problems: several of these, or a file differs from what its run wrote.
    """
    refuse_changed_adapter(place.directory)
    where = str(place.directory)
    if place.form == "peft":
        assert base is not None, "needs_base says so"
        adapter = read_peft(place.directory, base.shape.family)
        unknown: Quant = {"base_quant": "none", "double_quant": False}
        manifest, tensors = manifest_of(adapter, base, quant or unknown, where)
    else:
        manifest, tensors = adapter_v2.read_adapter_directory(place.directory)
        if place.form == "v2" and quant is not None:
            manifest.quant = quant
            manifest.adapter_method = "lora" if quant["base_quant"] == "none" else "qlora"
    if base is not None:
        _refuse_proxy(manifest, where)
        Problems.raise_if(base.problems(manifest, tensors, where))
    return manifest, tensors


def _refuse_proxy(manifest: AdapterManifest, where: str) -> None:
    """Refuse adapters that were trained on the proxy stack instead of the base model.

    The schemas name its middle projections ``mid0`` and so on; a head-only stack is recognised by
    the name of its graph.
    """
    middle = [layer for layer in manifest.layer_order if _MIDDLE.fullmatch(layer)]
    graph = (manifest.mens_exp or {}).get("candle_qlora_graph_id")
    if middle or graph is not None:
        raise DataError(
            "the proxy stack has no PEFT form, because its graph is not the base model's",
            where=where,
            found=graph or ", ".join(middle[:4]),
            expected="an adapter of a causal graph",
            remedy="write it with export.format=v2 or export.format=v3",
        )


def write(
    manifest: AdapterManifest,
    tensors: Tensors,
    form: ExportFormat,
    directory: Path,
    base: AdapterBase | None,
) -> None:
    """Write an adapter in a format as a directory, atomically.

    v2 and v3 are written so that the header's ``alpha / rank`` is the scale of every layer.

    Args:
        manifest: its manifest in schema v3.
        tensors: its tensors by logical name.
        form: peft, v2 or v3.
        directory: the target, which must not exist.
        base: its base model; None if :func:`needs_base` is false.

    Raises:
        DataError: the format cannot represent the adapter.
        Problems: it cannot, for several reasons.
    """
    if form is ExportFormat.peft:
        assert base is not None, "needs_base says so"
        write_peft(directory, manifest, tensors, base)
        return
    light, folded = portable(manifest, tensors)
    meta = None
    if form is ExportFormat.v2:
        meta = lower(light, embed_key=None if base is None else base.embed_key)
    with atomic.directory(directory) as temporary:
        if meta is not None:
            write_adapter_v2(temporary, meta, folded)
        else:
            write_adapter(temporary, light, folded)


def out_problems(out: Path) -> Iterator[RequestError]:
    """Yield a problem if writing a directory would overwrite existing content."""
    if not is_free(out):
        yield RequestError(
            "already exists",
            where="out",
            found=str(out),
            expected="a directory that does not exist, or is empty",
            remedy="choose another, or remove it",
        )


def is_free(out: Path) -> bool:
    """Return whether a path is free for a directory; the working directory cannot be replaced."""
    if not out.exists():
        return True
    return out.is_dir() and not any(out.iterdir()) and not out.samefile(".")


def config_of_adapter(
    config: RunConfig,
    manifest: AdapterManifest,
    base: BaseModel,
    shape: Shape,
    quantizer: Quantizer | None,
) -> RunConfig:
    """Return the configuration of a model with an adapter's layers, each with scale 1.

    Args:
        config: the command's configuration; its data, tokenizer and device are kept.
        manifest: the adapter's manifest.
        base: the adapter's base.
        shape: dimensions of the base.
        quantizer: the quantizer of the base; None if it is unquantized.
    """
    theirs = copy.deepcopy(config)
    theirs.model = HfModel(id=str(base.directory), trust_remote_code=base.trust_remote_code)
    theirs.lora = _lora(manifest, shape)
    if quantizer is None:
        theirs.quant = unquantized(ComputeDtype.f32)
        theirs.backend = LoraGraphConfig(_target_="mens_exp.backends.lora.LoraBackend")
        return theirs
    spec = QuantType(quantizer["quant_type"]).spec
    theirs.quant = QuantConfig(
        quant_type=QuantType(quantizer["quant_type"]),
        double_quant=quantizer["double_quant"],
        compute_dtype=ComputeDtype(quantizer["compute_dtype"]),
        block_size=quantizer["block_size"] if "block_size" in spec.settings else None,
        skip=list(quantizer["skip"]),
        levels=levels_in(quantizer),
        type_pattern={
            path: QuantType(one["quant_type"]) for path, one in quantizer.get("modules", {}).items()
        },
        block_size_pattern={
            path: one["block_size"]
            for path, one in quantizer.get("modules", {}).items()
            if "block_size" in QuantType(one["quant_type"]).spec.settings
        },
        double_quant_pattern={
            path: one["double_quant"]
            for path, one in quantizer.get("modules", {}).items()
            if "double_quant" in QuantType(one["quant_type"]).spec.settings
        },
    )
    theirs.backend = QloraConfig(_target_="mens_exp.backends.qlora.QloraBackend")
    return theirs


def _lora(manifest: AdapterManifest, shape: Shape) -> LoraConfig:
    spec = ADAPTERS.known(manifest.variant)
    assert spec is not None, "the caller has asked whether it can be merged"
    path_of = {one.logical: one.stack or one.path for one in adaptable(spec, shape)}
    ranks = {path_of[layer]: manifest.rank_of(layer) for layer in manifest.layer_order}
    has_rank = "rank_pattern" in spec.settings
    schema = PassthroughConfig if manifest.peft_config else spec.schema or LoraConfig
    found: LoraConfig = schema(
        name="adapter",
        targets=list(ranks),
        r=manifest.rank,
        # The scale of a pair is folded into its B: see `with_scale_one`.
        alpha=manifest.rank if spec.form.has_pair else manifest.alpha,
        dropout=0.0,
        variant=LoraVariant("lora" if spec.form.root_scale else spec.name),
        rank_pattern=ranks if has_rank else {},
        alpha_pattern=dict(ranks) if has_rank else {},
    )
    if isinstance(found, PassthroughConfig):
        found.config = manifest.peft_config
    return found


def with_scale_one(
    manifest: AdapterManifest, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the tensors with each layer's scale folded into its B, ``[out, r]``, if any."""
    scaled = dict(tensors)
    if not manifest.form.has_pair:
        return scaled
    for layer in manifest.layer_order:
        B_OR = tensors[f"{layer}.lora_b"].astype(np.float64) * manifest.scale_of(layer)
        scaled[f"{layer}.lora_b"] = B_OR.astype(np.float32)
    return scaled
