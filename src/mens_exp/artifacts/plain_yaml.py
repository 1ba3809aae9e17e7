"""YAML from files, as plain data: what is small in the file and large in memory is refused.

Aliases let a kilobyte stand for billions of values, and what walks over the data would walk over
all of them. Deep nesting ends in Python's recursion limit. Both are counted before anything is
built.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from mens_exp.errors import DataError

__all__ = ["LOADER", "MOST_DEPTH", "MOST_NODES", "parse_yaml"]

MOST_NODES: Final = 100_000  # the largest configuration of a run has some 500
MOST_DEPTH: Final = 100
_OPEN: Final = 0  # the size of a collection whose end has not come
_MOST_DIGITS: Final = 4_300  # Python's own limit; numbers to base 60 take the square of it
_DIGITS: Final = re.compile(r"[-+0-9a-fA-FxXoO:_.]+")
# In C where PyYAML was built with libyaml: ten times as fast.
LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# PyYAML's own errors, and those of the constructors of dates, numbers and the like.
_FAILURES: Final = (
    *(yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(AssertionError, RecursionError),
)


def parse_yaml(data: str | bytes, where: str, loader: Any = LOADER) -> Any:
    """Parse one YAML document as ``yaml.safe_load`` does.

    Args:
        data: the text.
        where: the file, for messages.
        loader: a safe loader with tags of its own.

    Raises:
        DataError: it is not valid YAML, contains itself, or holds more than a configuration does.
    """
    try:
        _count(data, where, loader)
        return yaml.load(data, Loader=loader)  # noqa: S506  # one of the safe loaders
    except _FAILURES as error:
        raise DataError(
            "is not valid YAML",
            where=where,
            found=" ".join(str(error).split()) or type(error).__name__,
        ) from error


def _count(data: str | bytes, where: str, loader: Any) -> None:
    """Count the values that a text stands for, aliases at the size of what they repeat."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []  # anchors of collections, and the count before
    count = 0
    for event in yaml.parse(data, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            count += _repeated(event, sizes, where)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            _check_number(event, where)
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = _OPEN
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor or ""] = count - before
        if count > MOST_NODES:
            raise _too_much(where, f"more than {MOST_NODES:,} values, aliases written out")
        if len(open_nodes) > MOST_DEPTH:
            raise _too_much(where, f"nested more than {MOST_DEPTH} deep")


def _repeated(event: yaml.AliasEvent, sizes: dict[str, int], where: str) -> int:
    """Return the size of what an alias repeats."""
    size = sizes.get(event.anchor or "", 1)
    if size == _OPEN:
        raise DataError("a value contains itself", where=where, found=f"*{event.anchor}")
    return size


def _check_number(event: yaml.ScalarEvent, where: str) -> None:
    if event.implicit[0] and len(event.value) > _MOST_DIGITS and _DIGITS.fullmatch(event.value):
        raise _too_much(where, f"a number of {len(event.value):,} digits")


def _too_much(where: str, found: str) -> DataError:
    return DataError(
        "the YAML holds more than a configuration does",
        where=where,
        found=found,
        expected=f"at most {MOST_NODES:,} values, nested at most {MOST_DEPTH} deep",
    )
