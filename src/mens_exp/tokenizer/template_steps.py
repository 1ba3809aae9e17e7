"""Steps: the measure of what a chat template does.

Every run of a loop or macro, every part of a value that is compared or written out, and every
piece of text that is made costs steps. What an operation would make is counted before it is made.
The count is the same on every machine.
"""

from __future__ import annotations

import re
import threading
from collections.abc import ItemsView, KeysView, ValuesView
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "MOST_STEPS",
    "PLAIN",
    "READ_SHIFT",
    "SHIFT",
    "TooMuch",
    "added",
    "allow",
    "bounded",
    "compared",
    "concat",
    "count_format",
    "counted",
    "made",
    "modulo",
    "numbers",
    "pieces",
    "power",
    "shown",
    "sliced",
    "sought",
    "spend",
    "times",
    "weigh",
]

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
