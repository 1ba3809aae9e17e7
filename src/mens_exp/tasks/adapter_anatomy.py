"""Measure the layers of an adapter or a checkpoint: positions, deltas, and DoRA magnitudes.

A checkpoint is read without executing anything in it; its description states whether a run can
resume from it.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.artifacts.adapter_tensors import MAGNITUDE, spectrum
from mens_exp.artifacts.adapter_v2 import read_adapter_directory
from mens_exp.artifacts.adapter_v3 import MANIFEST_NAME, read_adapter
from mens_exp.artifacts.certificate import BaseRecord, CheckpointRecord, LayerRecord
from mens_exp.artifacts.digest import refuse_damaged_checkpoint
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.config.task import MergeConfig
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.export.subject import config_of
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.model_cache import ready_directory
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.peft_adapter import PeftAdapter, read_peft
from mens_exp.layout.peft_format import split_experts, stacks_of
from mens_exp.layout.shape import family_for, shape_of
from mens_exp.layout.targets import pattern_values
from mens_exp.planning.preflight import writable_cache

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    from mens_exp.config.root import RunConfig
    from mens_exp.export.adapter import AdapterPlace

    Array = npt.NDArray[np.float32]
    from mens_exp.artifacts.run_dir import RunDir

_NO_PAIR = "{} has no pair of matrices to measure"
_PATHS = "as the modules are called; a checkpoint of the base may put a prefix before it"


@dataclass(kw_only=True, slots=True)
class Anatomy:
    """The parts of an adapter.

    Attributes:
        layers: layers by logical name.
        parameters: number of parameters of all tensors.
        variant: the LoRA variant; None if unknown.
        base: the base as named by the adapter; None if it names none.
        magnitudes: DoRA magnitudes, ``[out]`` by logical name.
        unknown: field of the inspection -> reason why it is unknown.
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
        DataError: a file is missing or damaged, or contains a non-finite value.
        ModelFileError: a PEFT directory's file of tensors is damaged.
        Problems: several of these.
    """
    if place.form == "peft":
        return _of_peft(place)
    manifest, tensors = read_adapter_directory(place.directory)
    ours = manifest.mens_exp or {}
    has_pair = manifest.form.has_pair
    scales = {layer: manifest.scale_of(layer) for layer in manifest.layer_order if has_pair}
    found = _measured(tensors, manifest.base_key_map, scales, str(place.tensors))
    if not has_pair:
        found.unknown["layers"] = _NO_PAIR.format(manifest.variant)
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
    has_pair = not settings.tunes_norms
    scales = {layer: settings.scale_of(path) for layer, path in paths.items() if has_pair}
    found = _measured(adapter.tensors, keys, scales, str(place.tensors))
    found.variant = settings.variants[0]
    if not has_pair:
        found.unknown["layers"] = _NO_PAIR.format(found.variant)
    found.base = BaseRecord(
        name=settings.base_model,
        revision=None,
        weights_sha256=None,
        base_quant=None,
        double_quant=None,
        quantizer=None,
    )
    found.unknown["base.base_quant"] = "a PEFT directory does not record how its base was quantized"
    found.unknown["layers.base_key"] = _PATHS
    return found


def _read_any_family(directory: Path) -> PeftAdapter:
    """Read a PEFT directory with the first family whose modules match its names."""
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
        tensors: f32 tensors by logical name; tensors other than LoRA matrices are omitted.
        config: configuration of the run; None if not available.
        keys: base keys by logical name, if the run's adapter records them.
        bare: the reason why there is no configuration.
        where: the file, for messages.
    """
    layers = [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]
    if config is None:
        found = _measured(tensors, {}, dict.fromkeys(layers), where)
        found.unknown |= {"layers.scale": bare, "layers.base_key": bare}
        return found
    if not layers:
        found = _measured(tensors, {}, {}, where)
        found.unknown["layers"] = (
            "every weight was trained, so there is no LoRA matrix"
            if not config.backend.spec.has_adapter
            else _NO_PAIR.format(config.lora.spec.name)
        )
        return found
    lora, shape = config.lora, shape_of(config.model)
    modules = {one.logical: one for one in linear_modules(shape)}
    stacks = [one for one in stacks_of(modules.values()) if one.logical in layers]
    tensors = split_experts(tensors, stacks)
    layers = [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]
    known = [modules[layer] for layer in layers if layer in modules]
    alphas = pattern_values(lora.alpha_pattern, known, family_for(config.model), lora.alpha)
    scales: dict[str, float | None] = {}
    for layer in layers:
        rank = tensors[f"{layer}.lora_a"].shape[-2]
        alpha = alphas[modules[layer].path] if layer in modules else lora.alpha
        scales[layer] = lora.spec.form.scale(alpha, rank)
    paths = {one.logical: f"{one.path}.weight" for one in known}
    found = _measured(tensors, keys or paths, scales, where)
    found.variant = lora.spec.name
    if not keys:
        found.unknown["layers.base_key"] = _PATHS
    return found


def _measured(
    tensors: Mapping[str, Array],
    keys: Mapping[str, str],
    scales: Mapping[str, float | None],
    where: str,
) -> Anatomy:
    """Measure every layer that has a scale, in the order of the scales."""
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


_NEEDED = ("adapter", "optimizer_states", "global_step", "counters", "callbacks", "loops")


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The trained part of a checkpoint.

    Attributes:
        step: optimizer steps taken.
        adapter: every trained tensor by name.
        optimizer: optimizer state by index of the tensor in that order, then by name.
        lacks: entries needed to resume that are missing.
    """

    step: int
    adapter: dict[str, Any]
    optimizer: dict[int, dict[str, Any]]
    lacks: tuple[str, ...]


# Errors that torch's reader and unpickler raise for files that torch did not write.
_UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError),
    *(AssertionError, ArithmeticError, pickle.UnpicklingError),
)


def read_state(path: Path) -> State:
    """Read a training state without executing anything in it.

    Raises:
        DataError: the file has changed since it was written, is not a training state of ours, or
            contains more than plain values.
    """
    import torch

    refuse_damaged_checkpoint(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise DataError(
            "is not a readable training state",
            where=str(path),
            found=str(error).partition("\n")[0],
            expected="a whole step_….ckpt of a run",
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("adapter"), dict):
        raise DataError(
            "is not a training state of mens_exp", where=str(path), expected="an adapter"
        )
    states, step = found.get("optimizer_states") or [{}], found.get("global_step", 0)
    first = states[0] if isinstance(states, list) else None
    optimizer = first.get("state") or {} if isinstance(first, dict) else None
    if not isinstance(step, int) or not isinstance(optimizer, dict):
        raise DataError(
            "is not a training state of mens_exp",
            where=str(path),
            expected="a step, and the state of an optimizer",
        )
    return State(
        step=step,
        adapter=found["adapter"],
        optimizer=optimizer,
        lacks=tuple(name for name in _NEEDED if not found.get(name)),
    )


def anatomy_of(path: Path, run: RunDir | None) -> tuple[CheckpointRecord, Anatomy]:
    """Describe a training state and measure its adapter.

    Args:
        path: the file.
        run: the run that contains it; None if not available.

    Raises:
        DataError: as :func:`read_state`, or a value is not finite.
    """
    import torch

    state = read_state(path)
    tensors = {name: values.float().numpy() for name, values in state.adapter.items()}
    config = None if run is None else config_of(run)
    bare = "no run that records it was found; norms are those of B A"
    keys = {} if run is None else _keys(run)
    anatomy = of_state(tensors, config, keys, bare=bare, where=str(path))
    moments = [
        value
        for one in state.optimizer.values()
        for value in one.values()
        if isinstance(value, torch.Tensor)
    ]
    why = _why_not(state, path, run)
    record = CheckpointRecord(
        step=state.step,
        bytes=path.stat().st_size,
        optimizer_tensors=len(moments),
        optimizer_bytes=sum(one.numel() * one.element_size() for one in moments),
        resumable=why is None,
        why=why or f"resume={None if run is None else run.path} continues from here",
    )
    return record, anatomy


def _keys(run: RunDir) -> dict[str, str]:
    """Return the base's keys recorded by the run's adapter; empty before the adapter is written."""
    if not (run.adapter / MANIFEST_NAME).is_file():
        return {}
    return read_adapter(run.adapter)[0].base_key_map


def _why_not(state: State, path: Path, run: RunDir | None) -> str | None:
    """Return the reason why no run can resume from this state, if there is one."""
    if state.lacks:
        return f"it lacks {', '.join(state.lacks)}"
    if run is None:
        return "it is not inside a run, whose configuration is needed to continue"
    last = run.last_checkpoint()
    if last is None or last.name != path.name:
        return (
            f"a run continues from its last state, {last.name if last else 'of which it has none'}"
        )
    manifest = Manifest.read(run.manifest)
    if manifest.status is Status.SUCCEEDED:
        return "its run has ended; it continues only with a longer trainer.max_steps"
    return None


_FIELD = "layers.magnitude_change"


def tell_magnitudes(anatomy: Anatomy, place: AdapterPlace, config: RunConfig) -> None:
    """Set ``magnitude_change`` of every DoRA layer, or record why it is unknown.

    Args:
        anatomy: anatomy of the adapter; changed in place.
        place: location of the adapter.
        config: the command's configuration.
    """
    if not anatomy.magnitudes:
        return
    if place.run is None:
        anatomy.unknown[_FIELD] = "the run that records its initial values was not found"
        return
    theirs, cache = config_of(place.run), writable_cache()
    if theirs.lora.init.spec.exchanges_weights:
        anatomy.unknown[_FIELD] = f"it began with {theirs.lora.init.value}'s matrices, not zero"
        return
    try:
        is_here = ready_directory(theirs.model, cache) is not None
    except MensError as error:
        anatomy.unknown[_FIELD] = f"the base is not here: {error.what}"
        return
    if not is_here:
        anatomy.unknown[_FIELD] = "the base is not on this machine"
        return
    for layer, before_O in _before(place, config).items():
        moved = np.linalg.norm(anatomy.magnitudes[layer].astype(np.float64) - before_O)
        anatomy.layers[layer]["magnitude_change"] = float(moved / np.linalg.norm(before_O))


def _before(place: AdapterPlace, config: RunConfig) -> dict[str, npt.NDArray[np.float64]]:
    """Return the row norms of the initial weights by layer."""
    from mens_exp.export.merge_choices import decide, deltas_of
    from mens_exp.export.parity import row_lengths
    from mens_exp.export.subject import gather

    asked = copy.deepcopy(config)
    asked.path, asked.merge = str(place.directory), MergeConfig()
    inputs = gather(asked, writable_cache())
    choices = decide(inputs, asked.merge)
    deltas = deltas_of(inputs, choices)
    return {
        one.logical: row_lengths(one, deltas[one.logical], choices.quantizer).numpy()
        for one in choices.all_places
        if one.logical is not None
    }
