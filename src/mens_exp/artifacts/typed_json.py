"""Strict JSON: parsing without loopholes, and checking values against declared types."""

from __future__ import annotations

import json
import math
from collections import Counter
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from mens_exp.artifacts.nearest import expected_name
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["check", "check_keys", "is_enum", "parse_json", "wrong"]

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
    """Parse one JSON value, refusing repeated keys and numbers that are not finite.

    Raises:
        DataError: `data` is not such a value; `where` names the place.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_unrepeated, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise DataError("not JSON", where=where, found=str(error)) from error


def check(value: object, hint: Any, where: str) -> list[DataError]:
    """Return what keeps `value` from being of the declared type.

    Args:
        value: a parsed JSON value.
        hint: a scalar type, Any (any JSON), an Enum of strings, ``list[T]``,
            ``dict[str, T]``, a union of these, or a TypedDict.
        where: the file and the dotted place in it.
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _check_union(value, get_args(hint), where)
    if origin is list:
        return _check_items(value, get_args(hint)[0], where)
    if origin is dict:
        return _check_values(value, get_args(hint)[1], where)
    if is_typeddict(hint):
        return check_keys(value, get_type_hints(hint), hint.__required_keys__, where)
    return _check_json(value, where) if hint is Any else _check_one(value, hint, where)


def check_keys(
    value: object, declared: Mapping[str, Any], required: Iterable[str], where: str
) -> list[DataError]:
    """Return what keeps `value` from being an object of these keys.

    Args:
        value: a parsed JSON value.
        declared: the known keys and their types.
        required: those that must be there.
        where: the file and the dotted place in it.
    """
    if not isinstance(value, dict):
        return [wrong(value, "an object", where)]
    problems = []
    for name, item in value.items():
        if name in declared:
            problems += check(item, declared[name], _under(where, name))
        else:
            expected = expected_name(str(name), declared)
            place = _under(where, str(name))
            problems.append(DataError("unknown key", where=place, expected=expected))
    missing = sorted(set(required) - set(value))
    return problems + [DataError("missing key", where=_under(where, name)) for name in missing]


def _check_union(value: object, options: tuple[Any, ...], where: str) -> list[DataError]:
    attempts = [check(value, option, where) for option in options]
    if not all(attempts):
        return []
    solid = [problems for problems, o in zip(attempts, options, strict=True) if o is not NoneType]
    if len(solid) == 1:  # `T | None`: what is wrong with it as a T says most
        return solid[0]
    return [wrong(value, " or ".join(_NAMES.get(option, str(option)) for option in options), where)]


def _check_items(value: object, hint: Any, where: str) -> list[DataError]:
    if not isinstance(value, list | tuple):
        return [wrong(value, "a list", where)]
    return [p for i, item in enumerate(value) for p in check(item, hint, f"{where}[{i}]")]


def _check_one(value: object, hint: Any, where: str) -> list[DataError]:
    if not is_enum(hint):
        return [] if _is_scalar(value, hint) else [wrong(value, _NAMES[hint], where)]
    known = [str(member.value) for member in hint]
    return [] if value in known else [wrong(value, expected_name(str(value), known), where)]


def _check_values(value: object, hint: Any, where: str) -> list[DataError]:
    if not isinstance(value, dict):
        return [wrong(value, "an object", where)]
    problems = [wrong(key, "a string key", where) for key in value if not isinstance(key, str)]
    for key, item in value.items():
        problems += check(item, hint, _under(where, str(key)))
    return problems


def _check_json(value: object, where: str) -> list[DataError]:
    if isinstance(value, dict):
        return _check_values(value, Any, where)
    if isinstance(value, list | tuple):
        return _check_items(value, Any, where)
    if any(_is_scalar(value, scalar) for scalar in _SCALARS):
        return []
    return [wrong(value, "a JSON value (numbers finite)", where)]


def _is_scalar(value: object, hint: Any) -> bool:
    if isinstance(value, bool) and hint is not bool:  # Python counts True as an int, JSON does not
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, _SCALARS[hint])


def is_enum(hint: Any) -> bool:
    """Return whether a declared type is an Enum of strings."""
    return isinstance(hint, type) and issubclass(hint, Enum)


def _under(where: str, name: str) -> str:
    return f"{where}.{name}" if ": " in where else f"{where}: {name}"


def wrong(value: object, expected: str, where: str) -> DataError:
    """Return the error for a value that shows its type, and what was expected of it."""
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
