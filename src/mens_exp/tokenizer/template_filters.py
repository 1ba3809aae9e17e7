"""Output sizes of Jinja's filters, known before the filters run.

Each function has the parameters of its filter behind the steps that the arguments took, and returns
characters. Filters are described at https://jinja.palletsprojects.com/en/stable/templates/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CONSUMERS", "EXTRA", "SHALLOW", "UNGUARDED"]

_MOST_INDENT: Final = 100  # columns of JSON
_MOST_DIGITS: Final = 4_000
_SEARCHED_SHIFT: Final = 8  # regular expressions of Jinja's own take up to the square of a text

# They look at one thing, and make nothing.
UNGUARDED: Final = frozenset(
    {"attr", "count", "d", "default", "first", "last", "length", "safe", "abs", "float"}
)
# They pass over the parts of a list, and not over what these hold.
SHALLOW: Final = frozenset(
    {
        "batch",
        "items",
        "list",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
    }
)
# They take all of an iterator at once.
CONSUMERS: Final = frozenset(
    {
        *("batch", "dictsort", "groupby", "join", "list", "max", "min", "random", "reverse"),
        *("slice", "sort", "sum", "unique"),
    }
)


def _center(steps: int, value: object, width: int = 80) -> int:
    del steps, value
    return max(width, 0)


def _indent(
    steps: int, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> int:
    del steps, first, blank
    lines = str(s).count("\n") + 1
    return lines * (len(width) if isinstance(width, str) else max(width, 0))


def _wordwrap(
    steps: int,
    s: Any,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> int:
    del steps, break_long_words, break_on_hyphens
    text = str(s)
    lines = len(text) // max(width, 1) + text.count(" ") + text.count("-") + len(text.splitlines())
    # Words are taken from the front of a list: 30 characters' time for each of them.
    return len(text) * 30 + (lines + 1) * len(wrapstring or "\n")


def _replace(steps: int, s: Any, old: Any, new: Any, count: int | None = None) -> int:
    del steps
    found = str(s).count(str(old))
    return (found if count is None or count < 0 else min(found, count)) * len(str(new))


def _join(steps: int, value: Any, d: Any = "", attribute: object = None) -> int:
    del steps, attribute
    return len(value) * len(str(d)) if hasattr(value, "__len__") else 0


def _batch(steps: int, value: object, linecount: int, fill_with: object = None) -> int:
    del steps, value
    return 0 if fill_with is None else max(linecount, 0) * 4


def _slice(steps: int, value: object, slices: int, fill_with: object = None) -> int:
    del steps, value, fill_with
    return max(slices, 0) * 16


def _round(steps: int, value: object, precision: int = 0, method: str = "common") -> int:
    del steps, value, method
    if abs(precision) > _MOST_DIGITS:
        raise TemplateError(f"the template rounds to more than {_MOST_DIGITS:,} digits")
    return 0


def _int(steps: int, value: object, default: int = 0, base: int = 10) -> int:
    del steps, default, base
    if isinstance(value, str) and len(value) > _MOST_DIGITS:
        raise TemplateError(f"the template reads a number of more than {_MOST_DIGITS:,} digits")
    return 0


def _sum(steps: int, iterable: Any, attribute: object = None, start: Any = 0) -> int:
    del attribute
    if not hasattr(start, "__len__"):  # lists are added to each other, and copied each time
        return 0
    return (len(iterable) if hasattr(iterable, "__len__") else 1) * steps


def _to_json(
    steps: int,
    value: object,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> int:
    del value, sort_keys
    width = len(indent) if isinstance(indent, str) else max(indent or 0, 0)
    if width > _MOST_INDENT:
        raise TemplateError(f"the template indents JSON by more than {_MOST_INDENT} columns")
    between = sum(map(len, separators)) if separators else 0
    return steps * (width * 4 + between + (16 if ensure_ascii else 0))


def _pprint(steps: int, value: object) -> int:
    del value
    return steps * 400  # its parts are written out at each level


def _searched(steps: int, *given: object, **named: object) -> int:
    del given, named
    return steps * (steps >> _SEARCHED_SHIFT)


EXTRA: Final[dict[str, Callable[..., int]]] = {
    "batch": _batch,
    "center": _center,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "pprint": _pprint,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "striptags": _searched,
    "sum": _sum,
    "tojson": _to_json,
    "urlize": _searched,
    "wordwrap": _wordwrap,
}
