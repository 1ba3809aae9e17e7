"""Declarations of settings: everything that is known about one stands where its field does.

Validation, the contract, comparisons and the generated documentation read the declarations, and
keep no table of settings.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = [
    "Declaration",
    "Effect",
    "Range",
    "declared",
    "range_of",
    "section",
    "setting",
    "shown",
]

_KEY = "declaration"  # in a field's metadata


class Effect(StrEnum):
    """Effect of a setting on what a run learns; those with one are in the contract's digest."""

    TRAINING = "training"
    NOTHING = "nothing"
    """It decides where, how fast, how often or under what name, or it permits or refuses a run."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """Facts about one setting, or about a section and every setting in it.

    Attributes:
        doc: what it decides, its unit, and where the default comes from.
        range: accepted interval of a number.
        changes: its effect on what is learned; None is that of the section around it.
        contract: parts of the fine-tune contract that are made of it, beside those of the
            section around it, such as ``exec.seq_len``.
    """

    doc: str = ""
    range: Range | None = None
    changes: Effect | None = None
    contract: tuple[str, ...] = ()


def setting(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    **facts: Any,
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
        facts: the other attributes of :class:`Declaration`.

    Returns:
        A dataclass field whose metadata carries its :class:`Declaration`.
    """
    bounds = Range(ge=ge, gt=gt, le=le, lt=lt)
    about = Declaration(doc=doc, range=bounds if str(bounds) else None, **facts)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={_KEY: about})
    return dataclasses.field(default=default, metadata={_KEY: about})


def section(kind: type, doc: str | None = None, **facts: Any) -> Any:
    """Declare a field that holds a section: settings of a class of their own.

    Args:
        kind: the class.
        doc: what the section is for; None is the docstring of the class.
        facts: the other attributes of :class:`Declaration`, which hold for every setting in the
            section that does not state its own.
    """
    about = Declaration(doc=doc or kind.__doc__ or "", **facts)
    return dataclasses.field(default_factory=kind, metadata={_KEY: about})


def declared(schema: type, name: str) -> Declaration:
    """Return the declaration of a field.

    A class may give an inherited field another default; what it does not state anew is as its
    parents declare it.
    """
    merged: dict[str, Any] = {}
    for parent in schema.__mro__:
        field = getattr(parent, "__dataclass_fields__", {}).get(name)
        about = _of(field) if field is not None else None
        for fact in dataclasses.fields(Declaration) if about else ():
            value = getattr(about, fact.name)
            if value != fact.default:
                merged.setdefault(fact.name, value)
    return Declaration(**merged)


def range_of(field: dataclasses.Field[Any]) -> Range | None:
    """Return the accepted interval of a field declared with :func:`setting`, if it has one."""
    about = _of(field)
    return about.range if about else None


def _of(field: dataclasses.Field[Any]) -> Declaration | None:
    found = field.metadata.get(_KEY)
    return found if isinstance(found, Declaration) else None


def shown(value: object) -> str:
    """Write a value as YAML has it, for a message."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"
