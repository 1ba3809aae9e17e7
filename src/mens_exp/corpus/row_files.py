"""Rows from the configured files, and rows stored in the cache.

The first line of a cache file holds the hash of everything after it, so that a damaged file is
never accepted as complete.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic, digest
from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.data import HubData, JsonlData, OnBadRow
from mens_exp.corpus import hub_rows
from mens_exp.corpus.split import group_of
from mens_exp.errors import DataError, MensError, Problems, RequestError, SetupError
from mens_exp.rows.decode import has_lines
from mens_exp.rows.files import COMPRESSED, resolve_files
from mens_exp.rows.parse import parse_row
from mens_exp.rows.readers import FileOfRows, Reading, read_located, read_rows, rows_digest
from mens_exp.rows.schema import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mens_exp.config.data import RowsData
    from mens_exp.corpus.split import Side
    from mens_exp.rows.readers import BadRow
    from mens_exp.rows.schema import TrainingPair

MOST_LEAKS = 5  # reported in full; the rest is counted
# Bytes of text from which rows stay on disk; in memory they take about four times as much.
_LARGE = 64 * 2**20
_TEXT_OF_COMPRESSED = 4  # bytes of text per compressed byte; unverified guess


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsFile:
    """The record of one file of rows, dataset split, or user class.

    ``sha256`` hashes the content of a file, or the rows of a user class; ``revision`` is the commit
    of a split.
    """

    path: str
    role: str
    form: str
    rows: int
    ignored: dict[str, int]
    sha256: str | None = None
    revision: str | None = None


def records(files: Sequence[RowsFile]) -> dict[str, Any]:
    """Return files by path, for a manifest or a plan; include ignored columns only if any."""
    found = {}
    for file in files:
        record = {name: one for name, one in dataclasses.asdict(file).items() if one is not None}
        if not file.ignored:
            del record["ignored"]
        found[record.pop("path")] = record
    return found


def read_own(config: RowsData) -> tuple[list[FileOfRows], list[FileOfRows] | None]:
    """Read the user's rows, and the validation rows if they are configured separately.

    Raises:
        MensError: a file or a split is not available.
        DataError: a file or a row in it is invalid.
        Problems: several are.
    """
    if isinstance(config, HubData):
        return _read_splits(config)
    assert isinstance(config, JsonlData), "the only other one"
    own, apart = _read_files(config)
    return own, None if config.val_path is None else apart


def _read_splits(config: HubData) -> tuple[list[FileOfRows], list[FileOfRows] | None]:
    dataset = hub_rows.opened(config)
    problems: list[MensError] = []
    sides: list[list[FileOfRows]] = []
    for setting, split in (("data.split", config.split), ("data.val_split", config.val_split)):
        sides.append([])
        if split is None:
            continue
        try:
            rows = dataset.rows(split, setting)
            sides[-1].append(read_located(dataset.name(split), rows, how(config, setting)))
        except RequestError as error:
            problems += getattr(error, "problems", [error])
    Problems.raise_if(problems)
    return sides[0], None if config.val_split is None else sides[1]


def read_apart(config: RowsData) -> list[FileOfRows] | None:
    """Read only the validation rows, if they are configured separately.

    Raises:
        MensError: as `read_own`.
    """
    if isinstance(config, HubData):
        if config.val_split is None:
            return None
        rows = hub_rows.streamed_rows(config, config.val_split, "data.val_split")
        name = hub_rows.name(config, config.val_split)
        return [read_located(name, rows, how(config, "data.val_split"))]
    assert isinstance(config, JsonlData), "the only other one"
    if config.val_path is None:
        return None
    problems: list[MensError] = []
    found = read_each(config.val_path, how(config, "data.val_path"), read_rows, problems)
    Problems.raise_if(problems)
    return found


def is_large(config: JsonlData) -> bool:
    """Return whether the rows are in line-based files that together are too large for memory."""
    text = 0
    for setting, names in (("data.path", config.path), ("data.val_path", config.val_path)):
        try:
            for path in resolve_files(names or [], setting):
                size = path.stat().st_size
                text += size * (_TEXT_OF_COMPRESSED if path.suffix.lower() in COMPRESSED else 1)
                if not has_lines(path):
                    return False
        except (DataError, Problems, OSError):  # reported when they are read
            return False
    return text >= _LARGE


def bytes_of(config: RowsData) -> dict[str, Any]:
    """Return known sizes without reading rows: file sizes, or a Hub commit."""
    if isinstance(config, HubData):
        split = hub_rows.name(config, config.split)
        return {"split": split, "revision": hub_rows.pinned(config)}
    assert isinstance(config, JsonlData), "the only other one"
    paths = resolve_files(config.path, "data.path")
    return {"file_bytes": {str(path): path.stat().st_size for path in paths}}


def how(config: RowsData, setting: str) -> Reading:
    """Return the reading options for the files or splits of a setting."""
    return Reading(
        form=config.format,
        columns=config.columns.given,
        group_column=config.group_column,
        setting=setting,
        quarantine=config.on_bad_row is OnBadRow.quarantine,
    )


def _read_files(config: JsonlData) -> tuple[list[FileOfRows], list[FileOfRows]]:
    """Read the files of `data.path`, and those of `data.val_path`.

    Raises:
        DataError: a file or a row in it is invalid.
        Problems: several are, in any of the files.
    """
    problems: list[MensError] = []
    sides = []
    for setting, names in (("data.path", config.path), ("data.val_path", config.val_path)):
        reading = how(config, setting)
        sides.append([] if names is None else read_each(names, reading, read_rows, problems))
    Problems.raise_if(problems)
    return sides[0], sides[1]


def read_each(
    names: Any,
    reading: Reading,
    read: Callable[[Path, Reading], FileOfRows],
    problems: list[MensError],
) -> list[FileOfRows]:
    """Read the files of a setting; errors are appended to `problems`."""
    files = []
    try:
        paths = resolve_files(names, reading.setting)
    except (DataError, Problems) as error:
        problems += getattr(error, "problems", [error])
        return []
    for path in paths:
        try:
            files.append(read(path, reading))
        except (DataError, Problems) as error:
            problems += getattr(error, "problems", [error])
    return files


def pairs_of(files: Sequence[FileOfRows]) -> list[TrainingPair]:
    """Return the rows of all files, in file order."""
    return [pair for file in files for pair in file.pairs]


def described(config: RowsData, files: Sequence[FileOfRows], role: str) -> Iterator[RowsFile]:
    """Yield the record of each file or split.

    Args:
        config: the `data` group.
        files: the files as read.
        role: the role of their rows.
    """
    commit = hub_rows.pinned(config) if isinstance(config, HubData) else None
    for file in files:
        yield RowsFile(
            path=file.name,
            role=role,
            form=file.form.value,
            rows=len(file.pairs),
            ignored=file.ignored,
            sha256=sha256_file(Path(file.name)) if commit is None else None,
            revision=commit,
        )


def refuse_leakage(rows: Sequence[TrainingPair], val: Sequence[TrainingPair]) -> None:
    """Refuse validation rows that also occur among the other rows, or share a group with one.

    Args:
        rows: the training and held-out rows.
        val: the validation rows.

    Raises:
        DataError: a validation row occurs among the others or shares a group with one (for rows
            without a group, the prompt); both locations are named.
        Problems: several do.
    """
    known = {pair.id: pair for pair in reversed(rows)}
    groups = {group_of(pair): pair for pair in reversed(rows)}
    leaks = []
    for pair in val:
        same, near = known.get(pair.id), groups.get(group_of(pair))
        first = same or near
        if first is not None:
            leaks.append((pair, first))
    raise_leaks(leaks[:MOST_LEAKS], len(leaks))


def raise_leaks(first: Sequence[tuple[TrainingPair, TrainingPair]], count: int) -> None:
    """Refuse `count` validation rows, and name the first of them with their counterparts.

    Raises:
        DataError: there is one.
        Problems: there are several.
    """
    leaks: list[MensError] = [_leak(*pairs) for pairs in first]
    if count > len(leaks):
        leaks.append(DataError(f"{count - len(leaks)} more such rows", where="data"))
    Problems.raise_if(leaks)


def _leak(pair: TrainingPair, other: TrainingPair) -> DataError:
    shared = f"group {pair.group!r}" if pair.group else "prompt"
    return DataError(
        "a validation row is trained on"
        if pair.id == other.id
        else f"a validation row shares its {shared} with another row",
        where=pair.place,
        found=f"the same in {other.place}",
        expected="rows that share nothing with the others",
        remedy="take it out of one of the two",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The three sides of a split, the hash of all rows in order, and their origin.

    ``taken`` records how rows were selected: quarantine, filters, the draw of a mix. ``bad`` holds
    the quarantined rows. For streamed rows, the sides hold the first window. If rows stay on disk,
    ``sides_sha256`` holds the hashes of the sides, which saves reading them again.
    """

    source: str
    train: Sequence[TrainingPair]
    val: Sequence[TrainingPair]
    heldout: Sequence[TrainingPair]
    sha256: str
    files: tuple[RowsFile, ...] = ()
    taken: dict[str, Any] = field(default_factory=dict)
    bad: tuple[BadRow, ...] = ()
    streamed: bool = False
    sides_sha256: Mapping[Side, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return files and selection for a manifest or a plan; omit what does not apply."""
        return ({"files": records(self.files)} if self.files else {}) | self.taken

    def side_sha256(self, side: Side) -> str:
        """Hash the rows of one side."""
        return self.sides_sha256.get(side) or rows_digest(getattr(self, side.value))


def refuse_empty(side: Side, rows: int) -> DataError:
    """Return the error for a required side that is empty."""
    return DataError(
        f"no row is left for {side.value}",
        where="data",
        found=f"{rows} rows",
        expected="at least three groups, or a larger share",
        remedy="add rows, or give rows that may be parted different `group` values",
    )


def store_rows(path: Path, header: Mapping[str, Any], pairs: Sequence[TrainingPair]) -> None:
    """Write rows to the cache, all or nothing.

    Args:
        path: the file; its directory is created if it is missing.
        header: JSON values that describe the rows, including `format` and `version`.
        pairs: the rows.

    Raises:
        SetupError: the cache cannot be written.
    """
    rows = b"".join(digest.canonical_json(to_json(pair)) + b"\n" for pair in pairs)
    first = digest.canonical_json({**header, "rows_sha256": digest.sha256_bytes(rows)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(path, first + b"\n" + rows)
    except OSError as error:
        raise SetupError(
            f"the cache cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="name a cache directory that can be written",
        ) from error


def load_stored_rows(
    path: Path, content_sha256: str
) -> tuple[dict[str, Any], list[TrainingPair]] | None:
    """Read rows from the cache.

    Args:
        path: the file.
        content_sha256: the expected source hash in its header.

    Returns:
        The header and the rows; None if the file is missing, damaged or stale.
    """
    try:
        head, _, rows = path.read_bytes().partition(b"\n")
        header = json.loads(head)
        if header["content_sha256"] != content_sha256 or header[
            "rows_sha256"
        ] != digest.sha256_bytes(rows):
            return None
        return header, [parse_row(json.loads(line), str(path)) for line in rows.splitlines()]
    except (OSError, ValueError, KeyError, TypeError, DataError, Problems):
        return None
