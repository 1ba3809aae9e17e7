"""Errors that a user can meet, and the nearest valid names that they suggest.

::

    MensError              1  a bug, or a subclass below
    ├── RequestError       2  what was asked for cannot be done as asked
    │   ├── ConfigError    2  an override or a value of the configuration
    │   │   └── NoEffectError 2  one that has no effect in this configuration
    │   ├── DataError      2  a data file or a row in it
    │   ├── ModelFileError 2  a base model's files
    │   └── Problems       2  several of the above, reported together
    │       └── Refusals   4  several refusals of a gate, reported together
    ├── SetupError         3  this machine lacks something
    │   └── MissingExtra   3  an optional package
    ├── TrainingError      1  training cannot go on (a loss that is not finite, say)
    └── GateError          4  a gate said no

The number is the process's exit code. A message says what is wrong, the value found,
what was expected and what to do next.
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
    usual_remedy: ClassVar[str | None] = None  # for errors that state none of their own

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
            expected: what is accepted, the nearest valid name included.
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
        """Keep the parts on the way from another process; by default only the message arrives."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class RequestError(MensError):
    """A request that cannot be met as stated."""

    exit_code = 2


class ConfigError(RequestError):
    """An override or a value of the configuration is wrong."""


class NoEffectError(ConfigError):
    """An override or a value that has no effect beside the rest of the configuration."""

    def __init__(self, words: str, *, where: str, **parts: Any) -> None:
        """Compose the message.

        Args:
            words: complete "has no effect", such as "with task=train".
            where: the dotted path of what has no effect.
            parts: the other parts of a message.
        """
        super().__init__(f"has no effect {words}", where=where, **parts)


class DataError(RequestError):
    """A data file or a row in it is wrong."""


class ModelFileError(RequestError):
    """A base model's files are missing, incomplete or contradictory."""

    usual_remedy = "restore the model's files, or download or create the model again"


class Problems(RequestError):  # noqa: N818  # it holds errors, and is none of them
    """Several problems of one command, reported together."""

    def __init__(self, problems: Sequence[MensError]) -> None:
        """Join the messages, one a line.

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
        """Raise nothing, the one problem, or all of them together."""
        if len(problems) == 1:
            raise problems[0]
        if problems:
            raise cls(problems)


class SetupError(MensError):
    """This machine lacks something the request needs."""

    exit_code = 3


class MissingExtra(SetupError):  # noqa: N818  # named for what is missing
    """An optional package is not installed."""


class TrainingError(MensError):
    """Training cannot go on."""


class GateError(MensError):
    """A gate said no."""

    exit_code = 4


class Refusals(Problems):
    """Several refusals of a gate, reported together."""

    exit_code = 4


_CUTOFF = 0.5  # below it difflib's suggestions stop looking like typing slips; unverified guess
_MOST_CHARS = 320  # of listed names: four lines of a terminal


def nearest(name: str, known: Iterable[str], *, cutoff: float = _CUTOFF) -> str | None:
    """Return the known name most like `name`, or None when none is alike.

    Args:
        name: the name that is not known.
        known: the names that are.
        cutoff: least likeness, from 0 to 1.
    """
    close = get_close_matches(name, list(known), n=3, cutoff=cutoff)
    swapped = [one for one in close if sorted(one) == sorted(name)]  # letters in another order
    return next(iter([*swapped, *close]), None)


def listed(names: Sequence[str]) -> str:
    """Say that one of some names is expected; of many, the first are named."""
    shown = list(names)
    while len(shown) > 1 and len(", ".join(shown)) > _MOST_CHARS:
        shown.pop()
    more = len(names) - len(shown)
    return f"one of {', '.join(shown)}{f' and {more} more' if more else ''}"


def expected_name(name: str, known: Iterable[str]) -> str:
    """Say what is accepted instead of `name`: the nearest known name, or all of them."""
    names = sorted(known)
    close = nearest(name, names)
    if close is not None:
        return f"a known name; the nearest is {close}"
    return listed(names) if names else "no name at all here"


def nearest_file(directory: Path, name: str, suffixes: tuple[str, ...]) -> str:
    """Say which file of `directory` is nearest to `name`, as a clause that ends a message.

    Args:
        directory: where the file was looked for.
        name: the name that is not there.
        suffixes: endings of the files that could have been meant; those are offered first.
    """
    if not directory.is_dir():
        return f"; the directory {directory} does not exist either"
    try:
        names = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
    except OSError:  # a directory that may not be listed has nothing to offer
        return ""
    likely = [other for other in names if other.endswith(suffixes)]
    near = nearest(name, likely) or nearest(name, names) or next(iter(likely), None)
    return f"; the nearest there is {near}" if near else f"; there is none in {directory}"
