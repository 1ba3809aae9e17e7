"""Strict reading and writing of JSON records, driven by the declared types.

A record is a dataclass with `format` and `version`. Reading refuses another format, a newer
version, an unknown or missing or repeated key and a value of the wrong type, all of one file
together. Writing applies the same rules, so that nothing is written that cannot be read.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, cast, get_type_hints

from mens_exp.artifacts.atomic import json_line, write_bytes, write_json
from mens_exp.artifacts.typed_json import check, check_keys, is_enum, parse_json, wrong
from mens_exp.errors import DataError, MensError, Problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = [
    "Record",
    "StoredRecord",
    "cut_torn_end",
    "read_bytes",
    "read_lines",
    "read_record",
    "write_lines",
    "write_record",
]


class Record(Protocol):
    """The reader's and writer's requirements on a record class."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    format: str
    version: int

    def problems(self, where: str) -> list[DataError]:
        """Return what is wrong beyond the types, each with its place under `where`."""
        ...


R = TypeVar("R", bound=Record)


class StoredRecord:
    """A record class that writes and reads its own file."""

    __slots__ = ()

    def write(self: Record, path: Path) -> None:
        """Write the record atomically.

        Raises:
            MensError: a field is of the wrong type or not finite; nothing is written.
        """
        write_record(self, path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record strictly.

        Raises:
            DataError: the file is missing, of another format or a newer version, or holds
                an unknown key or a wrong value.
            Problems: several of these.
        """
        return read_record(cls, path)  # type: ignore[type-var]  # what mixes it in is a Record


def read_record(
    cls: type[R],
    path: Path,
    *,
    older_formats: Iterable[str] = (),
    further: Callable[[R], list[DataError]] | None = None,
) -> R:
    """Read one record from a JSON file.

    Args:
        cls: the record's class.
        path: the file.
        older_formats: further `format` names of the same content; the record that is
            returned carries today's name.
        further: lists problems of a well-typed record with other files, reported with its own.

    Raises:
        DataError: the file is missing, is not JSON, or breaks one rule.
        Problems: it breaks several.
    """
    value = parse_json(read_bytes(path), str(path))
    _check_identity(cls, value, str(path), older_formats)
    value = _migrated(cls, value)
    hints = get_type_hints(cls)
    declared = {field.name: hints[field.name] for field in fields(cls)}
    Problems.raise_if(check_keys(value, declared, _required(cls), str(path)))
    current = {**value, "format": _default(cls, "format")}
    record = cls(**{name: _coerce(item, declared[name]) for name, item in current.items()})
    Problems.raise_if(record.problems(str(path)) + (further(record) if further else []))
    return record


def write_record(record: Record, path: Path, *, omit_null: Iterable[str] = ()) -> None:
    """Write one record as a JSON file, atomically.

    Args:
        record: the record.
        path: the target.
        omit_null: fields that are left out of the file when they are None.

    Raises:
        MensError: the record could not be read back; nothing is written.
    """
    hints = get_type_hints(type(record))
    value = {field.name: getattr(record, field.name) for field in fields(record)}
    declared = {name: hints[name] for name in value}
    found = check_keys(value, declared, set(value), str(path)) or record.problems(str(path))
    if found:
        raise MensError(
            "a record could not be read back, so it is not written",
            found="; ".join(str(problem) for problem in found),
        )
    left_out = {name for name in omit_null if value[name] is None}
    write_json(path, {name: item for name, item in value.items() if name not in left_out})


def read_lines(
    path: Path,
    hint: Any,
    *,
    torn_end: bool = False,
    migrate: Callable[[Any, str], Any] | None = None,
) -> list[Any]:
    """Read a file of one JSON value a line.

    Args:
        path: the file.
        hint: the declared type of a line.
        torn_end: whether a last line without its newline is dropped instead of refused.
        migrate: makes a line of an older version one of today's, and leaves others as they are;
            it is told the line's place too.

    Raises:
        DataError: the file is missing, or a line breaks a rule (``file:line``).
        Problems: lines break several.
    """
    *lines, rest = read_bytes(path).split(b"\n")
    if rest and not torn_end:
        lines.append(rest)
    values, problems = [], []
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            value = parse_json(line, where)
            values.append(migrate(value, where) if migrate else value)
        except DataError as error:
            problems.append(error)
        else:
            problems += check(values[-1], hint, where)
    Problems.raise_if(problems)
    return values


def cut_torn_end(path: Path) -> None:
    """Drop a last line without its newline, whose writer died; a line may then be added."""
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("rb+") as file:
            file.truncate(whole)


def write_lines(path: Path, values: Iterable[object], hint: Any) -> None:
    """Write a file of one JSON value a line, atomically.

    Raises:
        MensError: a value is not of the declared type; nothing is written.
    """
    lines = []
    for number, value in enumerate(values, start=1):
        found = check(value, hint, f"{path}:{number}")
        if found:
            raise MensError(str(found[0]))
        lines.append(json_line(value, f"{path}:{number}"))
    write_bytes(path, b"".join(lines))


def read_bytes(path: Path) -> bytes:
    """Return a file's content.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            "the file cannot be read", where=str(path), found=error.strerror or str(error)
        ) from error


def _check_identity(cls: type[Record], value: object, where: str, older: Iterable[str]) -> None:
    if not isinstance(value, dict):
        raise wrong(value, "an object", where)
    name, ours = cast("str", _default(cls, "format")), cast("int", _default(cls, "version"))
    if value.get("format") not in (name, *older):
        found = value.get("format", "no such key")
        raise DataError("not this format", where=f"{where}: format", found=found, expected=name)
    version = value.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise wrong(version, f"an integer from 1 to {ours}", f"{where}: version")
    if version > ours:
        raise DataError(
            "written by a newer version of this program",
            where=f"{where}: version",
            found=version,
            expected=f"at most {ours}",
            remedy="upgrade mens-exp to read it",
        )
    if version < ours and version not in _migrations(cls):
        raise wrong(version, f"{ours}; no reader for older versions", f"{where}: version")


def _migrations(cls: type[Record]) -> dict[int, Callable[[dict[str, Any]], dict[str, Any]]]:
    """Return what makes a record of a version one of the next, by version."""
    return getattr(cls, "MIGRATIONS", {})


def _migrated(cls: type[Record], value: dict[str, Any]) -> dict[str, Any]:
    for version in range(value["version"], cast("int", _default(cls, "version"))):
        value = {**_migrations(cls)[version](value), "version": version + 1}
    return value


def _default(cls: type[Record], name: str) -> object:
    return cls.__dataclass_fields__[name].default


def _required(cls: type[Record]) -> set[str]:
    bare = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    return bare | {"format", "version"}


def _coerce(value: Any, hint: Any) -> Any:
    return hint(value) if is_enum(hint) else value
