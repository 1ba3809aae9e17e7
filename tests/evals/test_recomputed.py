"""Recomputation accepts records that scoring wrote, and finds edited ones."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from mens_exp.artifacts.scorecard import read_item_events, write_item_events
from mens_exp.config.suite import HumanEvalSuite, JsonlCheck, JsonlSuite, MiniPythonSuite
from mens_exp.evals.attempts import Plan, answer_all, to_scorecard
from mens_exp.evals.engines import Completion
from mens_exp.evals.jsonl_suite import jsonl_suite
from mens_exp.evals.program_suite import humaneval, mini_python
from mens_exp.evals.recompute import EARLIER, NOT_EXECUTED, recomputed
from mens_exp.evals.scorecard_spec import HeldoutSyntax
from mens_exp.evals.suite import Item

ROWS = [
    {
        "task_id": f"t{number}",
        "prompt": f'def add{number}(a):\n    """Add."""\n',
        "entry_point": f"add{number}",
        "canonical_solution": f"    return a + {number}\n",
        "test": f"def check(f):\n    assert f(1) == {1 + number}\n",
    }
    for number in range(3)
]
QUESTIONS = [
    {"id": "a", "prompt": "Capital of France?", "expected": "Paris"},
    {"id": "b", "prompt": "Write red.", "expected": "red", "reference": "red"},
]


class Drawn:
    """An engine with random answers of the kinds that models write, some of them right."""

    def __init__(self, suite, seed):
        self.right = {item.prompt: item.reference for item in suite.items}
        self.random = random.Random(seed)

    def complete(self, requests):
        return [self._one(one.messages[0]["content"]) for one in requests]

    def _one(self, prompt):
        right = self.right[prompt]
        text = self.random.choice(
            [
                right,
                f"```python\n{right}\n```",
                f"<think>\ndef f(:\n</think>\n{right}",
                "def f(:\n    return",
                "def add0(a):\n    pass\n",
                "I do not know how to do that, sorry.",
                "# TODO\n",
                "",
                None,
            ]
        )
        return Completion(
            text=text or "",
            tokens_in=9,
            tokens_out=0 if text is None else 5,
            is_finished=text is not None,
            latency_ms=self.random.random() * 100,
            problem="no room for it" if text is None else None,
        )


def heldout_of(card, lines):
    return HeldoutSyntax.of_lines(lines, card.generation)


def heldout():
    items = [
        Item(id=name, messages=({"role": "user", "content": f"Write {name}."},), reference=code)
        for name, code in (("f", "def f(a):\n    return a\n"), ("g", "def g():\n    return 1\n"))
    ]
    return HeldoutSyntax(items=items, max_new_tokens=99)


def jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return jsonl_suite(JsonlSuite(path=str(path), check=JsonlCheck.contains))


def programs(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return humaneval(HumanEvalSuite(path=str(path)))


def record(suite, tmp_path, *, plan, seed=0, runner=None):
    """Score a suite and return the scorecard and events that it wrote."""
    engine = Drawn(suite, seed)
    events = [
        event
        for name in ("base", "tuned")
        for event in answer_all(suite, engine, runner, plan, name)
    ]
    write_item_events(tmp_path / "events.jsonl", events)
    kind = None if runner is None else runner.kind
    card = to_scorecard(suite, events, plan, {"max_new_tokens": 99}, sandbox=kind)
    return card, [dict(one) for one in read_item_events(tmp_path / "events.jsonl")]


def again(card, lines, suite):
    places = {"scorecard_path": Path("scorecard.json"), "events_path": Path("events.jsonl")}
    return recomputed(card, lines, suite, python=None, **places)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("plan", [Plan(), Plan(samples=3), Plan(samples=2, max_retries=2)])
@pytest.mark.parametrize("name", ["heldout", "jsonl", "programs", "mini_python"])
def test_what_scoring_wrote_is_accepted(name, plan, seed, tmp_path):
    """Nothing was executed here, so every answer is judged again in full."""
    made = {"heldout": heldout, "mini_python": lambda: mini_python(MiniPythonSuite(items=4))}
    made |= {"jsonl": lambda: jsonl(tmp_path), "programs": lambda: programs(tmp_path)}
    suite = made[name]()
    card, lines = record(suite, tmp_path, plan=plan, seed=seed)
    found = again(card, lines, heldout_of(card, lines) if name == "heldout" else suite)
    assert [str(one) for one in found.problems] == []
    is_repaired = any(line["attempts"] > 1 for line in lines)
    assert is_repaired == (plan.max_retries > 0)
    assert found.unverifiable == [EARLIER] * is_repaired


@pytest.mark.parametrize("seed", range(3))
def test_what_was_executed_is_accepted_and_labelled(runner, seed, tmp_path):
    """Verdicts of sandboxed programs, with repairs, are taken as recorded and labelled so."""
    suite = programs(tmp_path)
    plan = Plan(samples=2, max_retries=1)
    card, lines = record(suite, tmp_path, plan=plan, seed=seed, runner=runner)
    assert {line["task_success"] for line in lines} == {True, False}
    found = again(card, lines, suite)
    assert [str(one) for one in found.problems] == []
    assert found.unverifiable == [EARLIER, NOT_EXECUTED]


def test_a_verdict_that_needs_no_execution_is_given_again(tmp_path):
    """A record edited to pass is found, since the answer does not satisfy the row's check."""
    card, lines = record(jsonl(tmp_path), tmp_path, plan=Plan(), seed=1)
    bad = next(line for line in lines if not line["task_success"])
    passed = {"task_success": True, "semantic_task_success": True, "pass_1": True}
    bad |= {**passed, "repair_depth": 0, "time_to_first_valid_ms": 1.0, "error": None}
    for name in ("task_success", "semantic_task_success", "pass_at_1"):
        mine = [line for line in lines if line["condition"] == bad["condition"]]
        card.conditions[bad["condition"]][name] = sum(x["task_success"] for x in mine) / 2
    card.conditions[bad["condition"]]["time_to_first_valid_p50_ms"] = None
    problems = [str(one) for one in again(card, lines, jsonl(tmp_path)).problems]
    assert any("events.jsonl: task_success" in one for one in problems)


@pytest.mark.parametrize("field", ["prompt", "reference"])
def test_items_of_held_out_rows_are_bound_by_the_suite_s_digest(field, tmp_path):
    """The digest covers ids, prompts and references, which the event lines contain."""
    card, lines = record(heldout(), tmp_path, plan=Plan())
    for line in lines:
        if line["item_id"] == "f":
            line[field] = "another"
    (problem,) = again(card, lines, heldout_of(card, lines)).problems
    assert "do not match the suite's digest" in str(problem)


def test_a_verdict_without_a_sandbox_is_refused(tmp_path):
    """A record that claims success without any execution is refused."""
    suite = programs(tmp_path)
    card, lines = record(suite, tmp_path, plan=Plan(), seed=2)
    for line in lines:
        valid = {"repair_depth": 0, "time_to_first_valid_ms": 1.0, "outcome": "passed"}
        line |= {**valid, "pass_1": True, "task_success": True}
    card.conditions = {name: {} for name in card.conditions}
    problems = [str(one) for one in again(card, lines, suite).problems]
    assert any("events.jsonl: task_success" in one for one in problems)


def test_any_single_edit_of_a_figure_is_found(tmp_path):
    """Each metric of each condition is edited in turn."""
    card, lines = record(heldout(), tmp_path, plan=Plan(samples=2, max_retries=1), seed=3)
    pairs = itertools.chain.from_iterable(
        ((name, kpi) for kpi in stated) for name, stated in card.conditions.items()
    )
    for name, kpi in list(pairs):
        before = card.conditions[name][kpi]
        card.conditions[name][kpi] = 0.123 if before is None else before + 0.01
        problems = [str(one) for one in again(card, lines, heldout_of(card, lines)).problems]
        assert any(f"conditions.{name}.{kpi}" in one for one in problems), kpi
        card.conditions[name][kpi] = before


def test_another_python_is_named_where_an_answer_reads_otherwise(tmp_path):
    """Whether an answer parses can depend on Python; the message names the run's version."""
    card, lines = record(heldout(), tmp_path, plan=Plan(), seed=1)
    line = next(line for line in lines if line["parses"])
    line["completion"] = "def f(:"
    places = {"scorecard_path": Path("s"), "events_path": Path("e")}
    found = recomputed(card, lines, heldout_of(card, lines), python="3.99.1", **places)
    assert "the run had Python 3.99.1" in str(found.problems[0])
