"""The run that a task reads: found, and its configuration trusted before anything of it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.config.compose import from_yaml, typed
from mens_exp.config.task import ExportFormat
from mens_exp.errors import MissingExtra, Problems, RequestError
from mens_exp.export import hub, serving
from mens_exp.export.bundle import packing_problems, verify
from mens_exp.export.contents import changed_files, run_files, secret_problems
from mens_exp.export.gguf import require_gguf
from mens_exp.plan.checks import classes, model

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = [
    "base_problems",
    "config_of",
    "leaving_problems",
    "reads_a_model",
    "sending_problems",
    "subject_of",
]


def subject_of(path: str) -> RunDir:
    """Return the run that a task reads.

    Raises:
        RequestError: there is no such run, or it has no adapter.
        DataError: it is an unpacked bundle, and not what was packed.
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
        ConfigError: it cannot be read, or names a class that nobody here has vouched for.
        Problems: several of these.
    """
    config = typed(from_yaml(subject.config))
    Problems.raise_if(list(classes.check(config)))
    return config


def base_problems(config: RunConfig) -> list[MensError]:
    """List what keeps the command's own base model from being loaded."""
    try:
        return [*model.check(config), *classes.check(config)]
    except Problems as several:
        return list(several.problems)


def sending_problems(config: RunConfig, subject: RunDir) -> list[MensError]:
    """List what keeps a run from leaving this machine by the chosen task."""
    if config.task.name == "export":
        return packing_problems(
            subject,
            checkpoints=config.export.checkpoints,
            allow_absolute_paths=config.export.allow_absolute_paths,
        )
    if config.task.name == "push":
        files = run_files(subject).items()
        return [*hub.login_problems(), *changed_files(subject), *secret_problems(files)]
    return []


def reads_a_model(config: RunConfig) -> bool:
    """Tell whether the task reads a complete model directory, and no run or adapter."""
    name = config.task.name
    is_gguf = name == "export" and config.format is ExportFormat.gguf
    return name == "serve" or (is_gguf and (Path(config.path or "") / "config.json").is_file())


def leaving_problems(config: RunConfig) -> list[MensError]:
    """List what keeps a model from being written as GGUF, or from being served, on this machine."""
    if config.task.name == "serve":
        address = serving.address_problems(config.serve.host, config.serve.port)
        token = serving.token_problems(config.serve.host, config.serve.token_env)
        return [*serving.missing_packages(), *token, *address]
    if config.format is not ExportFormat.gguf:
        return []
    try:
        require_gguf()
    except MissingExtra as error:
        return [error]
    return []
