from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

from mens_exp import cli
from mens_exp.config.suite import (
    HeldoutSyntaxSuite,
    HumanEvalSuite,
    JsonlSuite,
    MiniPythonSuite,
    NoSuite,
    ScorecardSpecSuite,
)
from mens_exp.evals.catalogue import Jsonl, file_problems, frozen_suite, needs_rows
from mens_exp.evals.harness_suite import Harness
from mens_exp.evals.program_suite import MiniPython, ProgramSuite
from mens_exp.evals.rust_suite import RustProgramSuite
from mens_exp.evals.scorecard_spec import HeldoutSyntax, SpecSuite


def test_a_suite_is_found_by_its_settings(tmp_path):
    """Each goes by its option's name."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "?", "expected": "x"}')
    assert frozen_suite(MiniPythonSuite(items=1)).name == "mini_python"
    assert frozen_suite(JsonlSuite(path=str(rows))).name == "jsonl"
    assert [needs_rows(one) for one in (HeldoutSyntaxSuite(), MiniPythonSuite())] == [True, False]


@pytest.mark.parametrize(
    "suite",
    [NoSuite(), HeldoutSyntaxSuite(), MiniPythonSuite(), JsonlSuite(), ScorecardSpecSuite()],
)
def test_a_suite_without_a_file_has_no_problem_with_it(suite):
    """A path that is missing is told by the rules."""
    assert file_problems(suite) == []


@pytest.mark.parametrize("kind", [HumanEvalSuite, JsonlSuite, ScorecardSpecSuite])
def test_a_file_that_is_not_there_is_told(kind, tmp_path):
    """With its path."""
    (problem,) = file_problems(kind(path=str(tmp_path / "absent")))
    assert "absent: the file cannot be read" in str(problem)


def test_a_wrong_row_is_told_before_training_begins(tmp_path, capsys):
    """Nothing is trained for a scorecard that cannot be."""
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
    """A plan looks at their files too."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "?", "expected": "x"}')
    code = (
        "import sys\n"
        "from mens_exp.config.suite import JsonlSuite, MiniPythonSuite\n"
        "from mens_exp.evals.catalogue import frozen_suite\n"
        f"frozen_suite(JsonlSuite(path={str(rows)!r}))\n"
        "frozen_suite(MiniPythonSuite(items=1))\n"
        "import mens_exp.evals.program_suite, mens_exp.evals.rust_suite\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("suite", "runs_programs"),
    [
        (HeldoutSyntax, False),
        (SpecSuite, False),
        (Jsonl, False),
        (Harness, False),
        (MiniPython, True),
        (ProgramSuite, True),
        (RustProgramSuite, True),
    ],
)
def test_only_suites_that_run_programs_ask_for_a_sandbox(suite, runs_programs):
    """A suite that reads answers works on a machine where none can be had."""
    (default,) = (one.default for one in fields(suite) if one.name == "needs_sandbox")
    assert default is runs_programs
