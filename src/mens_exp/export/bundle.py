"""format=bundle: one archive that holds a run, the same bytes for the same run.

The archive has one folder, named after the run; ``bundle.json`` in it lists every other file with
its SHA-256. Unpacked anywhere it is a run directory again, and is verified before it is read.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.typed_json import check, parse_json
from mens_exp.errors import DataError, Problems
from mens_exp.export.contents import changed_files, path_problems, run_files, secret_problems

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.errors import MensError

__all__ = ["pack", "packing_problems", "verify"]

_VERSION = 1


def packing_problems(
    run: RunDir, *, checkpoints: bool, allow_absolute_paths: bool
) -> list[MensError]:
    """List what keeps a run from being packed."""
    files = run_files(run, checkpoints=checkpoints).items()
    problems = [*changed_files(run), *secret_problems(files)]
    if not allow_absolute_paths:
        problems += path_problems(files)
    return problems


def pack(run: RunDir, archive: Path, *, checkpoints: bool) -> dict[str, str]:
    """Write the archive; it appears whole or not at all.

    Returns:
        Path relative to the run's folder -> SHA-256 of every packed file.
    """
    files = run_files(run, checkpoints=checkpoints)
    hashes = {name: sha256_file(path) for name, path in files.items()}
    listing = {
        "format": "mens_exp_bundle",
        "version": _VERSION,
        "run_id": run.path.resolve().name,
        "files": hashes,
    }
    folder = run.path.resolve().name
    buffer = io.BytesIO()
    # No time and no owner: two packings of one run are the same bytes.
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        _add(tar, f"{folder}/{run.bundle.name}", _json(listing))
        for name, path in files.items():
            _add(tar, f"{folder}/{name}", path.read_bytes())
    atomic.write_bytes(archive, buffer.getvalue())
    return hashes


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(content), 0o644, 0
    tar.addfile(entry, io.BytesIO(content))


def verify(run: RunDir) -> None:
    """Hold an unpacked bundle against its list; a directory that is none passes.

    Raises:
        DataError: a file is missing, or is not what was packed, or the list cannot be read.
        Problems: several of these.
    """
    if run.bundle.is_file():
        Problems.raise_if(list(_differences(run)))


def _differences(run: RunDir) -> Iterator[MensError]:
    listing = parse_json(run.bundle.read_bytes(), str(run.bundle))
    if not isinstance(listing, dict) or listing.get("format") != "mens_exp_bundle":
        yield DataError("is no list of a bundle", where=str(run.bundle))
        return
    if listing.get("version") != _VERSION:
        yield DataError(
            "is of another version",
            where=str(run.bundle),
            found=listing.get("version"),
            expected=str(_VERSION),
            remedy="read it with the mens_exp that wrote it, or a newer one",
        )
        return
    problems = check(listing.get("files"), dict[str, str], f"{run.bundle}: files")
    yield from problems
    for name, expected in () if problems else sorted(listing["files"].items()):
        relative = Path(name)
        if relative.is_absolute() or ".." in relative.parts:
            yield DataError("leads out of the bundle", where=str(run.bundle), found=name)
            continue
        path = run.path / relative
        found = _hash(path)
        if found != expected:
            yield DataError(
                "is not what was packed",
                where=str(path),
                found=found,
                expected=expected,
                remedy="unpack the bundle again",
            )


def _hash(path: Path) -> str:
    try:
        return sha256_file(path) if path.is_file() else "no such file"
    except ValueError:  # a zero byte in a name
        return "no such file"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return "no such file"
        raise
