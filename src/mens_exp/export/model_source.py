"""The complete model directory that a path names, or why what it names is none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.errors import RequestError
from mens_exp.export.handoff import FILE, read_handoff
from mens_exp.layout.directory import read_directory
from mens_exp.layout.shape import check_weights

if TYPE_CHECKING:
    from mens_exp.errors import MensError

__all__ = ["model_directory", "occupied"]

_CONFIG = "config.json"
_ADAPTERS = ("adapter_config.json", "adapter_manifest.json", "candle_qlora_adapter_meta.json")


def model_directory(text: str) -> Path:
    """Return the model directory that a path names.

    Args:
        text: a Hugging Face directory, an export that holds or names one, a run that trained
            every weight, or ``latest``.

    Raises:
        RequestError: it is an adapter, a run with one, or no model.
        ModelFileError: it is a model, and its files are missing or contradictory.
        DataError: its hand-off record breaks a rule.
    """
    path = Path(text).expanduser()
    if text == "latest" or (path / "manifest.json").is_file():
        return _of_run(resolve(text))
    if (path / FILE).is_file() and not (path / _CONFIG).is_file():
        path /= read_handoff(path).artifact_dir
    if not (path / _CONFIG).is_file():
        raise _no_model(path)
    check_weights(read_directory(path))
    return path


def occupied(out: str | None) -> list[MensError]:
    """Say that a directory to write is there and holds something that is no export."""
    path = Path(out or "").expanduser()
    if out is None or not path.exists() or (path / FILE).is_file():
        return []
    if path.is_dir() and not any(path.iterdir()):
        return []
    return [
        RequestError(
            "is there already, and no earlier export",
            where="out",
            found=out,
            expected="a new directory, or one that an export wrote",
        )
    ]


def _of_run(run: RunDir) -> Path:
    if (run.weights / _CONFIG).is_file():
        return run.weights
    if run.adapter.is_dir():
        raise _is_adapter(run.path)
    raise _no_model(run.path)


def _is_adapter(path: Path) -> RequestError:
    return RequestError(
        "is an adapter, no complete model",
        where="path",
        found=str(path),
        expected="a model directory",
        remedy=f"merge it first: task=merge path={path} out=<directory>, then path=<directory>",
    )


def _no_model(path: Path) -> RequestError:
    if any((path / name).is_file() for name in _ADAPTERS):
        return _is_adapter(path)
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else []
    remedy = None
    if ggufs:
        remedy = f"run the GGUF file with llama.cpp: llama-server -m {ggufs[0]}"
    return RequestError(
        "is no complete model directory",
        where="path",
        found=str(path) if path.exists() else f"{path}, which does not exist",
        expected="config.json, safetensors and tokenizer.json",
        remedy=remedy or "name a merged directory, such as task=merge writes",
    )
