from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.corpus.generator.family import Draw
from mens_exp.corpus.generator.generate import FAMILIES
from mens_exp.corpus.generator.mutate import OPERATORS, all_mutants, mutants

LIMIT = """\
def limit(values, top):
    total = 0
    for value in values:
        if value < top and (value + 1) > 0:
            total += max(value, 2)
    return total"""


def of(operator, program):
    return [each.program for each in all_mutants(program) if each.operator == operator]


@pytest.mark.parametrize(
    ("operator", "program", "expected"),
    [
        ("boundary", "a < b", ["a <= b"]),
        ("boundary", "(a + b) >= (c)", ["(a + b) > (c)"]),
        ("comparison_flipped", "a not in b", ["a in b"]),
        ("comparison_flipped", "a is None", ["a is not None"]),
        ("logic_swapped", "(a) and (b)", ["(a) or (b)"]),
        ("wrong_operator", "(a + b) * c", ["(a + b) + c", "(a - b) * c"]),
        ("wrong_operator", "a //= 2", ["a %= 2"]),
        ("off_by_one", "f(3)", ["f(4)", "f(2)"]),
        ("off_by_one", "f(0)", ["f(1)"]),
        ("swapped_arguments", "f(a, (b, c))", ["f((b, c), a)"]),
        ("swapped_arguments", "f(a, a)", []),
        ("wrong_function", "min(a)", ["max(a)"]),
        ("wrong_function", "a.append(b)", ["a.extend(b)"]),
        ("missing_bracket", "f(g(1))", ["f(g(1)", "f(g(1)"]),
        ("dropped_statement", "a = 1", ["pass"]),
        ("negated_condition", "if a:\n    b", ["if not (a):\n    b"]),
        ("negated_condition", "[a for a in b if not a]", ["[a for a in b if a]"]),
        ("missing_colon", "if a:\n    b", ["if a\n    b"]),
        ("wrong_return", "def f():\n    return 1", ["def f():\n    return None"]),
        ("wrong_return", "f(True)", ["f(False)"]),
    ],
)
def test_operator_does_what_it_is_called(operator, program, expected):
    """Each operator makes one text edit and keeps the surrounding brackets and layout."""
    found = of(operator, program)
    assert sorted(set(found)) == sorted(set(expected))


def test_names_are_swapped_and_misspelled_where_they_are_read():
    """A name that is read becomes the next name, or loses a letter."""
    program = "def f(one, two):\n    return one"
    assert of("wrong_variable", program) == ["def f(one, two):\n    return two"]
    assert of("misspelled_name", program) == ["def f(one, two):\n    return ones"]
    long = "def f(total):\n    return total"
    assert of("misspelled_name", long) == ["def f(total):\n    return tota"]


def test_every_operator_is_used_by_the_families():
    """Every operator is used by some family, and every used one is listed."""
    drafts = [family.draft(Draw(f"{family.name}/{n}")) for family in FAMILIES for n in (0, 1)]
    found = {each.operator for draft in drafts for each in all_mutants(draft.solution)}
    assert found == set(OPERATORS)


def test_nothing_inside_an_f_string_is_touched():
    """Python 3.11 reports wrong positions inside f-strings."""
    for mutant in all_mutants('b = [1, f"{a + 1}"]'):
        assert 'f"{a + 1}"' in mutant.program or mutant.operator == "dropped_statement"


def test_mutants_differ_from_the_program_by_one_edit():
    """Text before and after the edit is unchanged."""
    for mutant in all_mutants(LIMIT):
        assert mutant.program != LIMIT
        same = 0
        while same < len(LIMIT) and mutant.program[same : same + 1] == LIMIT[same]:
            same += 1
        rest = 0
        while rest < len(LIMIT) - same and mutant.program[-1 - rest] == LIMIT[-1 - rest]:
            rest += 1
        lines = LIMIT[same : len(LIMIT) - rest].count("\n")
        assert lines <= (1 if mutant.operator == "dropped_statement" else 0)


def test_only_two_operators_break_the_syntax():
    """Every other mutant parses."""
    for mutant in all_mutants(LIMIT):
        if mutant.operator in {"missing_colon", "missing_bracket"}:
            with pytest.raises(SyntaxError):
                ast.parse(mutant.program)
        else:
            ast.parse(mutant.program)


@given(st.text(max_size=9))
def test_order_is_the_draws_and_complete(seed):
    """Each mutant occurs once; operators take turns; the draw fixes the order."""
    found = list(mutants(LIMIT, Draw(seed)))
    assert found == list(mutants(LIMIT, Draw(seed)))
    key = [(each.operator, each.program) for each in found]
    assert sorted(key) == sorted((each.operator, each.program) for each in all_mutants(LIMIT))
    kinds = {operator for operator, _ in key}
    assert {operator for operator, _ in key[: len(kinds)]} == kinds
