"""Find the subject of a task: a run, an adapter in any form, and its base model.

A run's configuration is validated, and an adapter's conversion or merge is checked, before anything
is executed or loaded. Only the headers of a base are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_v2 import lower, read_adapter_files
from mens_exp.artifacts.adapter_v3 import AdapterManifest, portable, read_adapter
from mens_exp.artifacts.digest import digest, refuse_changed_outputs, sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.config.compose import from_yaml, typed
from mens_exp.config.lora import ADAPTERS
from mens_exp.config.model import HfModel
from mens_exp.config.quant import DEFAULT_QUANTIZER, QuantType
from mens_exp.config.task import ExportFormat
from mens_exp.errors import (
    ConfigError,
    MensError,
    ModelFileError,
    NoEffectError,
    Problems,
    RequestError,
)
from mens_exp.export import bundle, serving
from mens_exp.export.adapter import AdapterPlace, find, needs_base, out_problems, read
from mens_exp.export.bundle import (
    archive_problems,
    changed_files,
    packing_problems,
    run_files,
    secret_problems,
    verify,
)
from mens_exp.export.gguf import require_gguf
from mens_exp.export.gguf_layout import refuse_unwritable
from mens_exp.export.handoff import ollama_problems
from mens_exp.layout.adapter_base import AdapterBase, base_of
from mens_exp.layout.checkpoint_files import ModelDirectory, read_directory
from mens_exp.layout.hub import local
from mens_exp.layout.model_cache import ready_directory
from mens_exp.layout.peft_adapter import peft_flags
from mens_exp.layout.peft_format import read_settings
from mens_exp.layout.shape import Shape, shape_of, stored_layers
from mens_exp.planning.checks import classes, model
from mens_exp.rows.cache import cache_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np

    from mens_exp.artifacts.adapter_v3 import Quant
    from mens_exp.config.model import ModelConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.model.sources import BaseModel


def subject_of(path: str) -> RunDir:
    """Return the run that a task reads.

    Raises:
        RequestError: there is no such run, or it has no adapter.
        DataError: it is an unpacked bundle that differs from what was packed.
    """
    subject = resolve(path, task="train")
    manifest = Manifest.read(subject.manifest)
    if manifest.task != "train":
        raise RequestError(
            "the run trained nothing",
            where="path",
            found=f"{subject.path} ({manifest.task})",
            expected="a training run",
            remedy="name one, or path=latest",
        )
    if subject.weights.is_dir() and not subject.adapter.is_dir():
        raise RequestError(
            "the run trained every weight and has no adapter",
            where="path",
            found=str(subject.path),
            expected="a run of a backend with an adapter",
            remedy=f"use its weights as a model: model=hf model.id={subject.weights}",
        )
    if not (subject.adapter / "adapter_manifest.json").is_file():
        raise RequestError(
            "the run has no adapter",
            where="path",
            found=f"{subject.path} ({manifest.status})",
            expected="a training run that has ended",
            remedy=f"finish it with resume={subject.path}",
        )
    verify(subject)
    return subject


def config_of(subject: RunDir) -> RunConfig:
    """Return a run's own configuration.

    Raises:
        ConfigError: it cannot be read, or names a class that is not trusted here.
        Problems: several of these.
    """
    config = typed(from_yaml(subject.config))
    Problems.raise_if(list(classes.check(config)))
    return config


def base_problems(config: RunConfig) -> list[MensError]:
    """List problems that prevent loading the command's own base model."""
    try:
        return [*model.check_model(config), *classes.check(config)]
    except Problems as several:
        return list(several.problems)


def sending_problems(config: RunConfig, subject: RunDir) -> list[MensError]:
    """List problems that prevent sending a run with the chosen task."""
    if config.task.name == "export":
        return [
            *archive_problems(config.out),
            *packing_problems(
                subject,
                checkpoints=config.export.checkpoints,
                allow_absolute_paths=config.export.allow_absolute_paths,
            ),
        ]
    if config.task.name == "push":
        files = run_files(subject).items()
        return [*bundle.login_problems(), *changed_files(subject), *secret_problems(files)]
    return []


def reads_a_model(config: RunConfig) -> bool:
    """Return whether the task reads a complete model directory instead of a run or an adapter."""
    name = config.task.name
    is_gguf = name == "export" and config.export.format is ExportFormat.gguf
    return name == "serve" or (is_gguf and (Path(config.path or "") / "config.json").is_file())


def leaving_problems(config: RunConfig) -> list[MensError]:
    """List problems that prevent writing a model as GGUF, or serving it, on this machine."""
    if config.task.name == "serve":
        address = serving.address_problems(config.serve.host, config.serve.port)
        token = serving.token_problems(config.serve.host, config.serve.token_env)
        return [*serving.missing_packages(), *token, *address]
    if config.export.format is not ExportFormat.gguf:
        return []
    try:
        require_gguf()
        base = None if reads_a_model(config) else _ready_base(config)
        if base is not None:
            refuse_unwritable(base)
    except Problems as several:
        return list(several.problems)
    except MensError as error:
        return [error]
    return []


def _ready_base(config: RunConfig) -> Path | None:
    """Return the base that an adapter will be merged into; None if it has yet to be created."""
    assert config.path is not None, "validation has asked for it"
    return ready_directory(_model(config, adapter_place(config.path)), cache_root())


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """One conversion.

    Attributes:
        place: location of the adapter.
        base: its base model, if the conversion needs it.
        quant: quantization of the base, if another source than the adapter records it.
    """

    place: AdapterPlace
    base: AdapterBase | None
    quant: Quant | None


def place_of(path: str) -> AdapterPlace:
    """Return the adapter that ``path`` names, in a training run or a directory.

    Raises:
        RequestError: there is none.
        DataError: it is an unpacked bundle that differs from what was packed.
    """
    directory = Path(path).expanduser()
    if path == "latest" or RunDir(directory).manifest.is_file():
        directory = subject_of(path).path
    return find(directory)


def form_of(config: RunConfig) -> ExportFormat:
    """Return the adapter's form in an export: vLLM and Ollama read PEFT's."""
    others = {ExportFormat.vllm, ExportFormat.ollama}
    return ExportFormat.peft if config.export.format in others else config.export.format


def conversion_of(config: RunConfig) -> Conversion:
    """Find the adapter and the inputs of its conversion.

    Raises:
        MensError: there is no adapter, or its base model cannot be described.
    """
    assert config.path is not None, "validation has asked for it"
    place = place_of(config.path)
    owner = None if place.run is None else config_of(place.run)
    base = None
    if needs_base(place, form_of(config)):
        base = base_of((owner or config).model, cache_root())
    quant = _base_quant(config)
    if place.form == "peft" and owner is not None:
        quant = _quant(owner.quant.quant_type, double_quant=owner.quant.double_quant)
    return Conversion(place=place, base=base, quant=quant)


def conversion_problems(config: RunConfig, given: Iterable[str]) -> list[MensError]:
    """List problems that prevent writing an adapter in the chosen form.

    Args:
        config: the whole configuration.
        given: the command's own overrides.
    """
    found: list[MensError] = []
    if config.out is not None:
        found += out_problems(Path(config.out))
    try:
        conversion = conversion_of(config)
        found += _without_effect(config, conversion, given)
        manifest, tensors = read(conversion.place, conversion.base, conversion.quant)
        if form_of(config) is ExportFormat.peft:
            found += _ineffective_here(config, manifest)
            if config.export.format is ExportFormat.ollama and manifest.form.has_pair:
                assert conversion.base is not None, "PEFT's form asks for it"
                found += ollama_problems(manifest, conversion.base)
                require_gguf()
            return found
        light, _ = portable(manifest, tensors)
        if config.export.format is ExportFormat.v2:
            base = conversion.base
            lower(light, embed_key=None if base is None else base.embed_key)
    except Problems as several:
        found += several.problems
    except MensError as error:
        found.append(error)
    return found


def _ineffective_here(config: RunConfig, manifest: AdapterManifest) -> Iterator[MensError]:
    """Yield a problem if no program can load the method's adapter in the chosen form."""
    spec = ADAPTERS.known(manifest.variant)
    only_lora = config.export.format is not ExportFormat.peft
    if only_lora and not manifest.form.has_pair:
        program = {ExportFormat.vllm: "vLLM", ExportFormat.ollama: "Ollama"}[config.export.format]
        is_merged = spec is None or spec.not_merged is None
        remedy = "write the merged model with export.format=hf, which vLLM serves"
        if config.export.format is ExportFormat.ollama:
            remedy = "choose ollama.form=merged"
        yield RequestError(
            f"{program} loads LoRA adapters alone",
            where="path",
            found=manifest.variant,
            expected="an adapter with matrices A and B"
            + (", or the merged model" if is_merged else ""),
            remedy=remedy if is_merged else "evaluate the run itself: task=evaluate path=<run>",
        )
    elif spec is None or not spec.on_norms:
        peft_flags(manifest)


def _without_effect(
    config: RunConfig, conversion: Conversion, given: Iterable[str]
) -> Iterator[ConfigError]:
    place = conversion.place
    keys = {text.lstrip("+").partition("=")[0] for text in given}
    reason = None
    if place.run is not None:
        reason = f"the adapter is of the run {place.run.path}, which names its own"
    elif conversion.base is None:
        reason = (
            f"export.format={config.export.format.value} takes all it needs from {place.directory}"
        )
    for key in sorted(keys if reason else ()):
        if key.partition(".")[0] == "model":
            yield NoEffectError("here", where=key, found=reason, expected="no model")
    tells = place.form == "v3" or place.run is not None
    for key in sorted(keys & {"export.base_quant", "export.double_quant"} if tells else ()):
        yield NoEffectError(
            "here",
            where=key,
            found=f"{place.directory} records how its base was quantized",
            expected="an adapter that does not: schema v2 or PEFT's form",
        )


def _base_quant(config: RunConfig) -> Quant | None:
    asked = config.export
    if asked.base_quant is None and asked.double_quant is None:
        return None
    base_quant = asked.base_quant or DEFAULT_QUANTIZER
    usual = base_quant.spec.usual_double_quant
    double_quant = usual if asked.double_quant is None else asked.double_quant
    return _quant(base_quant, double_quant=double_quant)


def _quant(base_quant: QuantType, *, double_quant: bool) -> Quant:
    return {
        "base_quant": base_quant.value,
        "double_quant": double_quant and "double_quant" in base_quant.spec.settings,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeInputs:
    """An adapter and its base, read and not yet compared.

    Attributes:
        where: the adapter's directory, or its file of tensors.
        schema: ``v2``, ``v3`` or ``peft``.
        manifest: manifest of the adapter, converted to schema v3.
        tensors: its matrices by name, f32.
        sha256: hash of its file of tensors.
        shards: the base's safetensors files.
        base: the base model; None for bare shards, as are `model` and `shape`.
        model: config.json and headers of the base.
        shape: dimensions of the base.
        run: the run that contains the adapter, if any.
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
        text: ``latest``, a run, or a directory with an adapter.

    Raises:
        RequestError: there is no adapter.
        DataError: the run is an unpacked bundle that differs from what was packed.
    """
    try:
        return place_of(text)
    except RequestError as error:
        directory = Path(text).expanduser()
        burn = [directory] if directory.suffix == ".bin" else sorted(directory.glob("*.bin"))
        if not burn:
            raise
        raise RequestError(
            "a Burn checkpoint is not a safetensors adapter",
            where="path",
            found=str(burn[0]),
            expected="a run, or an adapter directory (schema v2, v3 or PEFT)",
            remedy="merge it where it was made, with: vox mens merge-weights",
        ) from error


def merge_problems(config: RunConfig) -> list[MensError]:
    """List problems that prevent a merge, before its run is opened."""
    problems: list[MensError] = []
    if config.path is not None:
        try:
            adapter_place(config.path)
        except Problems as several:
            problems += several.problems
        except RequestError as error:
            problems.append(error)
    named = {"adapter.file": [config.adapter.file], "merge.meta": [config.merge.meta]}
    for where, files in (named | {"merge.base_shard": config.merge.base_shard}).items():
        problems += [
            RequestError("no such file", where=where, found=name)
            for name in files
            if name is not None and not Path(name).expanduser().is_file()
        ]
    if config.out is not None:
        problems += out_problems(Path(config.out).expanduser())
    return problems


def gather(config: RunConfig, cache: Path) -> MergeInputs:
    """Read the adapter and find its base; only the headers of the base are read.

    Raises:
        MensError: either is missing, damaged, or in a format that cannot be merged.
    """
    return _bare(config) if config.adapter.file is not None else _of_directory(config, cache)


def _bare(config: RunConfig) -> MergeInputs:
    assert config.adapter.file is not None, "validation has asked for them"
    assert config.merge.meta is not None, "validation has asked for them"
    file, meta = Path(config.adapter.file).expanduser(), Path(config.merge.meta).expanduser()
    shards = tuple(Path(shard).expanduser() for shard in config.merge.base_shard)
    refuse_changed_outputs(file, meta, *shards)
    manifest, tensors = read_adapter_files(file, meta)
    return MergeInputs(
        where=str(file),
        schema=f"v{json.loads(meta.read_text('utf-8'))['version']}",
        manifest=manifest,
        tensors=tensors,
        sha256=sha256_file(file),
        shards=shards,
    )


def _of_directory(config: RunConfig, cache: Path) -> MergeInputs:
    from mens_exp.model.sources import resolve

    assert config.path is not None, "validation has asked for it"
    place = adapter_place(config.path)
    model = _model(config, place)
    base = resolve(model, cache)
    found = read_directory(base.directory)
    stored_layers(found)  # refuses unsupported quantized layers
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
    """Read a PEFT directory; a run's own view also records the quantizer of its base."""
    if place.run is None:
        return read(place, base, None)
    own, _ = read_adapter(place.run.adapter)
    manifest, tensors = read(place, base, own.quant)
    theirs, ours = own.mens_exp or {}, manifest.mens_exp or {}
    told = ("quantizer", "base_weights_sha256")
    manifest.mens_exp = ours | {name: theirs[name] for name in told if name in theirs}
    return manifest, tensors


def _model(config: RunConfig, place: AdapterPlace) -> ModelConfig:
    """Return the requested base, or else the recorded one."""
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
    except ModelFileError:  # no such directory
        is_here = is_asked = False
    if name is None or not (is_here or is_asked):
        raise RequestError(
            "the base model was not found"
            if config.base
            else "the adapter does not say where its base is",
            where=where,
            found=name,
            expected="an id of the hub, or a directory with config.json and safetensors",
            remedy="add base=<id or directory>",
        )
    return HfModel(id=name)
