from __future__ import annotations

import pytest

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.metrics import METRICS
from mens_exp.config.suite import MiniPythonSuite
from mens_exp.evals.attempts import FirstItems, Plan, measure
from mens_exp.evals.engines import Completion
from mens_exp.evals.kpis import KPIS
from mens_exp.evals.program_suite import mini_python
from mens_exp.evals.suite import Runner
from mens_exp.sandbox.program import Limits

BROKEN = "def f("


class Fixed:
    """An engine that gives fixed answers and counts the requests."""

    def __init__(self, texts):
        self.texts, self.asked = texts, 0

    def complete(self, requests):
        self.asked += len(requests)
        return [
            Completion(text=text, tokens_in=1, tokens_out=3, is_finished=True, latency_ms=4.0)
            for _, text in zip(requests, self.texts, strict=True)
        ]


@pytest.fixture
def suite():
    return mini_python(MiniPythonSuite(items=6))


@pytest.fixture
def manifest():
    return Manifest(
        run_id="run",
        task="train",
        started_utc="2026-11-20T05:58:01.123Z",
        config_digest="ab" * 32,
        seed=42,
    )


def test_the_metrics_are_kpis_of_the_table():
    """The metrics use the names, units and directions of KPIs that need no whole run or data."""
    during = {n.removeprefix("eval/"): m for n, m in METRICS.items() if n.startswith("eval/")}
    measured = {name for name, kpi in KPIS.items() if kpi.field is not None}
    assert during.keys() == measured - {"coverage"}  # items that a specification adds
    for name, metric in during.items():
        assert (metric.unit, metric.direction) == (KPIS[name].unit, KPIS[name].direction.value)


def test_shares_are_of_the_first_items(suite, manifest, sandbox):
    """Of the first four items two are references and pass, two do not parse; no other is asked."""
    right = [item.reference for item in suite.items[:2]]
    engine = Fixed([*right, BROKEN, BROKEN])
    runner = Runner(sandbox=sandbox, limits=Limits())
    found = measure(FirstItems(suite, 4), engine, runner, Plan(), manifest)
    assert (found.items, engine.asked) == (4, 4)
    names = ("parse_rate", "compile_pass_1", "task_success", "tokens_out", "latency_ms")
    assert [found.values[f"eval/{name}"] for name in names] == [0.5, 0.5, 0.5, 3.0, 4.0]
    assert [event["item_id"] for event in found.events] == [item.id for item in suite.items[:4]]
    assert found.unknown["eval/pass_at_k"]


def test_what_nothing_ran_is_unknown_with_its_reason(suite, manifest):
    """Without a sandbox the task success is unknown, not zero."""
    found = measure(FirstItems(suite, 2), Fixed([BROKEN] * 2), None, Plan(), manifest)
    assert found.values["eval/parse_rate"] == 0.0
    assert "eval/task_success" not in found.values
    assert "sandbox" in found.unknown["eval/task_success"]


def test_more_items_than_there_are_is_all_of_them(suite, manifest):
    """All items are used, and the suite is not modified."""
    found = measure(FirstItems(suite, 99), Fixed([BROKEN] * 6), None, Plan(), manifest)
    assert found.items == len(suite.items) == 6
