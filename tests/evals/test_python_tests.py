from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mens_exp.evals.python_tests import Checked, check_all

if TYPE_CHECKING:
    from mens_exp.evals.running import Runner

TESTS = ("assert f(1) == 2", "assert f(-1) == 0")
GOOD = "def f(x):\n    return x + 1\n"


def checked(runner: Runner, *codes: str) -> list[Checked]:
    return check_all(codes, [TESTS] * len(codes), runner)


def test_an_answer_that_passes_every_test_has_passed(runner: Runner) -> None:
    """Also one that prints, and one with a main of its own."""
    noisy = GOOD + "print('hello')\nif __name__ == '__main__':\n    raise SystemExit(1)\n"
    assert [one.outcome for one in checked(runner, GOOD, noisy)] == ["passed", "passed"]


def test_the_first_test_that_fails_is_told(runner: Runner) -> None:
    """With the last line of its traceback."""
    (one,) = checked(runner, "def f(x):\n    return 2\n")
    assert (one.outcome, one.is_passed) == ("failed_test", False)
    assert one.error == "This test fails: assert f(-1) == 0\nAssertionError"


@pytest.mark.parametrize(
    ("code", "outcome", "said"),
    [
        ("def f(:", "syntax_error", "SyntaxError"),
        ("import no_such_module", "exception", "ModuleNotFoundError"),
        ("x = 1", "failed_test", "NameError: name 'f' is not defined"),
        ("raise SystemExit(0)", "exception", "SystemExit"),
        ("import os\nos._exit(0)", "left", "before its tests had run"),
        ("import sys\nsys.stdout = None\ndef f(x): return x + 1", "left", "before its tests"),
        ("while True: pass", "cpu_time", "processor time"),
        ("import time\ntime.sleep(60)", "timeout", "time limit"),
    ],
)
def test_every_other_end_has_a_name(runner: Runner, code: str, outcome: str, said: str) -> None:
    """An answer that ends well without its tests has not passed them."""
    (one,) = checked(runner, code)
    assert one.outcome == outcome
    assert said in str(one.error)


def test_a_printed_verdict_is_none(runner: Runner) -> None:
    """The word that begins it is no answer's to know."""
    (one,) = checked(runner, "print('{\"passed\": true}')\nimport os\nos._exit(0)")
    assert one.outcome == "left"


def test_results_keep_the_order_of_the_answers(runner: Runner) -> None:
    """What does not parse is not run, and keeps its place."""
    outcomes = [one.outcome for one in checked(runner, "def f(:", GOOD, "", GOOD)]
    assert outcomes == ["syntax_error", "passed", "failed_test", "passed"]
