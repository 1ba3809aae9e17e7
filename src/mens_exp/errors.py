"""Errors reported to users, and suggestions of the nearest valid name.

::

    MensError              1  a bug, or a subclass below
    ├── RequestError       2  the request cannot be met as stated
    │   ├── ConfigError    2  an override or a value of the configuration
    │   │   └── NoEffectError 2  one that has no effect in this configuration
    │   ├── DataError      2  a data file or a row in it
    │   ├── ModelFileError 2  a base model's files
    │   └── Problems       2  several of the above, reported together
    │       └── Refusals   4  several refusals of a gate, reported together
    ├── SetupError         3  this machine lacks something
    │   └── MissingExtra   3  an optional package
    ├── TrainingError      1  training cannot continue (a loss that is not finite, for example)
    └── GateError          4  a gate refused

The number is the exit code. A message states what is wrong, the value found, the expected value
and what to do next.
"""

from __future__ import annotations

import copyreg
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


class MensError(Exception):
    """Root of the tree; carries the four parts of a message."""

    exit_code: ClassVar[int] = 1
    usual_remedy: ClassVar[str | None] = None  # for errors without an explicit remedy

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        found: object = None,
        expected: str | None = None,
        remedy: str | None = None,
    ) -> None:
        """Compose the message.

        Args:
            what: what is wrong, in one clause.
            where: the dotted config path, or ``file:line``.
            found: the offending value, shown with ``repr`` unless it is a string.
            expected: accepted values, including the nearest valid name.
            remedy: what to do next.
        """
        self.what = what
        self.where = where
        self.found = found
        self.expected = expected
        self.remedy = remedy = self.usual_remedy if remedy is None else remedy
        parts = [what if where is None else f"{where}: {what}"]
        if found is not None:
            parts.append(f"found {found if isinstance(found, str) else repr(found)}")
        if expected is not None:
            parts.append(f"expected {expected}")
        if remedy is not None:
            parts.append(f"Next: {remedy}")
        super().__init__(" · ".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all parts; an exception pickles only its message by default."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class RequestError(MensError):
    """A request that cannot be met as stated."""

    exit_code = 2


class ConfigError(RequestError):
    """An override or a value of the configuration is wrong."""


class NoEffectError(ConfigError):
    """An override or a value that has no effect, given the rest of the configuration."""

    def __init__(self, words: str, *, where: str, **parts: Any) -> None:
        """Compose the message.

        Args:
            words: complete "has no effect", such as "with task=train".
            where: the dotted path of the setting without effect.
            parts: the other parts of a message.
        """
        super().__init__(f"has no effect {words}", where=where, **parts)


class DataError(RequestError):
    """A data file or a row in it is wrong."""


class ModelFileError(RequestError):
    """A base model's files are missing, incomplete or contradictory."""

    usual_remedy = "restore the model's files, or download or create the model again"


class Problems(RequestError):  # noqa: N818  # a collection
    """Several problems of one command, reported together."""

    def __init__(self, problems: Sequence[MensError]) -> None:
        """Join the messages, one per line.

        Args:
            problems: at least one error.
        """
        assert problems, "Problems needs at least one problem"
        self.problems = tuple(problems)
        Exception.__init__(self, "\n".join(str(problem) for problem in problems))
        self.what = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        self.where = self.found = self.expected = self.remedy = None

    @classmethod
    def raise_if(cls, problems: Sequence[MensError]) -> None:
        """Raise a single problem as it is, and several as `Problems`; do nothing without any."""
        if len(problems) == 1:
            raise problems[0]
        if problems:
            raise cls(problems)


class SetupError(MensError):
    """This machine lacks something that the request needs."""

    exit_code = 3


class MissingExtra(SetupError):  # noqa: N818  # named for what is missing
    """An optional package is not installed."""


class TrainingError(MensError):
    """Training cannot continue."""


class GateError(MensError):
    """A gate refused."""

    exit_code = 4


class Refusals(Problems):
    """Several refusals of a gate, reported together."""

    exit_code = 4


_CUTOFF = 0.5  # below it, difflib's suggestions no longer look like typos; unverified guess
_MOST_CHARS = 320  # of listed names: four terminal lines


def nearest(name: str, known: Iterable[str], *, cutoff: float = _CUTOFF) -> str | None:
    """Return the known name most similar to `name`, or None if no name is similar.

    Args:
        name: the unknown name.
        known: the known names.
        cutoff: minimum similarity, from 0 to 1.
    """
    close = get_close_matches(name, list(known), n=3, cutoff=cutoff)
    swapped = [one for one in close if sorted(one) == sorted(name)]  # letters in another order
    return next(iter([*swapped, *close]), None)


def listed(names: Sequence[str]) -> str:
    """State that one of these names is expected; a long list is cut."""
    shown = list(names)
    while len(shown) > 1 and len(", ".join(shown)) > _MOST_CHARS:
        shown.pop()
    more = len(names) - len(shown)
    return f"one of {', '.join(shown)}{f' and {more} more' if more else ''}"


def expected_name(name: str, known: Iterable[str]) -> str:
    """State the accepted names: the one nearest to `name`, or all of them."""
    names = sorted(known)
    close = nearest(name, names)
    if close is not None:
        return f"a known name; the nearest is {close}"
    return listed(names) if names else "no name at all here"


def nearest_file(directory: Path, name: str, suffixes: tuple[str, ...]) -> str:
    """Name the file in `directory` nearest to `name`, as the last clause of a message.

    Args:
        directory: the directory that was searched.
        name: the missing file name.
        suffixes: suffixes of eligible files, which are suggested first.
    """
    if not directory.is_dir():
        return f"; the directory {directory} does not exist either"
    try:
        names = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
    except OSError:  # the directory is not readable
        return ""
    likely = [other for other in names if other.endswith(suffixes)]
    near = nearest(name, likely) or nearest(name, names) or next(iter(likely), None)
    return f"; the nearest there is {near}" if near else f"; there is none in {directory}"
