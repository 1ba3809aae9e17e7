"""Files that a run wrote, compared with the hashes in its manifest before anything reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Status
from mens_exp.errors import DataError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["refuse_changed_adapter", "refuse_changed_outputs"]

_ADAPTER = {".json", ".safetensors"}
_DEPTH = 3  # adapter/peft/adapter_model.safetensors lies deepest


def refuse_changed_outputs(*files: Path) -> None:
    """Refuse files of a run that are not what it wrote.

    Files of no run are not checked, nor are those that a run recorded no hash of; while a run is at
    work its files change.

    Args:
        files: that are about to be read; one that is missing is left to its reader.

    Raises:
        Problems: files have another hash than the manifest of their run states.
    """
    Problems.raise_if([error for file in files for error in _changed(file)])


def refuse_changed_adapter(directory: Path) -> None:
    """Refuse the adapter of a run whose files, or whose configuration, are not what it wrote.

    Args:
        directory: that holds the adapter, in a run or elsewhere.

    Raises:
        Problems: files have another hash than the manifest of their run states.
    """
    files = [file for file in sorted(directory.glob("*")) if file.suffix in _ADAPTER]
    configs = [parent / "config.yaml" for parent in directory.absolute().parents[:_DEPTH]]
    refuse_changed_outputs(*files, *configs)


def _changed(file: Path) -> Iterator[DataError]:
    if not file.is_file():
        return
    place = file.absolute()
    for directory in place.parents[:_DEPTH]:
        expected = _outputs(directory).get(place.relative_to(directory).as_posix())
        if expected is None:
            continue
        found = sha256_file(place)
        if found != expected:
            yield DataError(
                "is not what its run wrote",
                where=str(file),
                found=found,
                expected=f"{expected}, as {directory / 'manifest.json'} has it",
                remedy="put the file back as it was, or make it again",
            )
        return


def _outputs(directory: Path) -> dict[str, Any]:
    """Return the hashes that a run at this place recorded; none while it is at work."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text("utf-8"))
        outputs = manifest["outputs"]
        is_at_work = manifest["status"] == Status.STARTED
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return outputs if isinstance(outputs, dict) and not is_at_work else {}
