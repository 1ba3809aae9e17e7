"""Strict JSON records, read and written according to their declared types.

A record is a dataclass with `format` and `version`. Reading rejects a different format, a newer
version, unknown, missing or repeated keys, and values of the wrong type, and reports all problems
of a file together. Writing applies the same rules, so that every written record can be read.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from dataclasses import MISSING, Field, fields
from enum import Enum
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Protocol,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from mens_exp.artifacts.atomic import json_line, write_bytes, write_json
from mens_exp.errors import DataError, MensError, Problems, expected_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

_SCALARS: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    float: (float, int),
    int: (int,),
    str: (str,),
    NoneType: (NoneType,),
}
_NAMES = {dict: "an object", list: "a list", NoneType: "null", str: "a string", int: "an integer"}
_NAMES |= {float: "a finite number", bool: "true or false"}


def parse_json(data: bytes, where: str) -> Any:
    """Parse one JSON value, rejecting repeated keys and numbers that are not finite.

    Raises:
        DataError: `data` is not such a value; the message starts with `where`.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_unrepeated, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise DataError(
            "not JSON",
            where=where,
            found=str(error),
            remedy="restore the file, or create it again",
        ) from error


@functools.cache
def _hints(declared: Any) -> Mapping[str, Any]:
    """Return the types of a class's fields; cached, since Python recompiles the annotations."""
    return get_type_hints(declared)


def check_type(value: object, hint: Any, where: str) -> list[DataError]:
    """Return the errors that prevent `value` from being of the declared type.

    Args:
        value: a parsed JSON value.
        hint: a scalar type, Any (any JSON), an Enum of strings, ``list[T]``,
            ``dict[str, T]``, a union of these, or a TypedDict.
        where: the file and the dotted path in it.
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _check_union(value, get_args(hint), where)
    if origin is list:
        return _check_items(value, get_args(hint)[0], where)
    if origin is dict:
        return _check_values(value, get_args(hint)[1], where)
    if is_typeddict(hint):
        return check_keys(value, _hints(hint), hint.__required_keys__, where)
    return _check_json(value, where) if hint is Any else _check_one(value, hint, where)


def check_keys(
    value: object, declared: Mapping[str, Any], required: Iterable[str], where: str
) -> list[DataError]:
    """Return the errors that prevent `value` from being an object with these keys.

    Args:
        value: a parsed JSON value.
        declared: the known keys and their types.
        required: keys that must be present.
        where: the file and the dotted path in it.
    """
    if not isinstance(value, dict):
        return [wrong_value(value, "an object", where)]
    problems = []
    for name, item in value.items():
        if name in declared:
            problems += check_type(item, declared[name], _under(where, name))
        else:
            expected = expected_name(str(name), declared)
            place = _under(where, str(name))
            problems.append(DataError("unknown key", where=place, expected=expected))
    missing = sorted(set(required) - set(value))
    return problems + [DataError("missing key", where=_under(where, name)) for name in missing]


def _check_union(value: object, options: tuple[Any, ...], where: str) -> list[DataError]:
    attempts = [check_type(value, option, where) for option in options]
    if not all(attempts):
        return []
    solid = [problems for problems, o in zip(attempts, options, strict=True) if o is not NoneType]
    if len(solid) == 1:  # `T | None`: the errors as a T are the most informative
        return solid[0]
    return [
        wrong_value(
            value, " or ".join(_NAMES.get(option, str(option)) for option in options), where
        )
    ]


def _check_items(value: object, hint: Any, where: str) -> list[DataError]:
    if not isinstance(value, list | tuple):
        return [wrong_value(value, "a list", where)]
    return [p for i, item in enumerate(value) for p in check_type(item, hint, f"{where}[{i}]")]


def _check_one(value: object, hint: Any, where: str) -> list[DataError]:
    if not is_enum(hint):
        return [] if _is_scalar(value, hint) else [wrong_value(value, _NAMES[hint], where)]
    known = [str(member.value) for member in hint]
    return [] if value in known else [wrong_value(value, expected_name(str(value), known), where)]


def _check_values(value: object, hint: Any, where: str) -> list[DataError]:
    if not isinstance(value, dict):
        return [wrong_value(value, "an object", where)]
    problems = [
        wrong_value(key, "a string key", where) for key in value if not isinstance(key, str)
    ]
    for key, item in value.items():
        problems += check_type(item, hint, _under(where, str(key)))
    return problems


def _check_json(value: object, where: str) -> list[DataError]:
    if _is_json(value):  # nearly always, and quicker to see without the paths
        return []
    if isinstance(value, dict):
        return _check_values(value, Any, where)
    if isinstance(value, list | tuple):
        return _check_items(value, Any, where)
    return [wrong_value(value, "a JSON value (numbers finite)", where)]


def _is_json(value: object) -> bool:
    if value is None or isinstance(value, str | int):
        return True
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    return isinstance(value, list | tuple) and all(map(_is_json, value))


def _is_scalar(value: object, hint: Any) -> bool:
    if isinstance(value, bool) and hint is not bool:  # in Python True is an int, in JSON it is not
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, _SCALARS[hint])


def is_enum(hint: Any) -> bool:
    """Return whether a declared type is an Enum of strings."""
    return isinstance(hint, type) and issubclass(hint, Enum)


def _under(where: str, name: str) -> str:
    return f"{where}.{name}" if ": " in where else f"{where}: {name}"


def wrong_value(value: object, expected: str, where: str) -> DataError:
    """Return an error that shows a value, its type, and what was expected."""
    found = f"{value!r} ({type(value).__name__})"
    return DataError("wrong value", where=where, found=found, expected=expected)


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} twice in one object")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"the number {name}, which is not finite")


class Record(Protocol):
    """Interface of a record class, as required by the reader and the writer."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    format: str
    version: int

    def problems(self, where: str) -> list[DataError]:
        """Return the problems beyond the types, each with its path under `where`."""
        ...


R = TypeVar("R", bound=Record)


class StoredRecord:
    """Base class of records that write and read their own file."""

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
            DataError: the file is missing, has a different format or a newer version, or contains
                an unknown key or a wrong value.
            Problems: several of these.
        """
        return read_record(cls, path)  # type: ignore[type-var]  # classes that mix it in are Records


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
        older_formats: further accepted `format` names for the same content; the returned record
            has the current name.
        further: lists inconsistencies of a well-typed record with other files.

    Raises:
        DataError: the file is missing, is not JSON, or violates one rule.
        Problems: it violates several.
    """
    value = parse_json(read_bytes(path), str(path))
    _check_identity(cls, value, str(path), older_formats)
    value = _migrated(cls, value)
    hints = _hints(cls)
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
        omit_null: fields that are omitted from the file if they are None.

    Raises:
        MensError: the record could not be read back; nothing is written.
    """
    hints = _hints(type(record))
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
    """Read a file with one JSON value per line.

    Args:
        path: the file.
        hint: the declared type of a line.
        torn_end: whether an incomplete last line is dropped instead of refused.
        migrate: converts a line of an older version to the current one and leaves others unchanged;
            it also receives the line's location.

    Raises:
        DataError: the file is missing, or a line violates a rule (``file:line``).
        Problems: the lines violate several rules.
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
            problems += check_type(values[-1], hint, where)
    Problems.raise_if(problems)
    return values


def cut_torn_end(path: Path) -> None:
    """Drop an incomplete last line, left by a writer that died, so that lines can be appended."""
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("rb+") as file:
            file.truncate(whole)


def write_lines(path: Path, values: Iterable[object], hint: Any) -> None:
    """Write a file with one JSON value per line, atomically.

    Raises:
        MensError: a value is not of the declared type; nothing is written.
    """
    lines = []
    for number, value in enumerate(values, start=1):
        found = check_type(value, hint, f"{path}:{number}")
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
        raise wrong_value(value, "an object", where)
    name, ours = cast("str", _default(cls, "format")), cast("int", _default(cls, "version"))
    if value.get("format") not in (name, *older):
        found = value.get("format", "no such key")
        raise DataError("not this format", where=f"{where}: format", found=found, expected=name)
    version = value.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise wrong_value(version, f"an integer from 1 to {ours}", f"{where}: version")
    if version > ours:
        raise DataError(
            "written by a newer version of this program",
            where=f"{where}: version",
            found=version,
            expected=f"at most {ours}",
            remedy="upgrade mens-exp to read it",
        )
    if version < ours and version not in _migrations(cls):
        raise wrong_value(version, f"{ours}; no reader for older versions", f"{where}: version")


def _migrations(cls: type[Record]) -> dict[int, Callable[[dict[str, Any]], dict[str, Any]]]:
    """Return the migrations from each version to the next, keyed by version."""
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
