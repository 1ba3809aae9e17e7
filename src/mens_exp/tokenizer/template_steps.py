"""Steps, the measure of what a chat template does, for operations and for Jinja's filters.

Every run of a loop or macro, every part of a value that is compared or written out, and every
piece of text that is made costs steps. What an operation would make is counted before it is made.
The count is the same on every machine.

Each function for a filter has the parameters of that filter after the steps that the arguments
took, and returns characters. Filters are described at
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
_FOR_EACH_PART: Final = 300  # further steps for each part of a long conversation
_MOST_BITS: Final = 4096  # of a whole number
SHIFT: Final = 3  # eight characters of text that is made are a step
COPY_SHIFT: Final = 4  # sixteen entries of a list that is copied
READ_SHIFT: Final = 10  # of text that is only compared, 1,024
PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_HELD: Final = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_AT_ONCE: Final = 1_000  # steps of a long value
_NUMBER: Final = re.compile(r"\d+")


class TooMuch(TemplateError):  # noqa: N818  # what the template does
    """A template does more than a conversation needs."""


class _Spent(threading.local):
    left: int = 0
    given: Any = None


_spent = _Spent()


def allow(given: Any) -> None:
    """Begin a count for one rendering of what is given."""
    _spent.left, _spent.given = MOST_STEPS, given


def spend(steps: int) -> None:
    """Count steps that are about to be done.

    Raises:
        TemplateError: they are more than are left.
    """
    left = _spent.left - steps
    _spent.left = left
    if left < 0:
        _exhausted()


def _exhausted() -> None:
    """Add what a long conversation needs, once; it is only counted where it matters."""
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
    """Yield a value and all that it holds, as often as it would be written out."""
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
    """Count the parts of a value and its text, and return how many steps that took."""
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
    """Return a value whose comparison or hash was counted."""
    kind = type(value)
    if kind is str:
        if len(value) > 1 << READ_SHIFT:
            spend(len(value) >> READ_SHIFT)
    elif kind not in PLAIN:
        weigh(value, READ_SHIFT)
    return value


def sought(value: Any) -> Any:
    """Return a value in which a constant is sought, once that was counted."""
    if type(value) is not dict and hasattr(value, "__len__"):
        spend(len(value) >> (READ_SHIFT if isinstance(value, str) else 2))
        return value
    return value if type(value) is dict else compared(value)


def shown(value: Any) -> Any:
    """Return a value that becomes text, once its parts were counted."""
    if type(value) not in PLAIN:
        weigh(value)
    return value


def made(value: Any) -> Any:
    """Return a value that becomes another text, once its text was counted too."""
    weigh(value)
    return value


def sliced(value: Any) -> Any:
    """Return a value of which a part is copied."""
    if hasattr(value, "__len__"):
        spend(1 + (len(value) >> (SHIFT if isinstance(value, str) else COPY_SHIFT)))
    return value


def pieces(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what is about to be joined to one text."""
    for one in values:
        weigh(one)
    return values


def concat(pieces: Iterable[str]) -> str:
    """Join the output of a template or a block."""
    listed = list(pieces)
    spend(1 + (sum(map(len, listed)) >> SHIFT))
    return "".join(listed)


def counted(values: Iterable[Any]) -> Iterator[Any]:
    """Pass on what is iterated over."""
    for one in values:
        spend(1)
        yield one


def added(*operands: Any) -> Any:
    """Add from left to right; a chain of texts is joined at once."""
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
    """Return a number that is not too large to count with."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise TooMuch(f"the template makes a number of more than {_MOST_BITS} bits")
    return value


def times(left: Any, right: Any) -> Any:
    """Multiply numbers, or repeat a text or a list."""
    if isinstance(left, int) and not isinstance(right, int | float):
        left, right = right, left
    if isinstance(right, int) and hasattr(left, "__len__"):
        spend(1 + (len(left) * max(bounded(right), 0) >> SHIFT))
        return left * right
    return bounded(bounded(left) * bounded(right))


def power(left: Any, right: Any) -> Any:
    """Raise a number to a power that is not too large."""
    if isinstance(left, int) and isinstance(right, int) and right > 0:
        bits = max(bounded(left).bit_length(), 1) * bounded(right)
        if abs(left) > 1 and bits > _MOST_BITS:
            raise TooMuch(f"the template makes a number of more than {_MOST_BITS} bits")
    return left**right


def modulo(left: Any, right: Any) -> Any:
    """Format a text, or return what a division leaves."""
    if isinstance(left, str):
        count_format(left, right)
        return left % right
    return bounded(left) % bounded(right)


def count_format(text: str, values: Any) -> None:
    """Count what ``text % values`` can become; every number in the text is taken for a width."""
    weight = weigh(values)
    if isinstance(values, dict):  # each field may show all of it
        spend(weight * text.count("%"))
    listed = values if isinstance(values, tuple) else (values,)
    widths = sum(abs(one) for one in listed if isinstance(one, int)) if "*" in text else 0
    spend(len(text) + widths + numbers(text) >> SHIFT)


def numbers(text: str) -> int:
    """Return the sum of the numbers in a format."""
    return sum(int(digits[:12]) for digits in _NUMBER.findall(text))


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
