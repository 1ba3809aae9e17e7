"""The layers of an adapter or of a training state: where they sit, and how much they change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.artifacts.adapter_files import read_directory
from mens_exp.artifacts.adapter_tensors import MAGNITUDE
from mens_exp.artifacts.inspection import BaseRecord, LayerRecord
from mens_exp.config.lora import LoraVariant
from mens_exp.errors import DataError, Problems
from mens_exp.layout.experts import split, stacks_of
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.peft_adapter import PeftAdapter, read_peft
from mens_exp.layout.shape import family_for, shape_of
from mens_exp.layout.targets import linear_modules, pattern_values
from mens_exp.lora.spectrum import spectrum

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    from mens_exp.config.root import RunConfig
    from mens_exp.export.adapter import AdapterPlace

    Array = npt.NDArray[np.float32]

__all__ = ["Anatomy", "of_adapter", "of_state"]


_PATHS = "as the modules are called; a checkpoint of the base may put a prefix before it"


@dataclass(kw_only=True, slots=True)
class Anatomy:
    """The parts of an adapter.

    Attributes:
        layers: by logical name.
        parameters: of all its tensors.
        variant: None where nobody tells.
        base: as the adapter names it; None where it does not.
        magnitudes: lengths of the rows in DoRA, ``[out]`` by logical name.
        unknown: field of the inspection -> why it is not told.
    """

    layers: dict[str, LayerRecord]
    parameters: int
    variant: str | None = None
    base: BaseRecord | None = None
    magnitudes: dict[str, Array] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def of_adapter(place: AdapterPlace) -> Anatomy:
    """Read an adapter of any form and measure its deltas.

    Raises:
        DataError: a file is missing or damaged, or a value of it is not finite.
        ModelFileError: a PEFT directory's file of tensors is damaged.
        Problems: several of these.
    """
    if place.form == "peft":
        return _of_peft(place)
    manifest, tensors = read_directory(place.directory)
    ours = manifest.mens_exp or {}
    scales = {layer: manifest.scale_of(layer) for layer in manifest.layer_order}
    found = _measured(tensors, manifest.base_key_map, scales, str(place.tensors))
    found.variant = manifest.variant
    found.base = BaseRecord(
        name=manifest.base_model,
        revision=None,
        weights_sha256=ours.get("base_weights_sha256"),
        base_quant=manifest.quant["base_quant"],
        double_quant=manifest.quant["double_quant"],
        quantizer=None if manifest.quantizer is None else dict(manifest.quantizer),
    )
    return found


def _of_peft(place: AdapterPlace) -> Anatomy:
    adapter = _read_any_family(place.directory)
    settings, paths = adapter.settings, adapter.paths
    keys = {layer: f"{path}.weight" for layer, path in paths.items()}
    scales = {layer: settings.scale_of(path) for layer, path in paths.items()}
    found = _measured(adapter.tensors, keys, scales, str(place.tensors))
    rslora = "rslora" if settings.rslora else "lora"
    found.variant = "dora" if settings.dora else rslora
    found.base = BaseRecord(
        name=settings.base_model,
        revision=None,
        weights_sha256=None,
        base_quant=None,
        double_quant=None,
        quantizer=None,
    )
    found.unknown["base.base_quant"] = "a PEFT directory does not tell how its base was quantized"
    found.unknown["layers.base_key"] = _PATHS
    return found


def _read_any_family(directory: Path) -> PeftAdapter:
    """Read a PEFT directory under the first family whose modules it names."""
    errors = []
    for family in FAMILIES.values():
        try:
            return read_peft(directory, family)
        except (DataError, Problems) as error:
            errors.append(error)
    raise errors[0]


def of_state(
    tensors: Mapping[str, Array],
    config: RunConfig | None,
    keys: Mapping[str, str],
    *,
    bare: str,
    where: str,
) -> Anatomy:
    """Measure the deltas of a training state.

    Args:
        tensors: f32, by logical name; what is no LoRA matrix is left out.
        config: of the run that it belongs to; None where that is not at hand.
        keys: of the base by logical name, where the run's adapter tells them.
        bare: why there is no configuration.
        where: the file, for the messages.
    """
    layers = [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]
    if config is None:
        found = _measured(tensors, {}, dict.fromkeys(layers), where)
        found.unknown |= {"layers.scale": bare, "layers.base_key": bare}
        return found
    if not layers:
        found = _measured(tensors, {}, {}, where)
        found.unknown["layers"] = "every weight was trained, and there is no LoRA matrix"
        return found
    lora, shape = config.lora, shape_of(config.model)
    modules = {one.logical: one for one in linear_modules(shape)}
    stacks = [one for one in stacks_of(modules.values()) if one.logical in layers]
    tensors = split(tensors, stacks)
    layers = [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]
    known = [modules[layer] for layer in layers if layer in modules]
    alphas = pattern_values(lora.alpha_pattern, known, family_for(config.model), lora.alpha)
    is_rs = lora.variant is LoraVariant.rslora
    scales: dict[str, float | None] = {}
    for layer in layers:
        rank = tensors[f"{layer}.lora_a"].shape[-2]
        alpha = alphas[modules[layer].path] if layer in modules else lora.alpha
        scales[layer] = alpha / (math.sqrt(rank) if is_rs else rank)
    paths = {one.logical: f"{one.path}.weight" for one in known}
    found = _measured(tensors, keys or paths, scales, where)
    found.variant = lora.variant.value
    if not keys:
        found.unknown["layers.base_key"] = _PATHS
    return found


def _measured(
    tensors: Mapping[str, Array],
    keys: Mapping[str, str],
    scales: Mapping[str, float | None],
    where: str,
) -> Anatomy:
    """Measure every layer that has a scale, in the order of these."""
    layers: dict[str, LayerRecord] = {}
    magnitudes = {}
    for layer, scale in scales.items():
        A_RI, B_OR = tensors[f"{layer}.lora_a"], tensors[f"{layer}.lora_b"]
        if not (np.isfinite(A_RI).all() and np.isfinite(B_OR).all()):
            raise DataError("holds values that are not finite", where=f"{where}: {layer}")
        size = spectrum(A_RI, B_OR, 1.0 if scale is None else scale)
        layers[layer] = LayerRecord(
            base_key=keys.get(layer),
            shape=[*B_OR.shape[:-1], A_RI.shape[-1]],
            rank=A_RI.shape[-2],
            scale=scale,
            frobenius=size.frobenius,
            spectral=size.spectral,
            effective_rank=size.effective_rank,
            stable_rank=size.stable_rank,
            magnitude_change=None,
        )
        if f"{layer}.{MAGNITUDE}" in tensors:
            magnitudes[layer] = tensors[f"{layer}.{MAGNITUDE}"]
    parameters = sum(values.size for values in tensors.values())
    return Anatomy(layers=layers, parameters=parameters, magnitudes=magnitudes)
