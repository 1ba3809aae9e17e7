from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from mens_exp.config.suite import RustSuite
from mens_exp.evals.rust_suite import rust_suite
from mens_exp.evals.suite import Answer

TRIPLE = {
    "name": "Own_0_triple",
    "prompt": "/// Three times a number.\nfn triple(x: isize) -> isize {\n",
    "tests": "}\n\nfn main() {\n    assert_eq!(triple(2), 6);\n}\n",
    "stop_tokens": ["\n}"],
}


@pytest.fixture
def suite(tmp_path):
    if shutil.which("rustc") is None:
        pytest.skip("rustc is missing: https://rustup.rs, or apt-get install rustc")
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(TRIPLE) + "\n")
    return rust_suite(RustSuite(path=str(path)))


def test_answers_are_compiled_and_their_tests_run(suite, runner):
    """The answers are a body, a fenced function, a wrong one and one that does not compile."""
    (item,) = suite.items
    texts = [
        "    x * 3\n",
        "```rust\nfn triple(x: isize) -> isize {\n    x + x + x\n}\n```",
        "    x * 2\n",
        "    x * y\n",
    ]
    judged = suite.judge([Answer(item=item, text=text) for text in texts], runner)
    assert [one.success for one in judged] == [True, True, False, False]
    assert [one.compiles for one in judged] == [True, True, True, False]
    assert [one.outcome for one in judged] == ["passed", "passed", "assertion", "compile_error"]
    assert [one.strict for one in judged] == [True, False, True, True]
    styles = ["continuation", "whole", "continuation", "continuation"]
    assert [one.style for one in judged] == styles
    assert "cannot find value `y`" in judged[3].errors[0]
    assert judged[0].canonical is None
    assert judged[0].unknown == {"canonical": "the layout of Rust is not judged"}


def test_a_stub_compiles_and_fails(suite, runner):
    """The stub fails its test; a task whose prompt does not compile fails the self-test."""
    result = suite.self_test(runner)
    assert result is not None
    assert (result.problem, result.references, result.stubs) == (None, {"prompt and tests": 1}, 1)
    task = replace(suite.tasks["Own_0_triple"], prompt="fn triple(x: nothing) -> isize {\n")
    broken = replace(suite, tasks={task.id: task}).self_test(runner)
    assert broken is not None
    assert broken.problem == "references judged wrong: Own_0_triple (1 in all)"


def test_without_a_sandbox_nothing_is_compiled(suite):
    """Even `compiles` is null, since compiling can run code of the answer."""
    (one,) = suite.judge([Answer(item=suite.items[0], text="    x * 3\n")], None)
    assert one.compiles is one.success is None
    assert one.richness == 0.2
    assert one.style == "continuation"
    assert not one.is_valid
    assert suite.self_test(None) is None
