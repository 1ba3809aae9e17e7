"""Training that ends with a scorecard from executed programs."""

from __future__ import annotations

import shutil

import pytest

from mens_exp.artifacts.scorecard import Scorecard, read_item_events


def test_training_ends_with_tasks_that_were_run(train_in, tmp_path):
    """The suite's self-test passed, each answer had one retry, and the sandbox is recorded."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is missing: apt-get install bubblewrap")
    settings = ["suite=mini_python", "suite.items=2", "suite.max_new_tokens=8"]
    drawing = ["eval.max_retries=1", "eval.samples=2", "eval.temperature=0.7"]
    run = train_in(tmp_path / "run", *settings, *drawing)
    card = Scorecard.read(run.scorecard)
    assert (card.sandbox, card.items) == ("bubblewrap", 2)
    assert card.self_test is not None
    assert card.self_test["references"] == {"every style": 18}
    assert card.self_test["stubs_passed"] == []
    for kpis in card.conditions.values():
        assert kpis["task_success"] == kpis["pass_at_k"] == 0.0  # two random layers
        assert kpis["attempts_mean"] == 2.0
        assert kpis["repair_stall_rate"] is not None
    events = read_item_events(run.events)
    assert len(events) == 8  # items * samples * conditions
    assert {event["attempts"] for event in events} == {2}
    assert len({event["completion"] for event in events}) > 2
    assert all(event["outcome"] is not None for event in events)
