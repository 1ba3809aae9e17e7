"""What task=merge reads: an adapter in any of its forms, and the base that it belongs to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_files import read_directory, read_files, schema_in
from mens_exp.artifacts.adapter_v3 import AdapterManifest, Quant, read_adapter
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.model import HfModel
from mens_exp.errors import DataError, ModelFileError, Problems, RequestError
from mens_exp.layout.adapter_base import AdapterBase
from mens_exp.layout.directory import ModelDirectory
from mens_exp.layout.directory import read_directory as read_model
from mens_exp.layout.hub import local
from mens_exp.layout.peft_adapter import is_peft, manifest_of, read_peft
from mens_exp.layout.peft_config import read_settings
from mens_exp.layout.shape import Shape, shape_of
from mens_exp.tasks.subject import config_of, subject_of

if TYPE_CHECKING:
    import numpy as np

    from mens_exp.config.model import ModelConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError
    from mens_exp.model.resolve import BaseModel

__all__ = ["MergeInputs", "adapter_directory", "gather", "input_problems"]

_UNQUANTIZED: Quant = {"base_quant": "none", "double_quant": False}


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
    tensors: dict[str, np.ndarray]
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


def adapter_directory(text: str) -> Path:
    """Return the directory of the adapter that ``path`` names.

    Args:
        text: ``latest``, a run, or a directory that holds an adapter.

    Raises:
        RequestError: there is none, or the run has none.
        DataError: the run is an unpacked bundle, and not what was packed.
    """
    directory = Path(text).expanduser()
    if text != "latest" and _is_adapter(directory):
        return directory.resolve()
    burn = sorted(directory.glob("*.bin")) if directory.is_dir() else []
    if directory.suffix == ".bin" or (burn and not RunDir(directory).manifest.is_file()):
        raise RequestError(
            "a Burn checkpoint is no safetensors adapter",
            where="path",
            found=str(burn[0] if burn else directory),
            expected="a run, or an adapter directory (schema v2, v3 or PEFT)",
            remedy="merge it where it was made, with: vox mens merge-weights",
        )
    try:
        return subject_of(text).adapter.resolve()
    except RequestError as error:
        if RunDir(directory).manifest.is_file() or text == "latest":
            raise
        raise RequestError(
            "is neither a run nor an adapter",
            where="path",
            found=text,
            expected="latest, a run directory, or a directory with adapter_manifest.json, "
            "candle_qlora_adapter_meta.json or adapter_config.json",
            remedy=error.remedy,
        ) from error


def input_problems(config: RunConfig) -> list[MensError]:
    """List what keeps a merge from being begun, before a run of its own is opened."""
    problems: list[MensError] = []
    if config.path is not None:
        try:
            adapter_directory(config.path)
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
    out = None if config.out is None else Path(config.out).expanduser()
    if out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        problems.append(
            RequestError(
                "is there already",
                where="out",
                found=config.out,
                expected="a path that does not exist, or an empty directory",
                remedy="name another, or remove it",
            )
        )
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
    directory = adapter_directory(config.path)
    run = _run_of(directory)
    model = _model(config, directory, run)
    base = resolve(model, cache)
    found = read_model(base.directory)
    if "quantization_config" in found.config:
        raise ModelFileError(
            "the base is quantized itself, and has no weights to add to",
            where=f"{base.directory}: config.json: quantization_config",
            found=str(found.config["quantization_config"].get("quant_method")),
            expected="an unquantized model",
            remedy="name the model that it was made from with base=",
        )
    shape = shape_of(model)
    schema = schema_in(directory) or "peft"
    if schema == "peft":
        manifest, tensors = _from_peft(directory, run, shape, base.name, found)
    else:
        manifest, tensors = read_directory(directory)
    return MergeInputs(
        where=str(directory),
        schema=schema,
        manifest=manifest,
        tensors=tensors,
        sha256=digest({one.name: sha256_file(one) for one in directory.glob("*.safetensors")}),
        shards=found.shards,
        base=base,
        model=found,
        shape=shape,
        run=run,
    )


def _from_peft(
    directory: Path, run: RunDir | None, shape: Shape, name: str, model: ModelDirectory
) -> tuple[AdapterManifest, dict[str, Any]]:
    """Read a PEFT directory; what made its base 4-bit is told where it is a run's own view."""
    own = None if run is None else read_adapter(run.adapter)[0]
    base = AdapterBase(name=name, shape=shape, keys=model.tensors)
    quant = _UNQUANTIZED if own is None else own.quant
    manifest, tensors = manifest_of(read_peft(directory, shape.family), base, quant, str(directory))
    if own is not None:
        theirs, told = own.mens_exp or {}, ("quantizer", "base_weights_sha256")
        ours = manifest.mens_exp or {}
        manifest.mens_exp = ours | {name: theirs[name] for name in told if name in theirs}
    return manifest, tensors


def _is_adapter(directory: Path) -> bool:
    return schema_in(directory) is not None or is_peft(directory)


def _run_of(directory: Path) -> RunDir | None:
    """Return the run that an adapter's directory is part of."""
    for place in (directory.parent, directory.parent.parent):
        run = RunDir(place)
        if run.manifest.is_file() and directory in {run.adapter.resolve(), run.peft.resolve()}:
            return run
    return None


def _model(config: RunConfig, directory: Path, run: RunDir | None) -> ModelConfig:
    """Return the base that is asked for, or else the recorded one."""
    if config.base is not None:
        return HfModel(id=config.base)
    if run is not None:
        return config_of(run).model
    if schema_in(directory) is None:
        name = read_settings(directory).base_model
    else:
        name = read_directory(directory)[0].base_model
    if not name or (name.count("/") != 1 and local(name) is None):
        raise DataError(
            "the adapter does not say where its base is",
            where=str(directory),
            found=name,
            expected="an id of the hub, or a directory that is here",
            remedy="add base=<id or directory>",
        )
    return HfModel(id=name)
