from __future__ import annotations

import itertools
import re
import textwrap

import pytest

from mens_exp.config.suite import MiniPythonSuite
from mens_exp.corpus.generator.generate import benchmark_tasks, tasks_digest
from mens_exp.evals.program_suite import MiniPython, mini_python
from mens_exp.evals.suite import Answer


def stub_of(name):
    return f"def {name}(*args):\n    pass"


@pytest.fixture(scope="module")
def suite():
    return mini_python(MiniPythonSuite(items=12))


def test_the_tasks_are_those_of_the_benchmark(suite):
    """The items equal the benchmark's tasks; two of twelve are repairs."""
    tasks = benchmark_tasks(0, 12, 0.25)
    assert [item.id for item in suite.items] == [task.id for task in tasks]
    assert [item.prompt for item in suite.items] == [task.prompt for task in tasks]
    assert [item.group for item in suite.items].count("repair") == 2


def test_more_tasks_keep_the_ones_there_were(suite):
    """A larger suite starts with the tasks of a smaller one."""
    larger = mini_python(MiniPythonSuite(items=16))
    assert larger.items[:12] == suite.items


def test_the_digest_is_that_of_tasks_and_limit(suite):
    """Seed, share of repairs, count and limit enter the digest; the batch size does not."""
    first = suite.digest
    assert mini_python(MiniPythonSuite(items=12, batch_size=1)).digest == first
    others = [
        MiniPythonSuite(items=12, generator_seed=1),
        MiniPythonSuite(items=12, repair_frac=0.5),
        MiniPythonSuite(items=13),
        MiniPythonSuite(items=12, max_new_tokens=99),
    ]
    assert len({first, *(mini_python(one).digest for one in others)}) == 5
    assert tasks_digest(list(suite.tasks.values())) != first


def test_references_pass_in_every_style_and_stubs_fail(suite, runner):
    """The self-test covers all tasks: one whose reference fails is not scored."""
    result = suite.self_test(runner)
    assert result is not None
    assert result.problem is None
    assert result.references == {"every style": 9 * 12}
    assert (result.stubs, result.stubs_passed) == (12, [])
    assert suite.self_test(None) is None


def test_a_suite_whose_reference_is_wrong_fails_its_own_test(suite, runner):
    """So does a suite whose tests accept a stub."""
    name, task = next(iter(suite.tasks.items()))
    from dataclasses import replace

    wrong = MiniPython(
        tasks={name: replace(task, solution=stub_of(task.entry_point))}, max_new_tokens=9
    )
    result = wrong.self_test(runner)
    assert result is not None
    assert result.problem == f"references judged wrong: {name} (1 in all)"
    empty = MiniPython(tasks={name: replace(task, tests=("pass",))}, max_new_tokens=9)
    result = empty.self_test(runner)
    assert result is not None
    assert result.problem == f"empty answers judged right: {name} (1 in all)"


def test_answers_are_judged_by_their_tests(suite, runner):
    """Answers: a solution, a solution with a marker, a stub, and text that does not parse."""
    item = suite.items[0]
    task = suite.tasks[item.id]
    marked = f"```python\n{task.solution}\n# TODO: more\n```"
    texts = [task.solution, marked, stub_of(task.entry_point), "def f(:", ""]
    answers = [Answer(item=item, text=text) for text in texts]
    good, todo, stub, broken, empty = suite.judge(answers, runner)
    assert (good.compiles, good.success, good.semantic, good.strict) == (True, True, True, True)
    assert (todo.success, todo.semantic, todo.strict) == (True, False, False)
    assert (stub.compiles, stub.success, stub.trivial) == (True, False, True)
    assert (broken.compiles, broken.success, broken.outcome) == (False, False, "syntax_error")
    assert (empty.compiles, empty.success) == (False, False)
    assert [one.is_valid for one in (good, todo, stub, broken, empty)] == [True, True, *[False] * 3]
    assert stub.errors[0].startswith("This test fails: ")
    assert good.unknown == {}


@pytest.fixture(scope="module")
def of_functions():
    """Return twenty-one tasks that ask for a function."""
    tasks = mini_python(MiniPythonSuite(items=60)).tasks
    wanted = {n: t for n, t in tasks.items() if f"def {t.entry_point}(" in t.solution}
    chosen = dict(itertools.islice(wanted.items(), 21))
    assert len(chosen) == 21
    return MiniPython(tasks=chosen, max_new_tokens=9)


def judged(suite, said, runner):
    """Judge the text made for each task from its solution and a wrong draft."""
    answers = [
        Answer(item=item, text=said(item.reference.rstrip(), draft))
        for item in suite.items
        for draft in [f"def {suite.tasks[item.id].entry_point}(*_):\n    return 'a draft'"]
    ]
    return [one.success for one in suite.judge(answers, runner)]


@pytest.mark.parametrize(
    "text",
    [
        "<think>\nPerhaps:\n```python\n{draft}\n```\nNo.\n</think>\n\n```python\n{right}\n```",
        "<think>{draft}</think>{right}",
        "Let me see.\n<thinking>\n{draft}\n</thinking>\nSo:\n```\n{right}\n```\nThat is all.",
        "Perhaps:\n```python\n{draft}\n```\n</think>\n```python\n{right}\n```",
        "First:\n```python\n{draft}\n```\nWait, that is wrong.\n\n```python\n{right}\n```",
        "```python\n{draft}\n```\nWait.\n```python\n{right}\n```\nOr\n```python\n{draft}",
        "{draft}\n\nWait, that is wrong.\n\n{right}\n",
    ],
    ids=range(7),
)
def test_a_draft_before_the_right_answer_does_not_count(of_functions, runner, text):
    """A wrong draft in the reasoning or in an earlier block is ignored."""
    said = lambda right, draft: text.replace("{draft}", draft).replace("{right}", right)  # noqa: E731
    assert all(judged(of_functions, said, runner))


@pytest.mark.parametrize(
    "text",
    [
        "<think>\n```python\n{right}\n```\n</think>\n\n```python\n{draft}\n```",
        "```python\n{right}\n```\nNo, better:\n```python\n{draft}\n```",
        "<think>\n```python\n{right}\n```\n</think>\nThat is it.",
        "<think>\n```python\n{right}\n```\n",
        "```python\n{right}\n```\nNo, better:\n```python\n{draft} +\n```",
    ],
    ids=range(5),
)
def test_a_right_draft_does_not_save_a_wrong_answer(of_functions, runner, text):
    """Only the last answer counts, even if it is not Python or is empty."""
    said = lambda right, draft: text.replace("{draft}", draft).replace("{right}", right)  # noqa: E731
    assert not any(judged(of_functions, said, runner))


def test_a_method_of_class_solution_is_the_function(of_functions, runner):
    """A method of class Solution is accepted; the examples below it are not run."""

    def said(right, draft):
        name = re.findall(r"def (\w+)", draft)[0]
        inner = textwrap.indent(right, " " * 8)
        return (
            f"```python\nclass Solution:\n    def {name}(self, *given):\n{inner}\n"
            f"        return {name}(*given)\n\nassert Solution().{name}() == 'nothing'\n```"
        )

    assert all(judged(of_functions, said, runner))


def test_without_a_sandbox_syntax_is_still_measured(suite):
    """Metrics that need execution are null, and the reason says what to install."""
    item = suite.items[0]
    good, broken = suite.judge(
        [Answer(item=item, text=item.reference), Answer(item=item, text="def f(:")], None
    )
    assert (good.compiles, good.success, good.semantic, good.outcome) == (True, None, None, None)
    assert good.is_valid
    assert (broken.compiles, broken.success, broken.is_valid) == (False, None, False)
    assert "install bubblewrap" in good.unknown["success"]
    assert good.unknown.keys() == {"success", "semantic", "outcome"}


def test_a_class_is_read_in_every_style_too(runner):
    """A class task is read in every style; its stub is an empty class."""
    tasks = mini_python(MiniPythonSuite(items=200)).tasks
    name, task = next(one for one in tasks.items() if "\nclass " in f"\n{one[1].solution}")
    result = MiniPython(tasks={name: task}, max_new_tokens=9).self_test(runner)
    assert result is not None
    assert (result.problem, result.references, result.stubs) == (None, {"every style": 9}, 1)
