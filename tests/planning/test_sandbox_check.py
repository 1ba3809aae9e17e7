from __future__ import annotations

import shutil

import pytest

from mens_exp.config.compose import compose, typed
from mens_exp.errors import SetupError
from mens_exp.planning.checks.machine import check_sandbox
from mens_exp.planning.preflight import preflight


def configured(sandbox, suite="mini_python"):
    texts = ["model=tiny_llama", "logger=none", f"sandbox={sandbox}", f"suite={suite}"]
    return typed(compose([texts])[0].values)


@pytest.fixture
def without_tools(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.mark.usefixtures("without_tools")
@pytest.mark.parametrize(
    ("sandbox", "found"), [("bubblewrap", "no bwrap, prlimit, setpriv"), ("unsafe", "no prlimit")]
)
def test_missing_tools_of_a_suite_that_executes_are_a_problem(sandbox, found):
    """Reported before the run, with the packages to install."""
    (problem,) = [one for one in preflight(configured(sandbox)) if one.where == "sandbox"]
    assert isinstance(problem, SetupError)
    assert problem.found == found
    assert "apt-get install" in str(problem)


@pytest.mark.usefixtures("without_tools")
def test_without_a_sandbox_nothing_is_missing():
    """sandbox=none executes nothing."""
    assert list(check_sandbox(configured("none"))) == []


@pytest.mark.usefixtures("without_tools")
def test_suite_that_executes_nothing_needs_no_sandbox():
    """Such a suite does not use the sandbox."""
    assert list(check_sandbox(configured("bubblewrap", "heldout_syntax"))) == []


@pytest.mark.usefixtures("sandbox")
def test_tools_that_are_there_are_no_problem():
    """On a machine with the tools, a suite that executes programs has no problem."""
    config = configured("bubblewrap")
    assert config.suite.spec.executes
    assert list(check_sandbox(config)) == []
