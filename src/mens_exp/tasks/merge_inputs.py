"""Inputs of task=merge: an adapter in any of its forms, and the base that it belongs to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_files import read_files
from mens_exp.artifacts.adapter_v3 import AdapterManifest, read_adapter
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.outputs import refuse_changed_outputs
from mens_exp.config.model import HfModel
from mens_exp.errors import ModelFileError, Problems, RequestError
from mens_exp.export.adapter import AdapterPlace, out_problems, read
from mens_exp.layout.adapter_base import AdapterBase
from mens_exp.layout.directory import ModelDirectory, read_directory
from mens_exp.layout.hub import local
from mens_exp.layout.peft_config import read_settings
from mens_exp.layout.shape import Shape, shape_of
from mens_exp.tasks.conversion import place_of
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.model import ModelConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError
    from mens_exp.model.resolve import BaseModel

__all__ = ["MergeInputs", "adapter_place", "gather", "input_problems"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeInputs:
    """An adapter and its base, read and not yet compared.

    Attributes:
        where: the adapter's directory, or its file of tensors.
        schema: ``v2``, ``v3`` or ``peft``.
        manifest: of the adapter, in schema v3 whatever its form.
        tensors: its matrices by name, f32.
        sha256: of its file of tensors.
        shards: the base's safetensors files.
        base: None for bare shards, as are the next two.
        model: config.json and headers of the base.
        shape: dimensions of the base.
        run: that made the adapter, where it lies in one.
    """

    where: str
    schema: str
    manifest: AdapterManifest
    tensors: Mapping[str, np.ndarray]
    sha256: str
    shards: tuple[Path, ...]
    base: BaseModel | None = None
    model: ModelDirectory | None = None
    shape: Shape | None = None
    run: RunDir | None = None

    def weights_sha256(self) -> str:
        """Return the hash over the names and contents of the base's shards."""
        if self.base is not None:
            return self.base.weights_sha256
        return digest({shard.name: sha256_file(shard) for shard in self.shards})


def adapter_place(text: str) -> AdapterPlace:
    """Return the adapter that ``path`` names.

    Args:
        text: ``latest``, a run, or a directory that holds an adapter.

    Raises:
        RequestError: there is none, or the run has none.
        DataError: the run is an unpacked bundle, and not what was packed.
    """
    try:
        return place_of(text)
    except RequestError as error:
        directory = Path(text).expanduser()
        burn = [directory] if directory.suffix == ".bin" else sorted(directory.glob("*.bin"))
        if not burn:
            raise
        raise RequestError(
            "a Burn checkpoint is no safetensors adapter",
            where="path",
            found=str(burn[0]),
            expected="a run, or an adapter directory (schema v2, v3 or PEFT)",
            remedy="merge it where it was made, with: vox mens merge-weights",
        ) from error


def input_problems(config: RunConfig) -> list[MensError]:
    """List what keeps a merge from being begun, before a run of its own is opened."""
    problems: list[MensError] = []
    if config.path is not None:
        try:
            adapter_place(config.path)
        except Problems as several:
            problems += several.problems
        except RequestError as error:
            problems.append(error)
    named = {"adapter.file": [config.adapter.file], "meta": [config.meta]}
    for where, files in (named | {"base_shard": config.base_shard}).items():
        problems += [
            RequestError("no such file", where=where, found=name)
            for name in files
            if name is not None and not Path(name).expanduser().is_file()
        ]
    if config.out is not None:
        problems += out_problems(Path(config.out).expanduser())
    return problems


def gather(config: RunConfig, cache: Path) -> MergeInputs:
    """Read the adapter and find its base; nothing of the base but headers is read.

    Raises:
        MensError: either is missing, damaged, or of a form that cannot be merged.
    """
    return _bare(config) if config.adapter.file is not None else _of_directory(config, cache)


def _bare(config: RunConfig) -> MergeInputs:
    assert config.adapter.file is not None, "validation has asked for them"
    assert config.meta is not None, "validation has asked for them"
    file, meta = Path(config.adapter.file).expanduser(), Path(config.meta).expanduser()
    refuse_changed_outputs(file, meta)
    manifest, tensors = read_files(file, meta)
    return MergeInputs(
        where=str(file),
        schema=f"v{json.loads(meta.read_text('utf-8'))['version']}",
        manifest=manifest,
        tensors=tensors,
        sha256=sha256_file(file),
        shards=tuple(Path(shard).expanduser() for shard in config.base_shard),
    )


def _of_directory(config: RunConfig, cache: Path) -> MergeInputs:
    from mens_exp.model.resolve import resolve

    assert config.path is not None, "validation has asked for it"
    place = adapter_place(config.path)
    model = _model(config, place)
    base = resolve(model, cache)
    found = read_directory(base.directory)
    if "quantization_config" in found.config:
        raise ModelFileError(
            "the base is quantized itself, and has no weights to add to",
            where=f"{base.directory}: config.json: quantization_config",
            found=str(found.config["quantization_config"]),
            expected="an unquantized model",
            remedy="name the model that it was made from with base=",
        )
    shape = shape_of(model)
    if place.form == "peft":
        manifest, tensors = _from_peft(
            place, AdapterBase(name=base.name, shape=shape, keys=found.tensors)
        )
    else:
        manifest, tensors = read(place, None, None)
    return MergeInputs(
        where=str(place.directory),
        schema=place.form,
        manifest=manifest,
        tensors=tensors,
        sha256=sha256_file(place.tensors),
        shards=found.shards,
        base=base,
        model=found,
        shape=shape,
        run=place.run,
    )


def _from_peft(place: AdapterPlace, base: AdapterBase) -> tuple[AdapterManifest, Mapping[str, Any]]:
    """Read a PEFT directory; what made its base 4-bit is told where it is a run's own view."""
    if place.run is None:
        return read(place, base, None)
    own, _ = read_adapter(place.run.adapter)
    manifest, tensors = read(place, base, own.quant)
    theirs, ours = own.mens_exp or {}, manifest.mens_exp or {}
    told = ("quantizer", "base_weights_sha256")
    manifest.mens_exp = ours | {name: theirs[name] for name in told if name in theirs}
    return manifest, tensors


def _model(config: RunConfig, place: AdapterPlace) -> ModelConfig:
    """Return the base that is asked for, or else the recorded one."""
    if config.base is None and place.run is not None:
        return config_of(place.run).model
    name, where = config.base, "base"
    if name is None:
        where = str(place.directory)
        if place.form == "peft":
            name = read_settings(place.directory).base_model
        else:
            name = read(place, None, None)[0].base_model
    try:
        is_here = name is not None and local(name) is not None
        is_asked = config.base is not None or (name is not None and name.count("/") == 1)
    except ModelFileError:  # written as a path, and no directory is there
        is_here = is_asked = False
    if name is None or not (is_here or is_asked):
        raise RequestError(
            "no such base is here" if config.base else "the adapter does not say where its base is",
            where=where,
            found=name,
            expected="an id of the hub, or a directory with config.json and safetensors",
            remedy="add base=<id or directory>",
        )
    return HfModel(id=name)
