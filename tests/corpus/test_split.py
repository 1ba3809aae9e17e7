from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.corpus.split import Side, assert_disjoint, group_of, side_of, split
from mens_exp.errors import ConfigError, DataError
from mens_exp.rows.schema import TrainingPair


def rows(groups):
    return [
        TrainingPair(prompt=f"p{number}", response="r", group=group)
        for number, group in enumerate(groups)
    ]


def groups_on(sides):
    return {side: {group_of(pair) for pair in pairs} for side, pairs in sides.items()}


names = st.lists(st.from_regex(r"[a-z]{1,6}\.py", fullmatch=True), max_size=40)
fractions = st.floats(0, 0.45)


@pytest.mark.parametrize(
    ("group", "share", "side"),
    [
        ("a.py", 0.10, Side.VAL),
        ("a.py", 0.05, Side.TRAIN),
        ("d.py", 0.20, Side.HELDOUT),
        ("d.py", 0.10, Side.TRAIN),
    ],
)
def test_side_is_read_off_the_hash(group, share, side):
    """SHA-256 of "a.py" begins f0de (0.941 of the range), that of "d.py" 3006 (0.188)."""
    assert side_of(group, share, share) is side


def test_wider_held_out_share_keeps_what_was_held_out():
    """Held-out groups stay held out when the share grows from 0.1 to 0.3."""
    names = [f"m{number}.py" for number in range(500)]
    small = {name for name in names if side_of(name, 0.1, 0.1) is Side.HELDOUT}
    large = {name for name in names if side_of(name, 0.1, 0.3) is Side.HELDOUT}
    assert small < large


def test_changing_the_held_out_share_moves_no_validation_group():
    """The two shares are taken from opposite ends of the range."""
    names = [f"m{number}.py" for number in range(500)]
    before = {name for name in names if side_of(name, 0.2, 0.1) is Side.VAL}
    after = {name for name in names if side_of(name, 0.2, 0.3) is Side.VAL}
    assert before == after


def test_shares_are_about_those_asked_for():
    """Of 10,000 groups at 0.1 each side has 1,000 within five standard deviations (30 each)."""
    sides = [side_of(f"m{number}.py", 0.1, 0.1) for number in range(10_000)]
    assert abs(sides.count(Side.VAL) - 1_000) < 150
    assert abs(sides.count(Side.HELDOUT) - 1_000) < 150


@given(names, fractions, fractions, st.randoms(use_true_random=False))
def test_split_is_a_function_of_the_groups_only(groups, val, heldout, random):
    """Shuffled rows with other texts are split the same way."""
    pairs = rows(groups)
    shuffled = [
        TrainingPair(prompt="other", response=pair.response, group=pair.group) for pair in pairs
    ]
    random.shuffle(shuffled)
    assert groups_on(split(pairs, val, heldout)) == groups_on(split(shuffled, val, heldout))


@given(names, fractions, fractions)
def test_split_loses_no_row_and_divides_no_group(groups, val, heldout):
    """The sides partition the rows, and each group is on one side."""
    pairs = rows(groups)
    sides = split(pairs, val, heldout)
    assert sorted(pair.prompt for side in sides.values() for pair in side) == sorted(
        pair.prompt for pair in pairs
    )
    assert_disjoint(sides)


@given(names, st.floats(0.001, 0.49), st.floats(0.001, 0.49))
def test_no_side_is_empty_with_three_groups(groups, val, heldout):
    """Three groups are enough for three sides."""
    sides = groups_on(split(rows([*groups, "one", "two", "three"]), val, heldout))
    assert all(sides.values())


@pytest.mark.parametrize(
    ("count", "filled"),
    [
        (0, set()),
        (1, {Side.TRAIN}),
        (2, {Side.TRAIN, Side.VAL}),
        (3, {Side.TRAIN, Side.VAL, Side.HELDOUT}),
    ],
)
def test_train_is_served_first_with_few_groups(count, filled):
    """The first group is for training, the second for validation, the third is held out."""
    sides = split(rows([f"m{number}.py" for number in range(count)]), 0.05, 0.05)
    assert {side for side, pairs in sides.items() if pairs} == filled


def test_two_groups_fill_the_two_sides_asked_for():
    """Without a validation share the second group is held out."""
    sides = split(rows(["a.py", "b.py"]), 0.0, 0.05)
    assert [len(sides[side]) for side in Side] == [1, 0, 1]


def test_side_without_a_share_stays_empty():
    """A fraction of zero gives an empty side."""
    sides = split(rows([f"m{number}.py" for number in range(100)]), 0.0, 0.0)
    assert [len(sides[side]) for side in Side] == [100, 0, 0]


def test_rows_keep_their_order_within_a_side():
    """Splitting does not shuffle."""
    sides = split(rows(["a.py", "b.py", "c.py"] * 5), 0.3, 0.3)
    for pairs in sides.values():
        numbers = [int(pair.prompt[1:]) for pair in pairs]
        assert numbers == sorted(numbers)


def test_row_without_group_goes_with_its_prompt():
    """Two answers to one prompt stay together; white space does not matter."""
    one = TrainingPair(prompt="Why  so?", response="a")
    two = TrainingPair(prompt="Why so? ", response="b")
    other = TrainingPair(prompt="Why not?", response="a")
    assert group_of(one) == group_of(two) != group_of(other)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0, float("nan"), float("inf")])
def test_share_outside_its_range_is_refused(fraction):
    """The message has the path of the setting."""
    with pytest.raises(ConfigError, match=r"data\.val_frac: not a share"):
        split(rows(["a.py"]), fraction, 0.0)
    with pytest.raises(ConfigError, match=r"data\.heldout_frac: not a share"):
        side_of("a.py", 0.0, fraction)


def test_shares_that_leave_nothing_to_train_on_are_refused():
    """Two shares of one half leave nothing."""
    with pytest.raises(ConfigError, match="no rows are left to train on"):
        split(rows(["a.py"]), 0.5, 0.5)


def test_group_on_two_sides_is_refused():
    """The message names the group and both sides."""
    sides = {Side.TRAIN: rows(["a.py", "b.py"]), Side.VAL: rows(["c.py"]), Side.HELDOUT: []}
    assert_disjoint(sides)
    sides[Side.HELDOUT] = rows(["b.py"])
    with pytest.raises(DataError, match=r"b\.py: .* found train and heldout"):
        assert_disjoint(sides)
