from __future__ import annotations

from types import SimpleNamespace

import pytest

from mens_exp.config.corpus import (
    CorpusConfig,
    ExtractConfig,
    MixStepConfig,
    SplitStepConfig,
    ValidateConfig,
)
from mens_exp.config.data import MixStop
from mens_exp.config.evaluation import BubblewrapSandbox, NoSandbox
from mens_exp.config.rules import data as rules


def config(
    steps,
    task="corpus",
    sandbox=None,
    **values,
):
    usual = {"input": "rows.jsonl", "output": "out"}
    corpus = CorpusConfig(steps=steps, **{**usual, **values})
    return SimpleNamespace(task=SimpleNamespace(name=task), corpus=corpus, sandbox=sandbox)


def told(steps, **values):
    return "\n".join(map(str, rules.corpus_problems(config(steps, **values))))


@pytest.mark.parametrize(
    "steps",
    [
        ["extract", "validate", "split", "curriculum"],
        ["extract", "generate", "validate", "split"],
        ["validate"],
        ["split", "validate"],
        ["curriculum", "split"],
    ],
)
def test_steps_in_an_order_with_a_meaning_are_taken(steps):
    """These steps give no problem."""
    assert told(steps) == ""


@pytest.mark.parametrize(
    ("steps", "what"),
    [
        ([], "no step given"),
        (["extrct"], "the nearest is extract"),
        (["split", "split"], "the step split is listed 2 times"),
        (["validate", "extract"], "extract cannot come after validate"),
        (["split", "generate"], "generate cannot come after split"),
        (["mix", "decontaminate"], "decontaminate cannot come after mix"),
        (["mix", "split"], "split cannot come after mix"),
        (["curriculum", "mix"], "mix cannot come after curriculum"),
    ],
)
def test_steps_without_a_meaning_are_refused(steps, what):
    """Each message gives the reason."""
    assert what in told(steps, mix=MixStepConfig(weights={"a": 1.0}))


def test_all_that_is_wrong_is_told_together():
    """Two unknown steps, and a wrong setting of the valid step."""
    message = told(["a", "b", "split"], split=SplitStepConfig(val_frac=0.6, heldout_frac=0.4))
    assert message.count("unknown step") == 2
    assert "no rows are left to train on" in message


def test_only_generate_begins_without_an_input():
    """Any other first step has nothing to read."""
    assert told(["generate"], input=None) == ""
    assert "add corpus.input=<path>" in told(["split"], input=None)
    assert "does not name any files" in told(["split"], input=[])
    assert "does not name any files" in told(["split"], input={"a": 1})
    assert "no output directory given" in told(["split"], output=None)


def test_languages_that_nothing_reads_are_refused():
    """The message suggests the nearest supported language."""
    assert "the nearest is rust" in told(["extract"], extract=ExtractConfig(languages=["ruts"]))
    assert "nothing to extract" in told(["extract"], extract=ExtractConfig(languages=[]))


def test_one_name_for_several_projects_is_refused():
    """Their files would share groups."""
    named = ExtractConfig(project="mine")
    assert told(["extract"], extract=named, input=["a"]) == ""
    assert "one name for several projects" in told(["extract"], extract=named, input=["a", "b"])


@pytest.mark.parametrize(
    ("mix", "what"),
    [
        (MixStepConfig(), "no weights"),
        (MixStepConfig(weights={"a": 0.0}), "not a weight"),
        (MixStepConfig(weights={"a": float("nan")}), "not a weight"),
        (MixStepConfig(weights={"a": 1.0}, stop=MixStop.budget), "no budget to stop at"),
    ],
)
def test_a_mix_that_cannot_be_drawn_is_refused(mix, what):
    """Weights and budget are checked."""
    assert what in told(["mix"], mix=mix)


def test_code_is_compiled_in_a_sandbox_alone():
    """sandbox=none contradicts compile=true; either one alone is accepted."""
    compiles = ValidateConfig(compile=True)
    assert "nothing is compiled without" in told(
        ["validate"], validate=compiles, sandbox=NoSandbox()
    )
    assert told(["validate"], validate=compiles, sandbox=BubblewrapSandbox()) == ""
    assert told(["validate"], sandbox=NoSandbox()) == ""


def test_other_tasks_are_not_asked():
    """A training run has no corpus steps."""
    assert list(rules.corpus_problems(config([], task="train"))) == []
