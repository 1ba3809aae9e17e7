from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from item_events import item_event

from mens_exp.evals.kpis import SUMMARY_KPIS, pass_at_k, percentile, summarise


def event(**changes):
    """Return the event of an item that succeeds at its first attempt."""
    solved = dict.fromkeys(("pass_1", "task_success", "semantic_task_success"), True)
    return item_event(**{**solved, "time_to_first_valid_ms": 12.0, **changes})


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 3), (4, 0, 2), (4, 4, 1), (6, 1, 6), (3, 2, 2)])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(n, c, k):
    """The oracle counts every way to choose k of the n samples."""
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.95, 3.0), ([4, 1, 3, 2], 0.5, 2.5), ([0, 10], 0.95, 9.5), (range(101), 0.95, 95)],
)
def test_a_percentile_lies_between_its_neighbours(values, share, expected):
    """Percentiles are interpolated linearly, as by numpy."""
    assert percentile(list(values), share) == pytest.approx(expected)


def test_findings_of_a_linter_are_summed_up():
    """The clean share is of all answers, the mean of those that compile; no linter, no KPI."""
    reason = {"lint_warnings": "it does not compile"}
    events = [
        event(item_id="a", lint_clean=True, lint_warnings=0, lints=[]),
        event(item_id="b", lint_clean=False, lint_warnings=3, lints=["x", "y", "y"]),
        event(item_id="c", lint_clean=False, lint_warnings=None, unknown=reason),
        event(item_id="d", lint_clean=False, lint_warnings=3, lints=["x", "y", "y"]),
    ]
    kpis, unknown = summarise(events, items=4, samples=1, max_retries=0)
    assert (kpis["lint_clean"], kpis["lint_warnings_mean"]) == (0.25, 2.0)
    none_compiles, unknown = summarise([events[2]], items=1, samples=1, max_retries=0)
    assert none_compiles["lint_warnings_mean"] is None
    assert unknown["lint_warnings_mean"] == "it does not compile"
    assert "lint_clean" not in summarise([event()], items=1, samples=1, max_retries=0)[0]


def test_every_kpi_is_summed_up():
    """Values worked out by hand: of four items, three succeed, one after a repair."""
    events = [
        event(item_id="a", latency_ms=10.0),
        event(
            item_id="b",
            pass_1=False,
            compile_pass_1=False,
            repair_depth=2,
            attempts=3,
            error_count=2,
            latency_ms=30.0,
            time_to_first_valid_ms=30.0,
            repair_stalled=True,
        ),
        event(
            item_id="c",
            parses=False,
            compile_pass_1=False,
            compile_pass_n=False,
            pass_1=False,
            task_success=False,
            semantic_task_success=False,
            repair_depth=None,
            time_to_first_valid_ms=None,
            attempts=3,
            error_count=3,
            placeholder_marker_hits=4,
            anti_stub_pass=False,
            latency_ms=50.0,
            unknown={"repair_depth": "no attempt is valid"},
        ),
        event(item_id="d", strictness=False, latency_ms=20.0, time_to_first_valid_ms=24.0),
    ]
    kpis, unknown = summarise(events, items=4, samples=1, max_retries=2)
    assert kpis | {"pass_at_k": None} == {
        "parse_rate": 0.75,
        "parsed": 3,
        "completed": 4,
        "compile_at_1": 0.5,
        "compile_at_n": 0.75,
        "canonical": 1.0,
        "strictness": 0.75,
        "task_success": 0.75,
        "semantic_task_success": 0.75,
        "anti_stub": 0.75,
        "trivial_placeholder": 0.0,
        "placeholder": 0.25,
        "richness": 1.0,
        "attempts_mean": 2.0,
        "errors_mean": 1.25,
        "tokens_in_mean": 5.0,
        "tokens_out_mean": 7.0,
        "pass_at_1": 0.5,
        "pass_at_k": None,
        "repair_depth_mean": pytest.approx(2 / 3),
        "repair_stall_rate": 0.25,
        "time_to_first_valid_p50_ms": 24.0,
        "latency_p50_ms": 25.0,
        "latency_p95_ms": pytest.approx(47.0),
    }
    assert set(kpis) == set(SUMMARY_KPIS)
    assert unknown == {"pass_at_k": "eval.samples=1: there is no k above 1"}


def test_samples_of_an_item_count_together():
    """Of two samples each, one item has one correct and the other has none."""
    events = [event(item_id="a"), event(item_id="a", pass_1=False, task_success=False)]
    events += [event(item_id="b", pass_1=False, task_success=False) for _ in range(2)]
    kpis, _ = summarise(events, items=2, samples=2, max_retries=0)
    assert (kpis["pass_at_1"], kpis["pass_at_k"], kpis["task_success"]) == (0.25, 0.5, 0.25)


def test_what_one_item_lacks_the_condition_lacks():
    """If one item is unknown the metric is null, and the reason says of how many."""
    lacking = event(item_id="b", task_success=None, unknown={"task_success": "no sandbox"})
    kpis, unknown = summarise([event(), lacking], items=2, samples=1, max_retries=0)
    assert kpis["task_success"] is None
    assert unknown["task_success"] == "1 of 2: no sandbox"
    assert kpis["repair_depth_mean"] is kpis["repair_stall_rate"] is None
    assert unknown["repair_depth_mean"] == "eval.max_retries=0: nothing is repaired"


def test_nothing_valid_has_no_time_to_it():
    """If nothing is valid, the median time to the first valid answer is unknown."""
    never = event(
        repair_depth=None,
        time_to_first_valid_ms=None,
        unknown={"time_to_first_valid_ms": "no attempt is valid"},
    )
    kpis, unknown = summarise([never], items=1, samples=1, max_retries=1)
    assert kpis["time_to_first_valid_p50_ms"] is kpis["repair_depth_mean"] is None
    assert unknown["time_to_first_valid_p50_ms"] == "no attempt is valid"
    assert unknown["repair_depth_mean"] == "no answer became valid"


def test_groups_have_a_success_of_their_own():
    """The success of a group is the mean over its own items."""
    events = [
        event(item_id="a", group="write"),
        event(item_id="b", group="repair", task_success=False),
        event(item_id="c", group="repair"),
    ]
    kpis, _ = summarise(events, items=3, samples=1, max_retries=0)
    assert (kpis["write_task_success"], kpis["repair_task_success"]) == (1.0, 0.5)


def test_the_documentation_explains_every_kpi_of_a_scorecard():
    """Each KPI is in the table of how-to/suites.md under its name in the scorecard."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "suites.md").read_text("utf-8")
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    explained = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert set(SUMMARY_KPIS) <= explained
