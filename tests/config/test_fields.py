from __future__ import annotations

import dataclasses

import pytest

from mens_exp.config.fields import Effect, Range, declared, range_of, setting, shown


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
    """`ge` and `le` include the bound, `gt` and `lt` leave it out."""
    assert all(bounds.accepts(value) for value in inside)
    assert not any(bounds.accepts(value) for value in outside)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_range_refuses_what_is_not_finite(value):
    """Not even where no bound is on that side."""
    assert not Range().accepts(value)


def test_range_is_written_as_a_message_shows_it():
    """Both bounds, in the order lower, upper."""
    assert str(Range(ge=0, lt=1)) == ">= 0 and < 1"


def test_setting_keeps_doc_and_range():
    """The metadata is where validation and documentation find them."""
    share, tags = dataclasses.fields(Example)
    assert declared(Example, "share").doc == "A share."
    assert range_of(share) == Range(ge=0, lt=1)
    assert range_of(tags) is None


@dataclasses.dataclass(kw_only=True, slots=True)
class Narrower(Example):
    share: float = setting(0.1, changes=Effect.NOTHING)


def test_what_a_class_does_not_state_anew_is_as_its_parent_declares_it():
    """Another default, or another fact, leaves the meaning and the range."""
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
    """What YAML calls it, not what Python does."""
    assert shown(value) == text
