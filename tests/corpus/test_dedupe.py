from __future__ import annotations

import ast
import warnings

import pytest

from mens_exp.corpus.split import response_key, without_duplicates
from mens_exp.rows.schema import TrainingPair


def pair(prompt, response):
    return TrainingPair(prompt=prompt, response=response)


def test_first_of_equal_responses_is_kept():
    """The order is that of the input, and dropped rows are counted."""
    rows = [pair("a", "x = 1"), pair("b", "x = 2"), pair("c", "x = 1"), pair("d", "x = 1")]
    assert without_duplicates(rows) == ([rows[0], rows[1]], 2)


def test_no_rows_have_no_duplicates():
    """Empty input gives empty output."""
    assert without_duplicates([]) == ([], 0)


def test_row_given_twice_is_counted():
    """A row is a duplicate even if it is the same object."""
    row = pair("a", "x = 1")
    assert without_duplicates([row, row]) == ([row], 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(a,b):\n  return a+b", "def f(a, b):\n    # adds\n    return (a + b)\n"),
        ("x = 'a'", 'x = "a"'),
        ("some  words, no code\n", "some words, no code"),
    ],
    ids=["layout and comments", "quotes", "white space of prose"],
)
def test_responses_that_say_the_same_are_equal(one, other):
    """Layout and comments do not matter."""
    assert response_key(one) == response_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(a):\n    return a", "def g(a):\n    return a"),
        ("x = 'a  b'", "x = 'a b'"),
        ("if a:\n    b()\nc()", "if a:\n    b()\n    c()"),
        ("some words, no code", "other words, no code"),
        ("# one comment", "# another comment"),
        ("0x10", "16"),
        ("1.0", "1.00"),
        ("ls -l # all", "ls -l"),
        ("Paris # not Lyon", "Paris"),
        ("x = '\ud800'", "x = '\ud801'"),
    ],
    ids=[
        *("name", "text in a string", "indentation", "words", "only comments"),
        *("hexadecimal", "decimals", "shell", "word", "no UTF-8"),
    ],
)
def test_responses_that_differ_are_not_equal(one, other):
    """Any difference in content counts, even spaces within a string."""
    assert response_key(one) != response_key(other)


def test_a_tree_too_deep_to_be_written_down_is_told_by_its_words():
    """A sum of 1,500 terms parses, but its tree exceeds the recursion limit, so words are used."""
    deep = "x = " + "+".join(["1"] * 1500)
    assert response_key(deep) == response_key(f"{deep}\n")
    assert response_key(deep) != response_key(f"{deep}+1")


def test_code_is_equal_where_its_dumped_trees_are():
    """The oracle is `ast.dump` over all pairs of statements that differ in one place."""
    lines = [
        *(
            "x = 1",
            "x = 1.0",
            "x = True",
            "x = '1'",
            "x = b'1'",
            "x = u'1'",
            "x = 0x1",
            "x = '\\0'",
        ),
        *(
            f"y = {one}"
            for one in (
                *("f(a, b)", "f(a, *b)", "f(a, b=b)", "f(a)(b)", "f([a, b])", "f((a, b))"),
                *("f(a, b,)", "lambda: None", "lambda: ...", "{**a}", "{None: a}"),
            )
        ),
        *("x: int", "x: int = 1", "(x): int"),
        *("global a, b", "global a; global b", "from . import a", "from .. import a", "import a"),
    ]
    for one in lines:
        for other in lines:
            same = ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
            assert (response_key(one) == response_key(other)) == same, (one, other)


def test_warnings_of_the_code_are_not_the_users():
    """An invalid escape in a response emits no warning and still counts as a difference."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert response_key("x = '\\d'") != response_key("x = '\\w'")
