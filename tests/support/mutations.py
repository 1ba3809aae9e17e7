"""Which changes of single lines do the tests notice?

    python tests/support/mutations.py draw --seed 0 --lines 60 > mutants.json
    python tests/support/mutations.py try mutants.json --results results.json

`draw` chooses lines of the packages that judge and promise, and one change on each: an operator, a
comparison, a number, a condition or a result. `try` makes each change in this checkout, runs tests
that execute its line, at most `MOST_TESTS` and those of its package first, up to the first that
fails, and takes it back. For a line outside of functions it runs all tests of the package. Who
executes which line is read from coverage's data: `make coverage` runs all tests with this module as
a plugin, which gives each test a context of its own.

A change is ``killed`` by the first test that fails. ``survived`` and ``uncovered`` are for a person
to read: a change may leave the meaning as it is. ``untried`` means that pytest ran no test, such as
where the contexts are of another version of the tests.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("layout", "quant", "objective", "evals", "artifacts", "planning")
MOST_TESTS = 400  # per mutated line
TIMEOUT_S = 300
_GONE = "ERROR: not found: "
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}
_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}
_COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}


def pytest_runtest_logstart(nodeid, location):  # signature of pytest's hook
    """Tell coverage which test is running."""
    from coverage import Coverage

    current = Coverage.current()
    if current is not None:
        current.switch_context(nodeid)


def _operator(node, text):
    sides = node.left, node.right
    if type(node.op) not in _OPERATORS or any(map(_is_text, sides)):
        return None
    return f"{text(node.left)} {_OPERATORS[type(node.op)]} {text(node.right)}"


def _is_text(node):
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _comparison(node, text):
    if len(node.ops) > 1 or type(node.ops[0]) not in _COMPARISONS:
        return None
    return f"{text(node.left)} {_COMPARISONS[type(node.ops[0])]} {text(node.comparators[0])}"


def _connective(node, text):
    first, *others = node.values
    word = "or" if isinstance(node.op, ast.And) else "and"
    return None if len(others) > 1 else f"{text(first)} {word} {text(others[0])}"


def _constant(node, _):
    if type(node.value) is bool:
        return repr(not node.value)
    return repr(node.value + 1) if type(node.value) in {int, float} else None


def _negation(node, text):
    return text(node.operand) if isinstance(node.op, ast.Not) else None


def _choice(node, text):
    return f"{text(node.body)} if not ({text(node.test)}) else {text(node.orelse)}"


def _result(node, _):
    return None if node.value is None else "return None"


CHANGES = {
    ast.BinOp: _operator,
    ast.Compare: _comparison,
    ast.BoolOp: _connective,
    ast.Constant: _constant,
    ast.UnaryOp: _negation,
    ast.IfExp: _choice,
    ast.Return: _result,
}


def changes(source):
    """Yield ``(line, first column, last column, text)`` for each possible change of one line."""
    lines = [line.encode() for line in source.splitlines()]

    def text(node):
        return lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()

    for node in ast.walk(ast.parse(source)):
        if type(node) not in CHANGES or node.lineno != node.end_lineno:
            continue
        new = CHANGES[type(node)](node, text)
        if new not in (None, text(node)):
            yield node.lineno, node.col_offset, node.end_col_offset, new


def draw(seed, count):
    """Draw lines with equal probability, and one change of each."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / "src/mens_exp" / package).rglob("*.py")):
            by_line = {}
            for change in changes(path.read_text("utf-8")):
                by_line.setdefault(change[0], []).append(change)
            found += [(str(path.relative_to(ROOT)), by_line[line]) for line in sorted(by_line)]
    generator = random.Random(seed)
    mutants = []
    for file, of_line in generator.sample(found, count):
        line, first, last, new = generator.choice(of_line)
        old = (ROOT / file).read_text("utf-8").splitlines()[line - 1].encode()[first:last].decode()
        mutants.append(
            {"file": file, "line": line, "first": first, "last": last, "old": old, "new": new}
        )
    return mutants


def executing(data, mutant):
    """Return the tests that execute a mutant's line; for import-time lines, its package's tests."""
    (name,) = [one for one in data.measured_files() if one.endswith("/" + mutant["file"])] or [""]
    names = data.contexts_by_lineno(name).get(mutant["line"], []) if name else []
    tests = sorted({one.partition(" (")[0] for one in names if "::" in one})
    near = f"tests/{mutant['file'].split('/')[2]}/"
    if names and not (tests and is_in_function(mutant)):
        return [near]
    return sorted(tests, key=lambda one: not one.startswith(near))


def is_in_function(mutant):
    """Return whether a mutant's line is executed by calls and not only at import."""
    tree = ast.parse((ROOT / mutant["file"]).read_text("utf-8"))
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    return any(one.body[0].lineno <= mutant["line"] <= one.end_lineno for one in functions)


def attempt(mutant, tests):
    """Run tests on a changed line; return the result and the failed test."""
    path = ROOT / mutant["file"]
    source = path.read_text("utf-8")
    lines = source.splitlines(keepends=True)
    raw = lines[mutant["line"] - 1].encode()
    assert raw[mutant["first"] : mutant["last"]].decode() == mutant["old"], "another version"
    lines[mutant["line"] - 1] = (
        raw[: mutant["first"]] + mutant["new"].encode() + raw[mutant["last"] :]
    ).decode()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
        names.write("\n".join(tests))
        names.flush()
        command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:randomly", f"@{names.name}"]
        try:
            path.write_text("".join(lines), "utf-8")
            done = subprocess.run(
                [*command, "--tb=no"],
                cwd=ROOT,
                check=False,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return "timeout", None
        finally:
            path.write_text(source, "utf-8")
    gone = {line.rpartition("/tests/")[2] for line in done.stderr.splitlines() if _GONE in line}
    left = [one for one in tests if one.partition("[")[0].removeprefix("tests/") not in gone]
    if len(left) < len(tests):  # pytest runs nothing if one of them no longer exists
        return attempt(mutant, left) if left else ("untried", "its tests are gone")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == pytest.ExitCode.OK:
        return "survived", None
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED or "not found: " in done.stderr:
        return "untried", (done.stdout + done.stderr)[-500:]
    return "killed", failed[0].split(" ")[1] if failed else done.stdout[-500:]


def main():
    """Draw mutants, or test them."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--lines", type=int, default=60)
    trying = commands.add_parser("try")
    trying.add_argument("mutants", type=Path)
    trying.add_argument("--contexts", type=Path, default=ROOT / ".coverage")
    trying.add_argument("--results", type=Path, required=True)
    trying.add_argument("--share", default="0/1", help="which of how many parts, as 0/2")
    given = parser.parse_args()
    if given.command == "draw":
        json.dump(draw(given.seed, given.lines), sys.stdout, indent=1)
        return
    from coverage import CoverageData

    data = CoverageData(str(given.contexts))
    data.read()
    number, parts = map(int, given.share.split("/"))
    results = []
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # undo the change first
    for mutant in json.loads(given.mutants.read_text("utf-8"))[number::parts]:
        tests = executing(data, mutant)
        began = time.perf_counter()
        end, by = attempt(mutant, tests[:MOST_TESTS]) if tests else ("uncovered", None)
        seconds = round(time.perf_counter() - began)
        results.append({**mutant, "tests": len(tests), "end": end, "by": by, "seconds": seconds})
        print(end, mutant["file"], mutant["line"], mutant["new"], by or "", seconds, flush=True)
        given.results.write_text(json.dumps(results, indent=1), "utf-8")


if __name__ == "__main__":
    main()
