from __future__ import annotations

import dataclasses
from enum import Enum
from types import SimpleNamespace

import pytest

from mens_exp.config.fields import (
    Effect,
    Range,
    declared,
    range_of,
    setting,
    shown,
    unless,
    value_at,
    when,
)


@dataclasses.dataclass(kw_only=True, slots=True)
class Example:
    share: float = setting(0.5, "A share.", ge=0, lt=1)
    tags: list[str] = setting(["a"], "Tags.")  # `setting` returns a field  # noqa: RUF009


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (Range(ge=1), [1, 1.5, 10**9], [0, 0.999, -1]),
        (Range(gt=0), [1e-12], [0, -1]),
        (Range(le=1), [1, -5], [1.001]),
        (Range(lt=1), [0.999], [1]),
        (Range(ge=0, lt=1), [0, 0.5], [-0.1, 1]),
    ],
)
def test_range_accepts_its_interval_only(bounds, inside, outside):
    """`ge` and `le` include the bound; `gt` and `lt` exclude it."""
    assert all(bounds.accepts(value) for value in inside)
    assert not any(bounds.accepts(value) for value in outside)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_range_refuses_what_is_not_finite(value):
    """NaN and infinities are refused even by a range without bounds."""
    assert not Range().accepts(value)


def test_range_is_written_as_a_message_shows_it():
    """Both bounds, lower first."""
    assert str(Range(ge=0, lt=1)) == ">= 0 and < 1"


def test_setting_keeps_doc_and_range():
    """Validation and documentation read them from the field's metadata."""
    share, tags = dataclasses.fields(Example)
    assert declared(Example, "share").doc == "A share."
    assert range_of(share) == Range(ge=0, lt=1)
    assert range_of(tags) is None


@dataclasses.dataclass(kw_only=True, slots=True)
class Narrower(Example):
    share: float = setting(0.1, changes=Effect.NOTHING)


def test_what_a_class_does_not_state_anew_is_as_its_parent_declares_it():
    """A subclass that changes a default or a fact inherits documentation and range."""
    about = declared(Narrower, "share")
    assert (about.doc, str(about.range)) == ("A share.", ">= 0 and < 1")
    assert (about.changes, declared(Example, "share").changes) == (Effect.NOTHING, None)


def test_list_default_is_a_copy_for_each_instance():
    """Two configurations never share a list."""
    first, second = Example(), Example()
    first.tags.append("b")
    assert second.tags == ["a"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), (False, "false"), ("", "''"), (3, "3"), ("nf4", "nf4")]
)
def test_a_value_is_spelled_as_on_the_command_line(value, text):
    """Values are spelled as in YAML, not as in Python."""
    assert shown(value) == text


class Kind(Enum):
    left = "left"
    right = "right"


CONFIG = SimpleNamespace(
    side=SimpleNamespace(name=Kind.left, wide=False),
    parts={"one": SimpleNamespace(width=3)},
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("side.name", "left"),
        ("side.wide", False),
        ("parts.one.width", 3),
        ("parts.two.width", None),
        ("side.absent", None),
    ],
)
def test_a_value_is_found_by_its_path_as_yaml_has_it(key, value):
    """Enums are returned as text, mapping entries can be reached, and an absent value is null."""
    assert value_at(CONFIG, key) == value


@pytest.mark.parametrize(
    ("condition", "holds", "words", "needs"),
    [
        (when("side.name", "left"), True, "with side=left", "side=left"),
        (when("side.name", "right"), False, "with side=left", "side=right"),
        (when("side.wide", True, why="as it is"), False, "with side.wide=false, as it is", None),
        (when("side.absent", None), True, "with side.absent=null", "side.absent=null"),
        (when("parts.one.width", 1, 2, 3), True, None, "parts.one.width=1, 2 or 3"),
        (unless("side.name", "left"), False, "with side=left", "another side than left"),
        (unless("side.name", "right"), True, None, "another side than right"),
        (unless("side.absent", None, needs="a side"), False, None, "a side"),
    ],
)
def test_a_condition_says_whether_it_holds_and_what_it_needs(condition, holds, words, needs):
    """A key that ends in `name` is a group option, and is shown as one."""
    assert condition.holds(CONFIG) is holds
    assert words is None or condition.words(CONFIG) == words
    assert needs is None or condition.needs == needs


def test_one_condition_need_not_be_a_tuple():
    """The declaration stores a tuple either way."""
    one = when("side.name", "left")

    @dataclasses.dataclass
    class Conditional:
        alone: int = setting(1, only_if=one)
        both: int = setting(1, only_if=(one, one))
        free: int = setting(1)

    found = [declared(Conditional, name).only_if for name in ("alone", "both", "free")]
    assert found == [(one,), (one, one), ()]
