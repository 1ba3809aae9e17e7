"""All families, and which side each belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mens_exp.corpus.generator.families import (
    arithmetic,
    bits,
    calendar_dates,
    classes,
    dicts,
    formatting,
    iterators,
    lists,
    matrices,
    parsing,
    recursion,
    sets,
    simulation,
    sorting,
    strings,
    validation,
)

if TYPE_CHECKING:
    from mens_exp.corpus.generator.family import Family
    from mens_exp.corpus.split import Side

__all__ = ["FAMILIES", "SIDES", "families_of"]

FAMILIES: Final[tuple[Family, ...]] = (
    *strings.FAMILIES,
    *formatting.FAMILIES,
    *lists.FAMILIES,
    *dicts.FAMILIES,
    *sets.FAMILIES,
    *arithmetic.FAMILIES,
    *bits.FAMILIES,
    *recursion.FAMILIES,
    *matrices.FAMILIES,
    *parsing.FAMILIES,
    *validation.FAMILIES,
    *calendar_dates.FAMILIES,
    *classes.FAMILIES,
    *simulation.FAMILIES,
    *iterators.FAMILIES,
    *sorting.FAMILIES,
)

SIDES: Final[dict[str, Side]] = {family.name: family.side for family in FAMILIES}


def families_of(side: Side) -> list[Family]:
    """Return the families of one side, in the order of the catalogue."""
    return [family for family in FAMILIES if family.side is side]
