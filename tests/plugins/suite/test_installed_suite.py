"""A suite of an installed package: one object, one YAML, and this test."""

from __future__ import annotations

import json
from string import ascii_lowercase

import pytest

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import read_item_events
from mens_exp.config.suite import SuiteConfig, SuiteSpec
from mens_exp.errors import SetupError
from mens_exp.evals.suite import suite_class

BASE = ("task=evaluate", "path=base", "model=tiny_llama", "trainer=cpu", "logger=none")
LETTERS = ("suite=letters", "suite.items=26", "suite.max_new_tokens=64", "eval.temperature=1")


def test_a_base_is_scored_on_an_installed_suite(typed, tmp_path):
    """Each answer as the package judges it; the scorecard has the suite's own test and digest."""
    typed(*BASE, *LETTERS, "hydra.run.dir=scored")
    run = RunDir(tmp_path / "scored")
    card = json.loads(run.scorecard.read_text("utf-8"))
    events = read_item_events(run.events)
    assert [event["item_id"] for event in events] == list(ascii_lowercase)
    judged = [event["item_id"] in event["completion"].casefold() for event in events]
    assert {True, False} == set(judged)
    assert [event["task_success"] for event in events] == judged
    base = card["conditions"]["base"]
    assert (card["suite"], base["task_success"]) == ("letters", pytest.approx(sum(judged) / 26))
    assert base["compile_at_1"] is None
    assert "judges words" in card["unknown"]["conditions.base.compile_at_1"]
    assert (card["self_test"]["references"], card["sandbox"]) == ({"whole": 26}, None)
    assert len(card["suite_digest"]) == 64


@pytest.mark.parametrize(
    ("word", "said"), [("suite.items=27", "suite.items"), ("suite.path=x", "suite.path")]
)
def test_its_settings_are_those_of_its_schema(typed, word, said):
    """With their bounds; nothing is loaded for others."""
    assert said in typed(*BASE, "suite=letters", word, code=2).stderr


@pytest.mark.parametrize("place", ["no_such_module:It", "math:pi", "mens_exp.errors:MensError"])
def test_a_suite_without_a_class_is_refused(place):
    """What freezes the items is imported when it is asked for, and has to be a suite."""
    spec = SuiteSpec(name="nowhere", schema=SuiteConfig, suite=place)
    with pytest.raises(SetupError, match="the suite nowhere cannot be used"):
        suite_class(spec)
