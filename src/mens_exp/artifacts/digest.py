"""SHA-256 digests of values and files, and of the outputs and checkpoints of a run.

A run's manifest records the digests of its outputs, and checkpoints/sha256.json those of its
training states; both are compared before a file is read. A digest is written before its state is
renamed into place, so a state without one is from an earlier version, not from a killed writer. A
state that is written again has two digests until the rename.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.atomic import json_line
from mens_exp.artifacts.manifest import Status
from mens_exp.artifacts.run_dir import TELEMETRY
from mens_exp.errors import DataError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from mens_exp.artifacts.run_dir import RunDir


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 of `data`, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, read in chunks.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(obj: object) -> bytes:
    """Return the canonical JSON of `obj`: sorted keys, no spaces, UTF-8, no final newline.

    Raises:
        MensError: a number in `obj` is not finite, or a value has no JSON form.
    """
    return json_line(obj, "canonical JSON").removesuffix(b"\n")


def digest(obj: object) -> str:
    """Return the SHA-256 of the canonical JSON of `obj`.

    Raises:
        MensError: as in `canonical_json`.
    """
    return sha256_bytes(canonical_json(obj))


def manifest_digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the values of a manifest that do not change once its run has ended.

    The notes are left out, as a report or an upload that fails adds one, and so is the hash of the
    telemetry, which contains this digest.

    Args:
        values: the JSON object.
    """
    kept = {name: value for name, value in values.items() if name != "notes"}
    outputs = {name: sha256 for name, sha256 in values["outputs"].items() if name != TELEMETRY}
    return digest(kept | {"outputs": outputs})


CERTIFICATE = "parity.json"  # in an output directory, or appended to an output file's name
_ADAPTER = {".jinja", ".json", ".safetensors"}
_CARD = ".md"  # a model card, which its owner may edit
_DEPTH = 3  # adapter/peft/adapter_model.safetensors is the deepest


def refuse_changed_outputs(*files: Path) -> dict[Path, str]:
    """Refuse files that differ from what a run, a merge or an export wrote.

    The hashes are those of the run's manifest and of the certificate next to an output. Files
    without a recorded hash are not checked, nor are those of a run that is still in progress.

    Args:
        files: files about to be read; a missing one is left to its reader.

    Returns:
        The hashes of the files that a record states, by absolute path.

    Raises:
        Problems: the hashes of files differ from the recorded ones.
    """
    hashes: dict[Path, str] = {}
    Problems.raise_if([error for file in files for error in _changed(file, hashes)])
    return hashes


def refuse_changed_model(directory: Path) -> dict[Path, str]:
    """Refuse a model directory if a file other than its card differs from what was written.

    Returns:
        The hashes of the files that a record states, by absolute path.

    Raises:
        Problems: the hashes of files differ from the recorded ones.
    """
    files = [file for file in sorted(directory.glob("*")) if file.suffix != _CARD]
    return refuse_changed_outputs(*files)


def refuse_changed_adapter(directory: Path) -> None:
    """Refuse the adapter of a run if its files, configuration or chat template were changed.

    Args:
        directory: the directory of the adapter, in a run or elsewhere.

    Raises:
        Problems: the hashes of files differ from the recorded ones.
    """
    files = [file for file in sorted(directory.glob("*")) if file.suffix in _ADAPTER]
    above = [
        parent / name
        for parent in directory.absolute().parents[:_DEPTH]
        for name in ("config.yaml", "chat_template.jinja")
    ]
    refuse_changed_outputs(*files, *above)


def _changed(file: Path, hashes: dict[Path, str]) -> Iterator[DataError]:
    if not file.is_file():
        return
    place = file.absolute()
    for record, expected in _records(place):
        if place not in hashes:
            hashes[place] = sha256_file(place)
        if hashes[place] != expected:
            on_purpose = f"; if you changed it on purpose, delete {record.name}"
            yield DataError(
                "has changed since its run wrote it",
                where=str(file),
                found=hashes[place],
                expected=f"{expected}, as {record} has it",
                remedy="restore the file, or create it again"
                + (on_purpose if record.name.endswith(CERTIFICATE) else ""),
            )
            return


def _records(place: Path) -> Iterator[tuple[Path, str]]:
    """Yield each record that states a hash of a file, and the hash."""
    beside = place.with_name(f"{place.name}.{CERTIFICATE}")
    if (expected := _certified(beside).get("")) is not None:
        yield beside, expected
    for directory in place.parents[:_DEPTH]:
        name = place.relative_to(directory).as_posix()
        for record, read in (("manifest.json", _outputs), (CERTIFICATE, _certified)):
            expected = None if name == record else read(directory / record).get(name)
            if expected is not None:
                yield directory / record, expected


def _outputs(record: Path) -> dict[str, Any]:
    """Return the hashes recorded by a run's manifest; empty while it is in progress."""
    try:
        manifest = json.loads(record.read_text("utf-8"))
        outputs = manifest["outputs"]
        is_at_work = manifest["status"] == Status.STARTED
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return outputs if isinstance(outputs, dict) and not is_at_work else {}


def _certified(record: Path) -> dict[str, Any]:
    """Return the hashes of a certificate's files, by relative path; empty if there is none.

    Raises:
        DataError: it cannot be read, so nothing can be compared with it.
    """
    try:
        certificate = json.loads(record.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            "cannot be read, so the files next to it cannot be checked",
            where=str(record),
            found=str(error),
            remedy="restore it, or delete it to use the files unchecked",
        ) from error
    files = certificate.get("files") if isinstance(certificate, dict) else None
    return files if isinstance(files, dict) else {}


CHECKPOINT_DIGESTS = "sha256.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def record_checkpoint_digest(path: Path, sha256: str) -> None:
    """Record the digest of a training state that is about to be written.

    Digests of deleted states are dropped.
    """
    place = path.parent
    kept = {
        name: some
        for name, some in _read_checkpoint_digests(place).items()
        if (place / name).exists()
    }
    before = kept.get(path.name, [])[-1:]
    atomic.write_json(place / CHECKPOINT_DIGESTS, {**kept, path.name: [*before, sha256]})


def checkpoint_digests(path: Path) -> list[str]:
    """Return the acceptable digests of a training state; empty if none was recorded."""
    return _read_checkpoint_digests(path.parent).get(path.name, [])


def refuse_damaged_checkpoint(path: Path) -> None:
    """Refuse a training state whose content differs from what was written.

    Raises:
        DataError: its digest does not match.
    """
    expected = checkpoint_digests(path)
    if not expected:
        return
    found = sha256_file(path)
    if found not in expected:
        raise DataError(
            "has changed since it was written",
            where=str(path),
            found=found,
            expected=expected[-1],
            remedy=f"resume={path.parent.parent} continues from the last intact state",
        )


def last_intact_checkpoint(run: RunDir) -> tuple[Path | None, list[str]]:
    """Return the last training state to resume from, and remarks on it and on later ones.

    Args:
        run: the run.

    Returns:
        The intact state with the highest step; None if there is none. One without a recorded
        digest is accepted, with a remark.
    """
    notes: list[str] = []
    for path in reversed(run.states()):
        expected = checkpoint_digests(path)
        if not expected:
            return path, [*notes, f"no digest of {path.name} was recorded, so it was not checked"]
        if sha256_file(path) in expected:
            return path, notes
        notes.append(f"{path.name} is damaged and was passed over: its digest is another one")
    return None, notes


def rename_later_checkpoints(run: RunDir, step: int) -> None:
    """Rename the states of later steps than `step` to ``*.damaged``; new ones will replace them."""
    for path in run.states():
        if int(path.stem.removeprefix("step_")) > step:
            path.rename(path.with_name(f"{path.name}.damaged"))


def _read_checkpoint_digests(directory: Path) -> dict[str, list[str]]:
    """Return the digests of a directory's states, keyed by name.

    Raises:
        DataError: the file is not in the form written by `record_checkpoint_digest`.
    """
    path = directory / CHECKPOINT_DIGESTS
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
        "contains no digests of training states",
        where=str(path),
        found=found,
        expected="a name and a list of SHA-256 for each",
        remedy=f"delete {path} to continue from a state that cannot be checked",
    )
