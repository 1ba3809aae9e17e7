"""Break a program in one known way, and run a program against its tests within a step limit.

The syntax tree provides positions, and the text is edited: a mutant differs from its program by one
edit and keeps the layout. No operator introduces an operation that makes values grow faster
(nothing becomes `*`, `**` or a concatenation with itself).

Only programs of our own templates and their mutants are run, in this process: they open no files
and import only modules that compute. A mutant may run forever, so a counter is inserted into every
loop and function through the syntax tree, and the program is stopped after `STEP_LIMIT` counts. The
cost of a single step is bounded, because no operator makes values grow faster.
"""

from __future__ import annotations

import ast
import builtins
import functools
import traceback
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType

    from mens_exp.corpus.generator.family import Draw

OPERATORS: Final = (
    "boundary",
    "comparison_flipped",
    "dropped_statement",
    "logic_swapped",
    "misspelled_name",
    "missing_bracket",
    "missing_colon",
    "negated_condition",
    "off_by_one",
    "swapped_arguments",
    "wrong_function",
    "wrong_operator",
    "wrong_return",
    "wrong_variable",
)

_BOUNDARY: Final = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_FLIPPED: Final = {
    "<": ">=",
    "<=": ">",
    ">": "<=",
    ">=": "<",
    "==": "!=",
    "!=": "==",
    "in": "not in",
    "not in": "in",
    "is": "is not",
    "is not": "is",
}
_ARITHMETIC: Final = {
    "+": "-",
    "-": "+",
    "*": "+",
    "//": "%",
    "%": "//",
    "**": "*",
    "&": "|",
    "|": "&",
    "^": "|",
    "<<": ">>",
    ">>": "<<",
}
_FUNCTIONS: Final = {
    "all": "any",
    "any": "all",
    "append": "extend",
    "endswith": "startswith",
    "isalpha": "isdigit",
    "isdigit": "isalpha",
    "items": "keys",
    "keys": "values",
    "lower": "upper",
    "lstrip": "rstrip",
    "max": "min",
    "min": "max",
    "rjust": "ljust",
    "rstrip": "lstrip",
    "startswith": "endswith",
    "sum": "len",
    "upper": "lower",
    "values": "keys",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A broken program and how it was broken."""

    operator: str
    program: str


@dataclass(frozen=True, slots=True)
class _Edit:
    operator: str
    start: int
    end: int
    text: str


def mutants(program: str, draw: Draw) -> Iterator[Mutant]:
    """Yield the mutants of a program in random order, one operator after the other.

    Args:
        program: Python source in ASCII, without a final newline.
        draw: where the order comes from.
    """
    found: dict[str, list[_Edit]] = defaultdict(list)
    for edit in dict.fromkeys(_edits(program)):  # a nested function's names come twice
        found[edit.operator].append(edit)
    left = [draw.shuffled(found[operator]) for operator in draw.shuffled(sorted(found))]
    while left:
        for edits in left:
            edit = edits.pop()
            changed = program[: edit.start] + edit.text + program[edit.end :]
            yield Mutant(operator=edit.operator, program=changed)
        left = [edits for edits in left if edits]


def all_mutants(program: str) -> list[Mutant]:
    """Return every mutant of a program, in the order of its syntax tree."""
    return [
        Mutant(
            operator=edit.operator, program=program[: edit.start] + edit.text + program[edit.end :]
        )
        for edit in dict.fromkeys(_edits(program))
    ]


def _edits(program: str) -> Iterator[_Edit]:
    tree = ast.parse(program)
    text = _Text(program)
    for node in _walk(tree):
        yield from _of_expression(node, text)
        yield from _of_statement(node, text)
        if isinstance(node, ast.FunctionDef):
            yield from _of_names(node, text)


class _Text:
    """A program's text, cut by the positions of its tree; in ASCII a column is a character."""

    def __init__(self, program: str) -> None:
        self.program = program
        self._lines = [0]
        for line in program.split("\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.program[start:end]

    def put(self, operator: str, node: ast.expr | ast.stmt, text: str) -> _Edit:
        return _Edit(operator, *self.span(node), text)

    def between(self, first: ast.expr, second: ast.expr) -> tuple[int, int, str]:
        """Return where the sign between two operands stands, and the sign."""
        start, end = self.span(first)[1], self.span(second)[0]
        gap = self.program[start:end]
        sign = gap.strip(" ()\n")
        start += gap.index(sign)
        return start, start + len(sign), sign

    def line_end(self, line: int) -> int:
        """Return the offset of the newline that ends a line, counted from one."""
        return self._lines[line] - 1


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node, less what an f-string holds: Python 3.11 misplaces that."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def _of_expression(node: ast.AST, text: _Text) -> Iterator[_Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        start, end, sign = text.between(node.left, node.comparators[0])
        yield _Edit("comparison_flipped", start, end, _FLIPPED[sign])
        if sign in _BOUNDARY:
            yield _Edit("boundary", start, end, _BOUNDARY[sign])
    elif isinstance(node, ast.BinOp):
        start, end, sign = text.between(node.left, node.right)
        if sign in _ARITHMETIC:
            yield _Edit("wrong_operator", start, end, _ARITHMETIC[sign])
    elif isinstance(node, ast.BoolOp):
        start, end, sign = text.between(node.values[0], node.values[1])
        yield _Edit("logic_swapped", start, end, "or" if sign == "and" else "and")
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node, text)
    elif isinstance(node, ast.Call):
        yield from _of_call(node, text)
    elif isinstance(node, ast.comprehension):
        yield from (_negated(test, text) for test in node.ifs)
    elif isinstance(node, ast.IfExp):
        yield _negated(node.test, text)


def _of_constant(node: ast.Constant, text: _Text) -> Iterator[_Edit]:
    if isinstance(node.value, bool):
        yield text.put("wrong_return", node, repr(not node.value))
    elif isinstance(node.value, int):
        yield text.put("off_by_one", node, repr(node.value + 1))
        if node.value > 0:
            yield text.put("off_by_one", node, repr(node.value - 1))


def _of_call(node: ast.Call, text: _Text) -> Iterator[_Edit]:
    start, end = text.span(node)
    if text.program[end - 1] == ")":
        yield _Edit("missing_bracket", end - 1, end, "")
    if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        yield text.put("wrong_function", node.func, _FUNCTIONS[node.func.id])
    elif isinstance(node.func, ast.Attribute) and node.func.attr in _FUNCTIONS:
        after = text.span(node.func)[1]
        name = node.func.attr
        yield _Edit("wrong_function", after - len(name), after, _FUNCTIONS[name])
    if len(node.args) > 1 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
        first, second = node.args[:2]
        start, between = text.span(first)
        again, end = text.span(second)
        if text.of(first) != text.of(second):
            gap = text.program[between:again]
            swapped = text.of(second) + gap + text.of(first)
            yield _Edit("swapped_arguments", start, end, swapped)


def _of_statement(node: ast.AST, text: _Text) -> Iterator[_Edit]:
    if isinstance(node, ast.AugAssign):
        start, end, sign = text.between(node.target, node.value)
        if sign[:-1] in _ARITHMETIC:
            yield _Edit("wrong_operator", start, end, _ARITHMETIC[sign[:-1]] + "=")
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Continue | ast.Break) or (
        isinstance(node, ast.If) and not node.orelse
    ):
        yield text.put("dropped_statement", node, "pass")
    if isinstance(node, ast.If | ast.While):
        yield _negated(node.test, text)
    if isinstance(node, ast.Return) and node.value is not None and text.of(node.value) != "None":
        yield text.put("wrong_return", node.value, "None")
    if isinstance(node, ast.If | ast.While | ast.For | ast.FunctionDef):
        end = text.line_end(node.lineno)
        if text.program[end - 1] == ":":
            yield _Edit("missing_colon", end - 1, end, "")


def _negated(test: ast.expr, text: _Text) -> _Edit:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return text.put("negated_condition", test, text.of(test.operand))
    return text.put("negated_condition", test, f"not ({text.of(test)})")


def _of_names(function: ast.FunctionDef, text: _Text) -> Iterator[_Edit]:
    """Yield edits of the local names that a function reads."""
    nodes = list(_walk(function))
    arguments = [node.arg for node in nodes if isinstance(node, ast.arg) and node.arg != "self"]
    read = [node for node in nodes if isinstance(node, ast.Name)]
    stored = [node.id for node in read if isinstance(node.ctx, ast.Store)]
    names = list(dict.fromkeys([*arguments, *stored]))
    for node in read:
        if node.id not in names or not isinstance(node.ctx, ast.Load):
            continue
        others = [name for name in names if name != node.id]
        if others:
            following = names[(names.index(node.id) + 1) % len(names)]
            yield text.put("wrong_variable", node, following)
        wrong = _misspelled(node.id)
        if wrong not in names and not hasattr(builtins, wrong):
            yield text.put("misspelled_name", node, wrong)


def _misspelled(name: str) -> str:
    return name[:-1] if len(name) > 3 else f"{name}s"  # noqa: PLR2004  # what is left is a word


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
