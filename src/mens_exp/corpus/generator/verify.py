"""Running a program against its tests, in this process, for so many steps at most.

Only programs of our own templates and their mutants are run: they open nothing and import only
modules that compute. A mutant may run for ever, so a counter is put into every loop and
every function through the syntax tree; after `STEP_LIMIT` counts the program is stopped. What a
single step may take is bounded by `mutate`, none of whose operators makes values grow faster than
the program itself does.
"""

from __future__ import annotations

import ast
import builtins
import functools
import traceback
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType

__all__ = ["STEP_LIMIT", "Failure", "Suite", "first_failure", "results_of"]

# measured: 60 draws of each family take at most 620 steps for all tests of a reference.
STEP_LIMIT: Final = 10_000
_COUNTER: Final = "__count_step__"


class _StepLimitError(BaseException):
    """Not an Exception, so that no `except Exception` of a program takes it for its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The way a program fails.

    Attributes:
        test: the first test that fails; empty where the program itself does.
        error: the last line of the traceback.
        ends: false where it was stopped, or recursed without end.
    """

    test: str
    error: str
    ends: bool = True


class Suite:
    """Tests, compiled once for the reference and every mutant."""

    def __init__(self, tests: Sequence[str]) -> None:
        """Compile the tests.

        Raises:
            SyntaxError: a test is not Python.
        """
        self.tests = tuple(tests)
        self.compiled = [compile(test, "<test>", "exec") for test in tests]


def first_failure(program: str, suite: Suite, limit: int = STEP_LIMIT) -> Failure | None:
    """Run a program and then its tests, until one fails.

    Args:
        program: source text.
        suite: the tests; each sees what the ones before it defined.
        limit: steps (passes of a loop, calls of a function) for all of it together.

    Returns:
        The failure; None where every test passes.
    """
    test = ""
    try:
        namespace = _namespace(program, limit)
        for test, compiled in zip(suite.tests, suite.compiled, strict=True):  # noqa: B007  # read below
            exec(compiled, namespace)  # noqa: S102  # our own
    except (_StepLimitError, RecursionError) as error:
        return Failure(test=test, error=type(error).__name__, ends=False)
    except Exception as error:  # noqa: BLE001  # whatever a mutant may raise is its failure
        # The last line of a traceback, as the interpreter words it.
        return Failure(test=test, error=traceback.format_exception_only(error)[-1].strip())
    return None


def results_of(program: str, cases: Sequence[tuple[str, str]]) -> list[Any]:
    """Evaluate expressions against a program.

    Args:
        program: source text.
        cases: setup and expression of each.

    Returns:
        The value of each expression, or the exception that evaluating it raised.
    """
    namespace = _namespace(program, STEP_LIMIT)
    results: list[Any] = []
    for setup, expression in cases:
        exec(setup, namespace)  # noqa: S102  # our own
        try:
            results.append(eval(expression, namespace))  # noqa: S307  # our own
        except Exception as error:  # noqa: BLE001  # the caller tells whether it was wanted
            results.append(error)
    return results


def _namespace(program: str, limit: int) -> dict[str, Any]:
    """Execute a program with its steps counted, and return its globals."""
    left = limit

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _StepLimitError

    namespace = {"__builtins__": builtins, "__name__": "solution", _COUNTER: count}
    exec(_counted(program), namespace)  # noqa: S102  # our own
    return namespace


@functools.lru_cache(maxsize=1)  # a reference is run twice in a row: for its results, and its tests
def _counted(program: str) -> CodeType:
    """Compile a program with a call of the counter in every loop and every function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a mutant is odd code on purpose
        tree = ast.parse(program)
        for node in ast.walk(tree):
            if isinstance(node, ast.For | ast.While | ast.FunctionDef):
                node.body.insert(0, _count_step(node.body[0]))
        return compile(tree, "<solution>", "exec")


def _count_step(before: ast.stmt) -> ast.stmt:
    place = {
        "lineno": before.lineno,
        "col_offset": 0,
        "end_lineno": before.lineno,
        "end_col_offset": 0,
    }
    name = ast.Name(id=_COUNTER, ctx=ast.Load(), **place)
    return ast.Expr(value=ast.Call(func=name, args=[], keywords=[], **place), **place)
