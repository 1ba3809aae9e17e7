"""The nearest valid name, for the messages that refuse a wrong one."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["expected_name", "nearest", "nearest_file"]

_CUTOFF = 0.5  # below it difflib's suggestions stop looking like typing slips; unverified guess


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, or None when none is alike."""
    close = get_close_matches(name, list(known), n=1, cutoff=_CUTOFF)
    return close[0] if close else None


def expected_name(name: str, known: Iterable[str]) -> str:
    """Say what is accepted instead of `name`: the nearest known name, or all of them."""
    names = sorted(known)
    close = nearest(name, names)
    if close is not None:
        return f"a known name; the nearest is {close}"
    return f"one of {', '.join(names)}" if names else "no name at all here"


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
