"""A PEFT directory: an adapter keyed by module paths, read and written without its base model.

Tensors of LoRA are ``base_model.model.{path}.lora_A.weight`` A_RI, ``….lora_B.weight`` B_OR and, in
DoRA, ``….lora_magnitude_vector`` [out]; those of tuned norms are in :mod:`mens_exp.layout.norms`.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from mens_exp.artifacts import atomic
from mens_exp.artifacts.adapter_tensors import FORMS, MAGNITUDE, disagreements, few
from mens_exp.artifacts.adapter_v3 import AdapterManifest, portable
from mens_exp.config.lora import ADAPTERS, PEFT_FLAGS
from mens_exp.errors import DataError, ModelFileError, Problems
from mens_exp.layout import norms
from mens_exp.layout.checkpoint_files import read_header
from mens_exp.layout.modules import expert_modules
from mens_exp.layout.peft_format import (
    CONFIG_NAME,
    PeftSettings,
    join_experts,
    read_settings,
    split_experts,
    stacks_of,
)
from mens_exp.layout.shape import HEAD, logical_name
from mens_exp.layout.targets import shortest_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from mens_exp.artifacts.adapter_v3 import Quant
    from mens_exp.layout.adapter_base import AdapterBase
    from mens_exp.layout.checkpoint_files import TensorInfo
    from mens_exp.layout.families import Family
    from mens_exp.layout.modules import LinearModule
    from mens_exp.layout.peft_format import Stack

    Tensors = dict[str, npt.NDArray[np.float32]]

TENSORS_NAME = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
# Training frameworks may leave the adapter's own name, `default`, in a key.
_TENSOR = re.compile(
    r"(?P<path>.+)\.(?:(?P<half>lora_[AB])(?:\.default)?\.weight"
    r"|(?P<lengths>lora_magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
_PARTS = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": MAGNITUDE}
_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftAdapter:
    """An adapter in PEFT's representation.

    Attributes:
        settings: settings from its configuration.
        paths: logical layer -> path of its module or, for an expert, of the parameter that
            contains it; without PEFT's prefix.
        tensors: under logical names as in schema v3, f32.
    """

    settings: PeftSettings
    paths: dict[str, str]
    tensors: Tensors


def is_peft(directory: Path) -> bool:
    """Return whether a directory holds a PEFT adapter."""
    return (directory / CONFIG_NAME).is_file()


def read_peft(directory: Path, family: Family) -> PeftAdapter:
    """Read a PEFT directory written by any program.

    Args:
        directory: contains adapter_config.json and adapter_model.safetensors.
        family: family of its model; PEFT names modules by their paths.

    Raises:
        DataError: a file is missing, or contains more than LoRA matrices of projections with
            logical names.
        ModelFileError: the tensor file is damaged.
        Problems: several of these.
    """
    settings = read_settings(directory)
    path = directory / TENSORS_NAME
    if not path.is_file() and (directory / _PICKLED).is_file():
        raise DataError(
            "the tensors are a pickle, which can run code when it is read",
            where=str(directory),
            found=_PICKLED,
            expected=TENSORS_NAME,
            remedy="load it where you trust it and save it again with safe_serialization=True",
        )
    header = read_header(path)
    raw = path.read_bytes()
    data = raw[len(raw) - max((info.end for info in header.values()), default=0) :]
    problems: list[DataError] = []
    paths: dict[str, str] = {}
    tensors: Tensors = {}
    stacks = _adapted_stacks(settings, family, header)
    for name, info in header.items():
        try:
            if settings.tunes_norms:
                logical, part, module = _named_norm(name, info, path, family)
            else:
                logical, part, module = _named(name, info, path, family, stacks)
        except DataError as error:
            problems.append(error)
            continue
        paths[logical] = module
        tensors[f"{logical}.{part}"] = _as_f32(data, info)
    Problems.raise_if(few(problems, str(path)))
    found = [one for one in stacks.values() if one.logical in paths]
    Problems.raise_if(few(list(_stack_problems(found, settings, tensors, path)), str(path)))
    for one in found:
        del paths[one.logical]
        paths |= dict.fromkeys((member.logical for member in one.members), one.path)
    return PeftAdapter(settings=settings, paths=paths, tensors=split_experts(tensors, found))


def _adapted_stacks(
    settings: PeftSettings, family: Family, names: Iterable[str]
) -> dict[str, Stack]:
    """Return the adapted expert tensors, keyed by the path under which PEFT saves their pairs.

    PEFT wraps a module once for each of its adapted parameters: gate with up inside, under
    ``base_layer``, and down outside.
    """
    inside = f"{_PREFIX}{family.layers}."
    layers = {name.removeprefix(inside).partition(".")[0] for name in names}
    numbers = sorted(int(one) for one in layers if one.isdigit())
    found: dict[str, Stack] = {}
    by_module: dict[str, list[Stack]] = {}
    for one in stacks_of(expert_modules(family, numbers)) if settings.parameters else ():
        if settings.adapts(one.path):
            by_module.setdefault(one.module, []).append(one)
    for module, listed in by_module.items():
        for depth, one in enumerate(reversed(listed)):
            found[f"{module}{'.base_layer' * depth}"] = one
    return found


def _stack_problems(
    stacks: Iterable[Stack], settings: PeftSettings, tensors: Tensors, path: Path
) -> Iterator[DataError]:
    """Yield pairs that do not match the expected experts and rank."""
    for one in stacks:
        rank = settings.rank_of(one.path) * one.experts
        A, B = (tensors.get(f"{one.logical}.lora_{which}") for which in "ab")
        _, out, width = one.shape
        shapes = [None if pair is None else list(pair.shape) for pair in (A, B)]
        if shapes != [[rank, width], [out, rank]]:
            yield DataError(
                "the pair is not that of the experts",
                where=f"{path}: {one.path}",
                found=str(shapes),
                expected=f"[{rank}, {width}] and [{out}, {rank}], for {one.experts} experts",
            )


def _named(
    name: str, info: TensorInfo, path: Path, family: Family, stacks: Mapping[str, Stack]
) -> tuple[str, str, str]:
    match = _TENSOR.fullmatch(name)
    if match is None or info.dtype not in _NUMPY:
        embedding = ".lora_embedding_" in name
        raise DataError(
            "adapts the embedding table, which has no logical name"
            if embedding
            else "is not a matrix of a LoRA adapter",
            where=f"{path}: {name}",
            found=info.dtype,
            expected="….lora_A.weight, ….lora_B.weight or ….lora_magnitude_vector of a linear "
            "module, in F32, F16 or BF16",
            remedy="save the adapter again with save_pretrained(…, save_embedding_layers=False): "
            "PEFT has added the weight of an adapted head"
            if name.endswith(".base_layer.weight")
            else None,
        )
    module = match["path"].removeprefix(_PREFIX)
    if module in stacks and match["half"]:
        return stacks[module].logical, _PARTS[match["half"]], stacks[module].path
    try:
        logical = logical_name(module, family)
    except ModelFileError as error:
        raise _of_another_model(error.what, f"{path}: {name}", family) from error
    return logical, _PARTS[match["half"] or match["lengths"]], module


def _named_norm(name: str, info: TensorInfo, path: Path, family: Family) -> tuple[str, str, str]:
    """Return logical name, part and module path of a tensor of tuned norms."""
    found = norms.vector_of(name)
    if found is None or info.dtype not in _NUMPY:
        raise DataError(
            "is not a vector of a tuned norm",
            where=f"{path}: {name}",
            found=info.dtype,
            expected="….ln_tuning_layers.weight or ….bias, in F32, F16 or BF16",
        )
    module, vector = found
    logical = family.logical_norm(module, vector)
    if logical is None:
        raise _of_another_model(f"is not a norm with a {vector}", f"{path}: {name}", family)
    return logical, norms.VALUES, module


def _of_another_model(what: str, where: str, family: Family) -> DataError:
    return DataError(
        what,
        where=where,
        expected=f"modules of a {family.model_type} model, in {family.layers} or outside of them",
        remedy="name the model that it was trained on: model=hf model.id=<directory or hub id>",
    )


def manifest_of(
    adapter: PeftAdapter, base: AdapterBase, quant: Quant, where: str
) -> tuple[AdapterManifest, Tensors]:
    """Describe a PEFT adapter in schema v3; the variant and the patterns are preserved.

    A scale that cannot be expressed with integers is multiplied into B, with ``alpha = rank``.

    Args:
        adapter: the adapter as read.
        base: its base model.
        quant: quantization of the base during training.
        where: location of the adapter, for messages.

    Raises:
        DataError: matrices are missing, or do not have the configured rank.
        Problems: several of these.
    """
    settings, paths = adapter.settings, adapter.paths
    layers = [layer for layer in base.modules if layer in paths]
    ranks = {layer: settings.rank_of(paths[layer]) for layer in layers}
    alphas = {layer: settings.alpha_of(paths[layer]) for layer in layers}
    whole = all(float(one).is_integer() for one in (settings.alpha, *alphas.values()))
    several = len(settings.variants) > 1
    folds = not whole or several
    variant = next((n for n in settings.variants if FORMS[n].no_delta), settings.variants[0])
    ours: dict[str, Any] = {
        "embed_key": base.embed_key,
        "variant": variant,
        "rank_pattern": {layer: r for layer, r in ranks.items() if r != settings.r},
    }
    if folds:
        ours |= {"variant": "lora" if FORMS[variant].root_scale else variant, "scale": "header"}
    else:
        others = {layer: int(one) for layer, one in alphas.items() if one != settings.alpha}
        ours["alpha_pattern"] = others
    if HEAD in layers:
        ours["tied_head"] = base.shape.tied
    manifest = AdapterManifest(
        adapter_method="lora" if quant["base_quant"] == "none" else "qlora",
        quant=quant,
        base_key_map={layer: base.key_of(layer) for layer in layers},
        layer_order=layers,
        vocab=base.shape.vocab_size,
        d_model=base.shape.hidden_size,
        rank=settings.r,
        alpha=settings.r if folds else int(settings.alpha),
        base_model=settings.base_model or base.name,
        mens_exp={key: value for key, value in ours.items() if value or value is False},
    )
    shapes = {name: values.shape for name, values in adapter.tensors.items()}
    kinds = dict.fromkeys(shapes, "F32")
    found = manifest.problems(where) or disagreements(manifest, shapes, kinds, where)
    Problems.raise_if(few(found, where))
    tensors = dict(adapter.tensors)
    if folds:
        for layer in layers:
            B_OR = tensors[f"{layer}.lora_b"].astype(np.float64) * settings.scale_of(paths[layer])
            tensors[f"{layer}.lora_b"] = B_OR.astype(np.float32)
    return manifest, tensors


def write_peft(
    directory: Path,
    manifest: AdapterManifest,
    tensors: Mapping[str, npt.NDArray[np.float32]],
    base: AdapterBase,
) -> None:
    """Write an adapter as a new PEFT directory, atomically.

    Args:
        directory: the target.
        manifest: of schema v3; all its layers are modules of the base.
        tensors: under logical names, f32.
        base: its base model.
    """
    spec = ADAPTERS.known(manifest.variant)
    if spec is not None and spec.on_norms:
        _write_norms(directory, manifest, tensors, base)
        return
    peft_flags(manifest)
    doubled = ((manifest.mens_exp or {}).get("init") or {}).get("doubled_rank")
    if manifest.form.root_scale and doubled:  # its scale cannot be written as alpha over a root
        manifest, tensors = portable(manifest, tensors)
    names = {logical: peft for peft, logical in _PARTS.items()}
    content = {}
    places = {layer: base.modules[layer].path for layer in manifest.layer_order}
    stacks = stacks_of(_whole_stacks(manifest, base, str(directory)))
    for one in stacks:
        wraps = one.path.endswith(".gate_up_proj") and one.module in {
            other.module for other in stacks if other is not one
        }
        places[one.logical] = f"{one.module}{'.base_layer' if wraps else ''}"
    for name, values in join_experts(tensors, stacks, str(directory)).items():
        layer, _, part = name.rpartition(".")
        end = names[part] if part == MAGNITUDE else f"{names[part]}.weight"
        content[f"{_PREFIX}{places[layer]}.{end}"] = np.ascontiguousarray(values)
    _write(directory, _settings(manifest, base), content)


def _write_norms(
    directory: Path,
    manifest: AdapterManifest,
    tensors: Mapping[str, npt.NDArray[np.float32]],
    base: AdapterBase,
) -> None:
    """Write tuned norms."""
    modules = [base.modules[layer] for layer in manifest.layer_order]
    content = {
        norms.peft_name(one.path, one.norm or norms.WEIGHT): np.ascontiguousarray(
            tensors[f"{one.logical}.{norms.VALUES}"]
        )
        for one in modules
    }
    targets = _targets(list(dict.fromkeys(one.path for one in modules)), base)
    name = manifest.base_model or base.name
    _write(directory, norms.peft_config(targets, base=name, revision=base.revision), content)


def _write(directory: Path, settings: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    with atomic.directory(directory) as temporary:
        (temporary / TENSORS_NAME).write_bytes(save(dict(sorted(content.items()))))
        text = json.dumps(settings, indent=2, sort_keys=True)
        (temporary / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def _whole_stacks(manifest: AdapterManifest, base: AdapterBase, where: str) -> list[LinearModule]:
    """Return the adapted matrices of experts.

    Raises:
        DataError: only some experts of a layer have adapters, which PEFT does not support.
    """
    found = [base.modules[layer] for layer in manifest.layer_order if base.modules[layer].stack]
    stacks = {one.stack for one in found}
    every = [one for one in base.modules.values() if one.stack in stacks and one.stack]
    absent = sorted({one.logical for one in every} - set(manifest.layer_order))
    if absent:
        raise DataError(
            "PEFT adapts all experts of a layer or none, gate with up",
            where=where,
            found=f"no {absent[0]}, and {len(absent) - 1} more",
            expected="an adapter on each expert of a layer",
            remedy="merge it: task=merge, or write it with export.format=v3",
        )
    return found


def _settings(manifest: AdapterManifest, base: AdapterBase) -> dict[str, Any]:
    modules = [base.modules[layer] for layer in manifest.layer_order]
    paths = {one.logical: one.stack or one.path for one in modules}
    plain = [one.path for one in modules if one.stack is None]
    parameters = {one.stack for one in modules if one.stack is not None}
    ranks = {layer: manifest.rank_of(layer) for layer in paths}
    flags = peft_flags(manifest)
    # PEFT divides by the layer's own rank (or its root), so alpha is computed for that.
    alphas = {
        layer: _whole(manifest.form.alpha(manifest.scale_of(layer), r))
        for layer, r in ranks.items()
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": manifest.base_model or base.name,
        "revision": base.revision,
        "inference_mode": True,
        "r": manifest.rank,
        "lora_alpha": manifest.alpha,
        "lora_dropout": 0.0,
        "target_modules": _targets(plain, base),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "rank_pattern": {
            re.escape(paths[layer]): r for layer, r in ranks.items() if r != manifest.rank
        },
        "alpha_pattern": {
            re.escape(paths[layer]): one for layer, one in alphas.items() if one != manifest.alpha
        },
        **flags,
        "fan_in_fan_out": base.shape.family.transposed and set(paths) != {HEAD},
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": True,
    }


def peft_flags(manifest: AdapterManifest) -> dict[str, bool]:
    """Return the keys that select the adapter method.

    Raises:
        DataError: PEFT's LoRA cannot represent the method.
    """
    spec = ADAPTERS.known(manifest.variant)
    if spec is None or spec.peft is None:
        is_in_run = spec is not None and spec.has_peft_view
        raise DataError(
            f"a PEFT directory of {manifest.variant} cannot be made from an adapter file",
            where="mens_exp.variant",
            found=manifest.variant,
            expected="lora, rslora or dora",
            remedy="use adapter/peft, which its run has written"
            if is_in_run
            else "merge it: task=merge",
        )
    return {**dict.fromkeys(PEFT_FLAGS, False), **spec.peft}


def _targets(paths: Sequence[str], base: AdapterBase) -> list[str]:
    if not base.shape.family.verified:
        return list(paths)  # it may have linear modules without logical names
    return shortest_names(paths, [one.path for one in base.modules.values()])


def _whole(alpha: float) -> int | float:
    """Return an alpha as an integer if it is one up to rounding, else unchanged."""
    near = round(alpha)
    return near if math.isclose(alpha, near, rel_tol=1e-12) else alpha


def _as_f32(data: bytes, info: TensorInfo) -> npt.NDArray[np.float32]:
    values: npt.NDArray[Any] = np.frombuffer(data[info.start : info.end], _NUMPY[info.dtype])
    if info.dtype == "BF16":  # the upper half of an f32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32).reshape(info.shape)
