from __future__ import annotations

import ast
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.corpus.generator.family import NOT_TOLD, Repair, Task, call, calls, code, literal

PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.text())
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.text(), inner),
        st.sets(st.integers()),
    ),
    max_leaves=8,
)
TASK = Task(
    family="double",
    theme="arithmetic",
    seed="0/double/0",
    entry_point="double",
    instruction="Write double.",
    prompt="Write double. Answer.",
    solution="def double(x):\n    return 2 * x",
    tests=("assert double(1) == 2",),
    difficulty=1,
)


@given(NESTED)
def test_literal_is_read_back_as_the_value(value):
    """Literals round-trip, the empty set included, which Python spells `set()`."""
    text = literal(value)
    if "set()" not in text:
        assert ast.literal_eval(text) == value
    assert eval(text) == value  # a literal written above


def test_sets_are_spelled_in_order():
    """The repr of a set of strings depends on the hash seed; the literal is sorted."""
    assert literal({"b", "a", "c"}) == "{'a', 'b', 'c'}"


def test_a_value_without_a_literal_is_refused():
    """Such a value's repr is not valid Python."""
    with pytest.raises(TypeError, match="no literal for a object"):
        literal([object()])


def test_code_is_dedented_and_filled_in():
    """Only dollar signs are special in templates; braces stay as they are."""
    text = """
        def $f(x):
            return {x: $k}
    """
    assert code(text, f="pair", k=3) == "def pair(x):\n    return {x: 3}"


def test_cases_of_calls_carry_what_the_oracle_says():
    """Without an oracle the expected value is left open."""
    assert call("f", [1], "a", want=2).expression == "f([1], 'a')"
    assert [case.want for case in calls("f", [(1, 2), (3, 4)], lambda a, b: a + b)] == [3, 7]
    assert calls("f", [(1,)])[0].want is NOT_TOLD


def test_a_task_becomes_a_row_of_bare_code():
    """The row's group is the family, its category the theme."""
    pair = TASK.pair
    assert (pair.prompt, pair.response) == (TASK.prompt, TASK.solution)
    assert (pair.group, pair.category, pair.system) == ("double", "arithmetic", None)


def test_identity_is_prompt_solution_and_tests():
    """Changing a label keeps the id; changing a test does not."""
    repair = Repair(operator="off_by_one", program="", failing_test="", error="")
    same = dataclasses.replace(TASK, difficulty=9, seed="1/double/0", repair=repair)
    assert same.id == TASK.id
    assert len(TASK.id) == 16
    for field in ("prompt", "solution"):
        assert dataclasses.replace(TASK, **{field: "other"}).id != TASK.id
    assert dataclasses.replace(TASK, tests=()).id != TASK.id
