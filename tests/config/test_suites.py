"""Only the table of suites asks which suite is in use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mens_exp import cli
from mens_exp.config import suite as suites
from mens_exp.config.suite import (
    HeldoutSyntaxSuite,
    HumanEvalSuite,
    JsonlSuite,
    MiniPythonSuite,
    NoSuite,
    ScorecardSpecSuite,
)
from mens_exp.evals.suite import file_problems, frozen_suite, suite_class

SOURCE = Path(__file__).parents[2] / "src" / "mens_exp"
NAMES = suites.SUITES.built_in.keys()
SCHEMAS = {spec.schema.__name__ for spec in suites.SUITES.built_in.values()}

# The files outside the table that may use a suite's settings class.
OF_SUITES = {
    "config/suite.py": "declares them",
    "evals/harness_suite.py": "lm_eval",
    "evals/jsonl_suite.py": "jsonl",
    "evals/program_suite.py": "humaneval and mini_python",
    "evals/rust_suite.py": "rust",
    "evals/scorecard_spec.py": "scorecard_spec and heldout_syntax",
}


def is_suite(node):
    """Tell whether an expression reads a suite's name from a configuration, a record or a card."""
    if isinstance(node, ast.Attribute) and node.attr == "name":
        node = node.value
    word = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return "suite" in word.casefold() or word == "card"


def questions(source):
    """Return the lines that compare a suite's name, or name a settings class of one."""
    found = set()
    if not re.search("suite|card", source.casefold()):
        return []  # parsing every file takes seconds
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute):
            word = node.id if isinstance(node, ast.Name) else node.attr
            found |= {node.lineno} if word in SCHEMAS else set()
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            named = {
                one.value
                for side in sides
                for one in ast.walk(side)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
            found |= {node.lineno} if named & NAMES and any(map(is_suite, sides)) else set()
    return sorted(found)


def test_nothing_outside_asks_which_suite_it_is():
    """Anything that depends on the suite is an attribute or a method of it."""
    asked = {
        f"{file}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if (file := path.relative_to(SOURCE).as_posix()) not in OF_SUITES
        for line in questions(path.read_text("utf-8"))
    }
    assert asked == set()


@pytest.mark.parametrize(
    "question",
    [
        "a = config.suite.name == 'none'",
        "a = isinstance(config.suite, LmEvalSuite)",
        "a = scorecard.suite in ('lm_eval', 'rust')",
        "a = suite.HeldoutSyntaxSuite().name",
    ],
)
def test_a_question_is_found(question):
    """The check finds comparisons of names, and settings classes."""
    assert questions(question) == [1]


@pytest.mark.parametrize("answer", ["a = suite.spec.scores", "a = base == 'none'", "a = 'rust'"])
def test_an_answer_is_no_question(answer):
    """Calling the suite is allowed, and so are the same words in another meaning."""
    assert questions(answer) == []


def test_each_suite_has_its_settings_and_its_class():
    """A name without an implementation would otherwise fail only in a run."""
    for name, spec in suites.SUITES.built_in.items():
        assert spec.name == name == spec.schema().name == spec.schema().spec.name
        if spec.scores:
            assert suite_class(spec).name is not None
    assert not suites.NoSuite().spec.scores


def test_only_suites_that_run_programs_ask_for_a_sandbox(tmp_path):
    """A suite that only reads answers works on machines without a sandbox."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "?", "expected": "x"}')
    for settings in (MiniPythonSuite(items=1), HumanEvalSuite(items=1), JsonlSuite(path=str(rows))):
        assert frozen_suite(settings).needs_sandbox is settings.spec.executes


def test_a_suite_is_found_by_its_settings(tmp_path):
    """The settings class determines the suite."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "?", "expected": "x"}')
    assert frozen_suite(MiniPythonSuite(items=1)).name == "mini_python"
    assert frozen_suite(JsonlSuite(path=str(rows))).name == "jsonl"


@pytest.mark.parametrize(
    "suite",
    [NoSuite(), HeldoutSyntaxSuite(), MiniPythonSuite(), JsonlSuite(), ScorecardSpecSuite()],
)
def test_a_suite_without_a_file_has_no_problem_with_it(suite):
    """The rules report a missing path."""
    assert file_problems(suite) == []


@pytest.mark.parametrize("kind", [HumanEvalSuite, JsonlSuite, ScorecardSpecSuite])
def test_a_file_that_is_not_there_is_told(kind, tmp_path):
    """The message has the path."""
    (problem,) = file_problems(kind(path=str(tmp_path / "absent")))
    assert "absent: the file cannot be read" in str(problem)


def test_a_wrong_row_is_told_before_training_begins(tmp_path, capsys):
    """No training starts if its scorecard could not be computed."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "?"}\n{"prompt": "!"}\n')
    out = tmp_path / "run"
    command = ["model=tiny_llama", "logger=none", "suite=jsonl", f"suite.path={rows}"]
    assert cli.main([*command, f"hydra.run.dir={out}"]) == 2
    said = capsys.readouterr().err
    assert "rows.jsonl:1: expected: missing key" in said
    assert "rows.jsonl:2: expected: missing key" in said
    assert not out.exists()


def test_suites_are_read_without_torch(tmp_path):
    """Planning reads suite files too, and has to be quick."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "?", "expected": "x"}')
    code = (
        "import sys\n"
        "from mens_exp.config.suite import JsonlSuite, MiniPythonSuite\n"
        "from mens_exp.evals.suite import frozen_suite\n"
        f"frozen_suite(JsonlSuite(path={str(rows)!r}))\n"
        "frozen_suite(MiniPythonSuite(items=1))\n"
        "import mens_exp.evals.program_suite, mens_exp.evals.rust_suite\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
