from __future__ import annotations

import pytest

from mens_exp.config.corpus import GenerateConfig
from mens_exp.corpus.generator.generate import SIDES
from mens_exp.corpus.generator.generate import generate as tasks_of
from mens_exp.corpus.split import Side
from mens_exp.corpus.steps.extract import generate
from mens_exp.errors import DataError
from mens_exp.rows.schema import TrainingPair


def test_rows_of_the_training_families_follow_those_that_there_are(work):
    """Generated rows are appended with their difficulty; validation families are not used."""
    before = TrainingPair(prompt="p", response="r")
    config = GenerateConfig(rows=12, seed=5)
    result = work.do(generate, [work.file("a.jsonl", [before])], generate=config)
    first, *rows = work.lines("rows.jsonl")
    assert first == {"prompt": "p", "response": "r"}
    expected = tasks_of(Side.TRAIN, 12, 5, 0.25).tasks
    assert [row["response"] for row in rows] == [task.solution for task in expected]
    assert [row["difficulty"] for row in rows] == [task.difficulty for task in expected]
    groups = [row["group"].removeprefix("generated::") for row in rows]
    assert {SIDES[group] for group in groups} == {Side.TRAIN}
    assert result.facts == {"passed_on": 1, "generated": 12}


def test_more_rows_than_there_are_tasks_are_refused(work, monkeypatch):
    """The error names the setting."""
    monkeypatch.setattr(
        "mens_exp.corpus.generator.generate._next", lambda *_: None
    )  # exhausted families
    with pytest.raises(DataError, match=r"corpus\.generate\.rows: .*at most 0"):
        work.do(generate, [], generate=GenerateConfig(rows=3))
