from __future__ import annotations

import pytest

from mens_exp.evals.answer_quality import (
    is_canonical,
    is_strict,
    is_trivial,
    placeholder_hits,
    quality_of,
    richness,
)

GOOD = "def f(x):\n    y = x + 1\n    return y\n"


@pytest.mark.parametrize(
    ("completion", "strict"),
    [
        (GOOD, True),
        ("    def f(self):\n        return 1", True),  # a method, indented
        ("def f(:", True),  # broken, but code only
        ("# Adds one to a number, as asked.\ndef f(x: return x", True),
        ("fn f(x: i32) -> i32 {\n    x + 1\n}", True),
        (f"```python\n{GOOD}```", False),
        (f"Here is the function you asked for:\n{GOOD}", False),
        (f"{GOOD}\nThis function adds one to its argument.", False),
        ("", False),
        (" \n", False),
    ],
)
def test_an_answer_is_strict_that_is_code_only(completion, *, strict):
    """An answer is strict if it has no fence and no prose around the code."""
    assert is_strict(completion) is strict


@pytest.mark.parametrize(
    ("code", "canonical"),
    [
        (GOOD, True),
        ("class A:\n    def f(self):\n        if self:\n            return 1\n", True),
        ("def f(x):\n  return x\n", False),
        ("def f(x):\n\treturn x\n", False),
        ("def f(x): return x\n", False),
        ("x = 1; y = 2\n", False),
        ("x = 1 \n", False),
        ("\n", False),  # empty
        ("def f(:", False),
    ],
)
def test_canonical_code_is_laid_out_as_formatters_do(code, *, canonical):
    """The canonical layout has four spaces, one statement a line and no trailing whitespace."""
    assert is_canonical(code) is canonical


@pytest.mark.parametrize(
    ("code", "hits"),
    [
        (GOOD, 0),
        ("def f(x):\n    # TODO: write it\n    pass\n", 1),
        ("def f(x):\n    raise NotImplementedError\n", 1),
        ("def f(x):\n    # your code here\n    ...\n", 2),
        ("fn f() { todo!() }", 1),
        ("def todo_list(items):\n    return [t for t in items]\n", 0),
        ("x = values[..., 0]\n", 0),  # an ellipsis used as a value
    ],
)
def test_what_is_left_to_write_is_counted(code, hits):
    """Markers such as TODO and a body of `...` count as unfinished code."""
    assert placeholder_hits(code) == hits


@pytest.mark.parametrize(
    ("code", "trivial"),
    [
        (GOOD, False),
        ("def f(x):\n    return 0\n", False),
        ("def f(x):\n    pass\n", True),
        ('def f(x):\n    """Add one."""\n    ...\n', True),
        ("import math\n\ndef f(x):\n    return None\n", True),
        ("class A:\n    def f(self):\n        raise NotImplementedError('later')\n", True),
        ("", True),
        ("def f(:", False),  # cannot be judged
    ],
)
def test_a_stub_is_trivial(code, *, trivial):
    """A function whose body does nothing is trivial."""
    assert is_trivial(code) is trivial


def test_an_answer_that_repeats_itself_is_read_to_its_end():
    """A sum of a thousand terms is nested deeper than `ast.unparse` can print."""
    code = f"def f(a):\n    raise ValueError({' + '.join(['a'] * 1000)})\n"
    assert not quality_of(code, code).trivial
    assert is_trivial("def f():\n    raise builtins.NotImplementedError('later')\n")


def test_richness_counts_statements_that_do_something():
    """Richness is the number of effective statements over five, capped at 1."""
    assert richness(GOOD) == 0.4
    assert richness("def f(): pass") == 0.0
    assert richness("x = 1\n" * 9) == 1.0
    assert richness("fn f() -> i32 {\n    // one\n    1\n}\n", is_python=False) == 0.4


def test_anti_stub_is_neither_trivial_nor_marked():
    """An answer passes if it is not trivial and has no marker; one marker fails it."""
    assert quality_of(GOOD, GOOD).anti_stub
    assert not quality_of("def f(): pass", "def f(): pass").anti_stub
    marked = GOOD + "# FIXME: negative numbers\n"
    assert not quality_of(marked, marked).anti_stub


def test_layout_of_other_languages_is_not_judged():
    """Only Python's layout is judged; other languages are judged by keywords."""
    quality = quality_of("fn f() {}", "fn f() {}", is_python=False)
    assert quality.canonical is None
    assert not quality.trivial
