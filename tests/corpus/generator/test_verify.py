from __future__ import annotations

import pytest

from mens_exp.corpus.generator.mutate import STEP_LIMIT, Suite, first_failure, results_of

DOUBLE = "def double(x):\n    return 2 * x"
SUITE = Suite(["assert double(2) == 4", "assert double(3) == 6"])


def test_right_program_passes():
    """The result is None if no test fails."""
    assert first_failure(DOUBLE, SUITE) is None


def test_first_failing_test_and_its_error_are_told():
    """2 + 2 is 4, so a sum in place of a product fails only the second test."""
    failure = first_failure("def double(x):\n    return 2 + x", SUITE)
    assert failure is not None
    assert (failure.test, failure.error) == ("assert double(3) == 6", "AssertionError")
    assert failure.ends


@pytest.mark.parametrize(
    ("program", "test", "error"),
    [
        ("def double(x):\n    return y", SUITE.tests[0], "NameError: name 'y' is not defined"),
        ("def double(x)\n    return x", "", "SyntaxError: expected ':'"),
        ("def other(x):\n    return x", SUITE.tests[0], "NameError: name 'double' is not defined"),
        ("1 / 0", "", "ZeroDivisionError: division by zero"),
    ],
)
def test_error_is_the_last_line_of_the_traceback(program, test, error):
    """If the program itself raises, no test is named."""
    failure = first_failure(program, SUITE)
    assert failure is not None
    assert (failure.test, failure.error) == (test, error)


@pytest.mark.parametrize(
    "program",
    [
        "def double(x):\n    while True:\n        pass",
        "def double(x):\n  while True:\n    try:\n      x += 1\n    except Exception:\n      pass",
        "def double(x):\n    numbers = [1]\n    for n in numbers:\n        numbers.append(n)",
        "def double(x):\n    return double(x + 1)",
        "def count():\n    while True:\n        yield 1\ndef double(x):\n    return sum(count())",
        "while True:\n    pass",
    ],
)
def test_program_that_does_not_end_is_stopped(program):
    """Loops, recursion, endless generators and a loop that catches every Exception are stopped."""
    failure = first_failure(program, SUITE)
    assert failure is not None
    assert not failure.ends


def test_steps_are_counted_over_all_tests():
    """Both tests together take exactly eight steps, so a limit of seven ends in the second."""
    program = "def double(x):\n    for _ in range(3):\n        pass\n    return 2 * x"
    assert first_failure(program, SUITE, limit=8) is None
    failure = first_failure(program, SUITE, limit=7)
    assert failure is not None
    assert failure.test == SUITE.tests[1]
    assert STEP_LIMIT >= 10_000


def test_results_come_in_order_exceptions_among_them():
    """The setup runs before its expression, and its names stay defined."""
    first, second, third = results_of(
        DOUBLE, [("n = 4", "double(n)"), ("", "double(None)"), ("", "double(n)")]
    )
    assert (first, third) == (8, 8)
    assert isinstance(second, TypeError)
