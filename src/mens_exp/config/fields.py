"""Meaning, range and default of a schema field, and the spelling of values in messages.

The metadata is the single place for these facts: validation reads the range, generated
documentation reads the rest.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

__all__ = ["Range", "range_of", "setting", "shown"]


@dataclass(frozen=True, slots=True)
class Range:
    """Accepted interval of a finite number."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def accepts(self, value: float) -> bool:
        """Tell whether ``value`` lies inside (NaN and infinity never do)."""
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        """Spell the bounds the way an error message shows them."""
        signs = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)


def setting(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declare one schema field.

    Args:
        default: the value when nothing else is said; lists and mappings are copied for each
            instance.
        doc: what the field decides, its unit, and where the default comes from.
        ge: smallest accepted number.
        gt: exclusive lower bound.
        le: largest accepted number.
        lt: exclusive upper bound.

    Returns:
        A dataclass field whose metadata carries ``doc`` and ``range``.
    """
    bounds = Range(ge=ge, gt=gt, le=le, lt=lt)
    metadata = {"doc": doc, "range": bounds if str(bounds) else None}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def range_of(field: dataclasses.Field[Any]) -> Range | None:
    """Return the accepted interval of a field declared with :func:`setting`, if it has one."""
    found = field.metadata.get("range")
    return found if isinstance(found, Range) else None


def shown(value: object) -> str:
    """Write a value as YAML has it, for a message."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"
