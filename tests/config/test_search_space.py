from __future__ import annotations

import pytest

from mens_exp.config.override_parsing import read_space, written


def one(text):
    space = read_space([text])
    assert space.problems == ()
    (dimension,) = space.dimensions
    return dict(dimension)


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("lora.r=8,16,32", "choice", ["8", "16", "32"]),
        ("lora.r=choice(8,16)", "choice", ["8", "16"]),
        ("lora.r=choice(8,8)", "choice", ["8"]),
        ("lora.r=range(9,1,-4)", "choice", ["9", "5"]),
        ("backend=qlora,lora", "group", ["qlora", "lora"]),
    ],
)
def test_lists_are_choices(text, kind, values):
    """A group is a kind of its own, since other keys depend on its option."""
    found = one(text)
    assert (found["kind"], found["values"]) == (kind, values)


@pytest.mark.parametrize(
    ("text", "kind", "low", "high", "step", "log"),
    [
        ("optim.lr=interval(0.1,1)", "float", 0.1, 1.0, None, False),
        ("optim.lr=tag(log,interval(1e-5,1e-3))", "float", 1e-5, 1e-3, None, True),
        ("lora.r=int(interval(1,64))", "int", 1, 64, None, False),
        ("lora.r=tag(log,int(interval(1,64)))", "int", 1, 64, None, True),
        ("lora.r=range(4,13,4)", "int", 4, 12, 4, False),
        ("lora.r=range(1,4)", "int", 1, 3, 1, False),
        ("lora.dropout=range(0,0.3,0.1)", "float", 0.0, 0.2, 0.1, False),
    ],
)
def test_ranges_and_intervals_have_ends(  # one column each
    text, kind, low, high, step, log
):
    """A range excludes its end, as in Hydra; an interval includes both ends."""
    found = one(text)
    assert found["kind"] == kind
    assert (found["low"], found["high"], found["step"]) == (low, high, step)
    assert found["log"] is log


def test_what_is_not_drawn_is_fixed_and_groups_come_first():
    """Dimensions are ordered so that a group precedes the keys that depend on it."""
    space = read_space(["seed=1", "optim.lr=interval(0,1)", "lora.r=4,8", "backend=qlora,lora"])
    assert space.fixed == ("seed=1",)
    assert [each["key"] for each in space.dimensions] == ["backend", "lora.r", "optim.lr"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lora.r=tag(log,choice(8,16))", "choices have no logarithm"),
        ("optim.lr=tag(log,interval(0,1))", "only what is above 0 has a logarithm"),
        ("lora.r=tag(log,range(2,9,2))", "steps are not even in the logarithm"),
        ("optim.lr=tag(fast,interval(1,2))", "the tag fast means nothing here"),
        ("lora.r=shuffle(choice(8,16))", "a search draws in no order"),
        ("optim.lr=interval(1,1)", "an empty interval"),
        ("lora.r=[8", "not an override"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(text, said):
    """Refused before anything is composed."""
    (problem,) = read_space([text]).problems
    assert said in str(problem)


@pytest.mark.parametrize(
    ("text", "value", "override"),
    [
        ("optim.lr=interval(0.1,1)", 0.123456789, "optim.lr=0.123457"),
        ("optim.lr=interval(0.1,0.123456789)", 0.123456789, "optim.lr=0.123456789"),
        ("lora.dropout=range(0,0.4,0.1)", 0.1 + 0.2, "lora.dropout=0.3"),
        ("lora.r=int(interval(1,9))", 4, "lora.r=4"),
        ("+lora.rank_pattern.q=4,8", "8", "+lora.rank_pattern.q=8"),
    ],
)
def test_a_drawn_value_is_written_as_a_person_would(text, value, override):
    """Six digits, unless that is outside of the interval; multiples of a step are exact."""
    (dimension,) = read_space([text]).dimensions
    assert written(dimension, value) == override
