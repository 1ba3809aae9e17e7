"""What a configuration that comes with somebody's run may name.

A stored config.yaml is read when a run goes on, is scored or is talked to; it may be another's. It
names classes, and a class that is named is called: so it may name ours, Lightning's and torch's,
each at its group's own place, and beyond these only what ``./conf`` of the working directory names
too, which is how the user vouches for it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mens_exp.config.own_conf import our_targets, own_targets, targets_in
from mens_exp.config.own_schema import CLASS_GROUPS
from mens_exp.errors import ConfigError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["refuse_foreign"]

_TRUSTED = ("mens_exp.", "lightning.", "torch.")
_GROUPS = "|".join(sorted(CLASS_GROUPS.keys() - {"callbacks"}))
_PLACE = re.compile(rf"(({_GROUPS})|callbacks\.\w+)\._target_")


def refuse_foreign(values: Any, file: Path) -> None:
    """Refuse a stored configuration that could run something nobody here has vouched for.

    Args:
        values: the configuration, as plain data, nothing of it resolved.
        file: where it was read from, for messages.

    Raises:
        ConfigError: it names such a class, or refers to the environment.
        Problems: several of these.
    """
    Problems.raise_if([*_targets(values, file), *_references(values, file)])


def _targets(values: Any, file: Path) -> Iterator[ConfigError]:
    vouched = own_targets() | our_targets()
    for place, target in targets_in(values):
        named = target if isinstance(target, str) else ""
        trusted = named.startswith(_TRUSTED)
        if named in vouched or (trusted and _PLACE.fullmatch(place)):
            continue
        yield ConfigError(
            "a stored configuration may not name this class",
            where=f"{file}: {place}",
            found=str(target),
            expected="a class of mens_exp, lightning or torch, at its group's own place"
            if trusted
            else "a class of mens_exp, lightning or torch",
            remedy="if you know and trust it, name the same _target_ in a file of ./conf",
        )


def _references(values: Any, file: Path, place: str = "") -> Iterator[ConfigError]:
    """Yield what would be looked up when read, such as a variable of the environment."""
    if isinstance(values, dict | list):
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in pairs:
            yield from _references(value, file, f"{place}.{key}" if place else str(key))
    elif isinstance(values, str) and "${" in values:
        yield ConfigError(
            "a stored configuration holds values, no references",
            where=f"{file}: {place}",
            found=values,
            expected="what the run wrote",
        )
