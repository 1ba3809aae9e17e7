"""The nearest valid name, for the messages that refuse a wrong one."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["expected_name", "nearest"]

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
