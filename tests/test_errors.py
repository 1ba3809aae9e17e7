from __future__ import annotations

import inspect
import re

import pytest

from mens_exp import errors
from mens_exp.errors import ConfigError, DataError, MensError, MissingExtra, Problems

TREE_LINE = re.compile(r"^(?P<bars>[\s│├└─]*)(?P<name>[A-Z]\w+)\s+(?P<code>\d)  \S")


def classes():
    return {
        name: found
        for name, found in inspect.getmembers(errors, inspect.isclass)
        if issubclass(found, MensError)
    }


def drawn_tree():
    """Read name, exit code and parent of each line of the tree in the module's docstring."""
    tree = []
    path = []
    for line in (errors.__doc__ or "").splitlines():
        if match := TREE_LINE.match(line):
            depth = len(match["bars"]) // 4 - 1
            path = [*path[:depth], match["name"]]
            tree.append((match["name"], int(match["code"]), path[-2] if depth else None))
    return tree


def test_drawing_shows_every_error_with_its_exit_code_and_parent():
    """The tree in the docstring matches the classes."""
    drawn = {name: (code, parent) for name, code, parent in drawn_tree()}
    real = {
        name: (cls.exit_code, None if cls is MensError else cls.__bases__[0].__name__)
        for name, cls in classes().items()
    }
    assert drawn == real


def test_message_has_place_finding_expectation_and_remedy():
    """The four parts come in this order, in one line."""
    error = ConfigError(
        "out of range", where="lora.r", found=0, expected="a value >= 1", remedy="raise it"
    )
    assert str(error) == "lora.r: out of range · found 0 · expected a value >= 1 · Next: raise it"


def test_parts_that_are_not_given_leave_no_trace():
    """An error without details has a single clause."""
    assert str(MensError("it broke")) == "it broke"


@pytest.mark.parametrize(
    ("found", "text"), [("as it is", "as it is"), (["a"], "['a']"), (0, "0"), ("", "")]
)
def test_found_strings_stand_without_quotes(found, text):
    """Other values are shown as in Python; 0 and an empty string are shown too."""
    assert str(MensError("wrong", found=found)) == f"wrong · found {text}"


def test_no_problem_raises_nothing():
    """An empty list of problems is not an error."""
    Problems.raise_if([])


def test_one_problem_is_raised_as_itself():
    """A single problem keeps its type."""
    problem = DataError("bad row")
    with pytest.raises(DataError) as caught:
        Problems.raise_if([problem])
    assert caught.value is problem


def test_several_problems_are_raised_together():
    """Each has its own line, and the exit code is 2."""
    problems = [DataError("bad row"), MissingExtra("no wheel")]
    with pytest.raises(Problems) as caught:
        Problems.raise_if(problems)
    assert caught.value.problems == tuple(problems)
    assert str(caught.value) == "bad row\nno wheel"
    assert (caught.value.what, caught.value.exit_code) == ("2 problems", 2)
