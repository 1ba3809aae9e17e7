"""Steps, the unit of work of a chat template, for operations and for Jinja's filters.

Every run of a loop or macro, every part of a value that is compared or written out, and every
created piece of text costs steps. The result of an operation is counted before it is created. The
count is the same on every machine.

The function for a filter has the parameters of that filter, preceded by the steps that the
arguments took, and returns characters. Filters are described at
https://jinja.palletsprojects.com/en/stable/templates/.
"""

from __future__ import annotations

import re
import threading
from collections.abc import ItemsView, KeysView, ValuesView
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MOST_STEPS: Final = 2_000_000  # about a second
_FOR_EACH_PART: Final = 300  # additional steps per part of a long conversation
_MOST_BITS: Final = 4096  # maximum size of an integer
SHIFT: Final = 3  # eight characters of created text are one step
COPY_SHIFT: Final = 4  # sixteen entries of a copied list
READ_SHIFT: Final = 10  # 1,024 characters of text that is only compared
PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_HELD: Final = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_AT_ONCE: Final = 1_000  # steps counted at a time in a long value
_NAIVE: Final = 2_500  # characters; in shorter texts, CPython's search takes quadratic time
_NUMBER: Final = re.compile(r"\d+")


class TooMuch(TemplateError):  # noqa: N818  # what the template does
    """Error: a template does more work than a conversation needs."""


class _Spent(threading.local):
    left: int = 0
    given: Any = None


_spent = _Spent()


def allow(given: Any) -> None:
    """Start a count for one rendering of the given input."""
    _spent.left, _spent.given = MOST_STEPS, given


def spend(steps: int) -> None:
    """Count steps before they are executed.

    Raises:
        TemplateError: fewer steps are left.
    """
    left = _spent.left - steps
    _spent.left = left
    if left < 0:
        _exhausted()


def _exhausted() -> None:
    """Add the steps that a long conversation needs, once and only when they are needed."""
    given, _spent.given = _spent.given, None
    if given is not None:
        parts = sum(1 + (len(one) >> 6 if isinstance(one, str) else 0) for one in _parts(given))
        _spent.left += _FOR_EACH_PART * parts
    if _spent.left < 0:
        raise TooMuch(
            "the template does too much: it takes more steps, or makes more text, than "
            f"{MOST_STEPS:,} and {_FOR_EACH_PART} for each part of the conversation"
        )


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value and all its parts, as often as they would be written out."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        yield one
        if isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, _HELD):
            waiting += one
        elif isinstance(one, Namespace):
            waiting.append(object.__getattribute__(one, "_Namespace__attrs"))


def weigh(value: Any, shift: int = SHIFT) -> int:
    """Count the parts of a value and its text, and return the number of steps."""
    whole = steps = 0
    for one in _parts(value):
        steps += 1
        if isinstance(one, str):
            steps += len(one) >> shift
        elif isinstance(one, range):
            steps += len(one)
        if steps > _AT_ONCE:
            spend(steps)
            whole, steps = whole + steps, 0
    spend(steps)
    return whole + steps


def compared(value: Any) -> Any:
    """Return a value after counting its comparison or hash."""
    kind = type(value)
    if kind is str:
        if len(value) > 1 << READ_SHIFT:
            spend(len(value) >> READ_SHIFT)
    elif kind not in PLAIN:
        weigh(value, READ_SHIFT)
    return value


def searched(text: str, sought: str, *, backwards: bool = False) -> None:
    """Count the comparisons of a search for a text, or for its characters, in another.

    CPython searches in linear time only forwards, and only in long texts.
    """
    places = len(text) if backwards or len(text) < _NAIVE else 1
    spend(len(sought) * places >> READ_SHIFT)


def within(one: Any, values: Any) -> bool:
    """Return ``one in values`` after counting the search."""
    if isinstance(one, str) and isinstance(values, str):
        compared(values)
        searched(values, one)
    elif type(one) in PLAIN and type(values) is not dict and hasattr(values, "__len__"):
        length = len(one) if isinstance(one, str) else 0
        spend(len(values) * (1 + (length >> READ_SHIFT)) >> 2)
    else:
        compared(one)
        if type(values) is not dict:
            compared(values)
    return one in values


def sought(value: Any) -> Any:
    """Return a value after counting the longest search in it, in a chain of comparisons."""
    if isinstance(value, str):
        spend(min(len(value), _NAIVE) ** 2 >> READ_SHIFT)
    return compared(value)


def shown(value: Any) -> Any:
    """Return a value after counting its conversion to text."""
    if type(value) not in PLAIN:
        weigh(value)
    return value


def made(value: Any) -> Any:
    """Return a value after counting the creation of another text from it."""
    weigh(value)
    return value


def sliced(value: Any) -> Any:
    """Return a value after counting the copy of a part of it."""
    if hasattr(value, "__len__"):
        spend(1 + (len(value) >> (SHIFT if isinstance(value, str) else COPY_SHIFT)))
    return value


def pieces(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return pieces after counting their concatenation."""
    for one in values:
        weigh(one)
    return values


def concat(pieces: Iterable[str]) -> str:
    """Concatenate the output of a template or a block."""
    listed = list(pieces)
    spend(1 + (sum(map(len, listed)) >> SHIFT))
    return "".join(listed)


def counted(values: Iterable[Any]) -> Iterator[Any]:
    """Count and yield the items of an iterable."""
    for one in values:
        spend(1)
        yield one


def added(*operands: Any) -> Any:
    """Add from left to right; a chain of strings is joined at once."""
    total = 0
    for one in operands:
        if type(one) is not str:
            break
        total += len(one)
    else:
        spend(1 + (total >> SHIFT))
        return "".join(operands)
    left = operands[0]
    for right in operands[1:]:
        if hasattr(left, "__len__") and hasattr(right, "__len__"):
            spend(1 + (len(left) + len(right) >> (SHIFT if isinstance(left, str) else COPY_SHIFT)))
        left = bounded(left) + bounded(right)
    return left


def bounded(value: Any) -> Any:
    """Return a number after checking that it is not too large."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise TooMuch(f"the template makes a number of more than {_MOST_BITS} bits")
    return value


def minus(left: Any, right: Any) -> Any:
    """Subtract numbers, or the keys of dicts."""
    return bounded(compared(left)) - bounded(compared(right))


def times(left: Any, right: Any) -> Any:
    """Multiply numbers, or repeat a text or a list."""
    if isinstance(left, int) and not isinstance(right, int | float):
        left, right = right, left
    if isinstance(right, int) and hasattr(left, "__len__"):
        spend(1 + (len(left) * max(bounded(right), 0) >> SHIFT))
        return left * right
    return bounded(bounded(left) * bounded(right))


def power(left: Any, right: Any) -> Any:
    """Raise a number to a power, after checking that the result is not too large."""
    if isinstance(left, int) and isinstance(right, int) and right > 0:
        bits = max(bounded(left).bit_length(), 1) * bounded(right)
        if abs(left) > 1 and bits > _MOST_BITS:
            raise TooMuch(f"the template makes a number of more than {_MOST_BITS} bits")
    return left**right


def modulo(left: Any, right: Any) -> Any:
    """Format a string, or return the remainder of a division."""
    if isinstance(left, str):
        count_format(left, right)
        return left % right
    return bounded(left) % bounded(right)


def count_format(text: str, values: Any) -> None:
    """Count the maximum result of ``text % values``; every number in the text counts as a width."""
    weight = weigh(values)
    if isinstance(values, dict):  # each field may show the whole dict
        spend(weight * text.count("%"))
    listed = values if isinstance(values, tuple) else (values,)
    widths = sum(abs(one) for one in listed if isinstance(one, int)) if "*" in text else 0
    spend(len(text) + widths + numbers(text) >> SHIFT)


def numbers(text: str) -> int:
    """Return the sum of the numbers in a format."""
    return sum(int(digits[:12]) for digits in _NUMBER.findall(text))


_MOST_INDENT: Final = 100  # columns of JSON
_MOST_DIGITS: Final = 4_000
_SEARCHED_SHIFT: Final = 8  # Jinja's regular expressions may take quadratic time

# Filters that inspect one value and create nothing.
UNGUARDED: Final = frozenset(
    {"count", "d", "default", "first", "last", "length", "safe", "abs", "float"}
)
# Filters that iterate over a list but not into its items.
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
# Filters that consume an iterator at once.
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
    # Words are removed from the front of a list, which costs the time of 30 characters each.
    return len(text) * 30 + (lines + 1) * len(wrapstring or "\n")


def _replace(steps: int, s: Any, old: Any, new: Any, count: int | None = None) -> int:
    del steps
    searched(str(s), str(old))
    found = str(s).count(str(old))
    return (found if count is None or count < 0 else min(found, count)) * len(str(new))


def _join(steps: int, value: Any, d: Any = "", attribute: object = None) -> int:
    del steps, attribute
    return len(value) * len(str(d)) if hasattr(value, "__len__") else 0


def _list(steps: int, value: Any) -> int:
    del steps
    return len(value) << SHIFT if isinstance(value, str) else 0  # each character is an object


def _trim(steps: int, value: Any, chars: Any = None) -> int:
    del steps
    if isinstance(chars, str):
        searched(str(value), chars, backwards=True)
    return 0


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
    if not hasattr(start, "__len__"):  # lists are concatenated, and copied each time
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
    return steps * 400  # parts are written out once per nesting level


def _searched(steps: int, *given: object, **named: object) -> int:
    del given, named
    return steps * (steps >> _SEARCHED_SHIFT)


EXTRA: Final[dict[str, Callable[..., int]]] = {
    "batch": _batch,
    "center": _center,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "list": _list,
    "pprint": _pprint,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "striptags": _searched,
    "sum": _sum,
    "tojson": _to_json,
    "trim": _trim,
    "urlize": _searched,
    "wordwrap": _wordwrap,
}
