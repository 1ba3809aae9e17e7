from __future__ import annotations

import pytest

from mens_exp.layout.families import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_logical_names_are_one_to_one(name):
    """In a layer, modules and logical names correspond one to one."""
    projections = FAMILIES[name].projections
    assert len({one.logical for one in projections}) == len(projections)
    assert len({one.path for one in projections}) == len(projections)


@pytest.mark.parametrize("name", FAMILIES)
def test_groups_hold_projections_and_all_linear_holds_all(name):
    """Groups name only modules that the family has."""
    family = FAMILIES[name]
    logical = {one.logical for one in family.projections}
    assert set(family.groups["all_linear"]) == logical
    assert set(family.groups["attention"]) | set(family.groups["mlp"]) == logical
    assert all(set(members) <= logical for members in family.groups.values())
