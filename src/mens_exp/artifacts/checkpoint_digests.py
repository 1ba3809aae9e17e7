"""checkpoints/sha256.json: the digest of every training state, and the last one that is whole.

A digest is written before its state is renamed into place, so that a state without one is of an
earlier version, and not one whose writer died. A state that is written again has two until then.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import sha256_file
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.artifacts.run_dir import RunDir

__all__ = [
    "NAME",
    "digests_of",
    "last_whole",
    "record_digest",
    "refuse_damaged",
    "rename_after",
]

NAME = "sha256.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def record_digest(path: Path, sha256: str) -> None:
    """Record the digest of a training state that is about to be written.

    Digests of states that are gone are dropped.
    """
    place = path.parent
    kept = {name: some for name, some in _read(place).items() if (place / name).exists()}
    before = kept.get(path.name, [])[-1:]
    atomic.write_json(place / NAME, {**kept, path.name: [*before, sha256]})


def digests_of(path: Path) -> list[str]:
    """Return the digests that a training state may have; none where none was recorded."""
    return _read(path.parent).get(path.name, [])


def refuse_damaged(path: Path) -> None:
    """Refuse a training state whose content is not what was written.

    Raises:
        DataError: its digest is another one.
    """
    expected = digests_of(path)
    if not expected:
        return
    found = sha256_file(path)
    if found not in expected:
        raise DataError(
            "is not the training state that was written",
            where=str(path),
            found=found,
            expected=expected[-1],
            remedy=f"resume={path.parent.parent} goes on from the last state that is whole",
        )


def last_whole(run: RunDir) -> tuple[Path | None, list[str]]:
    """Return the last training state to go on from, and what to say of it and of later ones.

    Args:
        run: the run.

    Returns:
        The state of the highest step whose content is what was written; None where there is none.
        One without a recorded digest is taken, and said to be.
    """
    notes: list[str] = []
    for path in reversed(run.states()):
        expected = digests_of(path)
        if not expected:
            return path, [*notes, f"no digest of {path.name} was recorded, so it was not checked"]
        if sha256_file(path) in expected:
            return path, notes
        notes.append(f"{path.name} is damaged and was passed over: its digest is another one")
    return None, notes


def rename_after(run: RunDir, step: int) -> None:
    """Rename states of later steps than a run goes on from: what it writes now replaces them."""
    for path in run.states():
        if int(path.stem.removeprefix("step_")) > step:
            path.rename(path.with_name(f"{path.name}.damaged"))


def _read(directory: Path) -> dict[str, list[str]]:
    """Return the digests of a directory's states by name.

    Raises:
        DataError: it is not what `record_digest` writes.
    """
    path = directory / NAME
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _no_digests(path, str(error)) from error
    if not isinstance(found, dict) or not all(map(_are_digests, found.values())):
        raise _no_digests(path, type(found).__name__)
    return dict(found)


def _are_digests(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in value)
    )


def _no_digests(path: Path, found: str) -> DataError:
    return DataError(
        "holds no digests of training states",
        where=str(path),
        found=found,
        expected="a name and a list of SHA-256 for each",
        remedy=f"delete {path} to go on from a state that cannot be checked",
    )
