from __future__ import annotations

import json

import pytest

from mens_exp.artifacts.scorecard import Samples, Scorecard, read_item_events
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.evaluation import NoSandbox
from mens_exp.config.suite import (
    HeldoutSyntaxSuite,
    JsonlCheck,
    JsonlSuite,
    MiniPythonSuite,
    NoSuite,
)
from mens_exp.errors import DataError
from mens_exp.rows.schema import TrainingPair
from mens_exp.tasks.run import open_run
from mens_exp.tasks.scoring import sample, score
from mens_exp.tokenizer.implementations import HfTokenizer

ROW = TrainingPair(prompt="Write f.", response="def f(): pass")
TEXT = TrainingPair(prompt="", response="It was a bright cold day.")


@pytest.fixture
def config_with(tiny_config):
    """Return a configuration with a suite, but without a sandbox to run programs in."""

    def configured(suite):
        config = tiny_config()
        config.suite, config.sandbox = suite, NoSandbox()
        return config

    return configured


@pytest.fixture
def run(cell, tmp_path):
    with open_run(tmp_path / "run", cell) as opened:
        yield opened


@pytest.fixture
def tokenizer(tiny_base):
    return HfTokenizer.from_directory(tiny_base.directory)


class Answers:
    """A backend that has one answer with the adapter off, and another with it on."""

    max_positions = 2048

    def __init__(self, tokenizer, *, base, tuned):
        self._ids = {True: tokenizer.encode_all([base])[0], False: tokenizer.encode_all([tuned])[0]}
        self._is_base = False

    def base_only(self):
        return self

    def __enter__(self):
        self._is_base = True

    def __exit__(self, *_):
        self._is_base = False

    def generate(self, prompts, *, on_end, **_):
        for at in range(len(prompts)):
            on_end(at, 0.5)
        return [self._ids[self._is_base] for _ in prompts]


def test_base_and_tuned_are_told_apart(run, tokenizer, config_with):
    """The base answers with the adapter off; each item has one event per condition."""
    backend = Answers(tokenizer, base="def f(", tuned="def f(): pass<|im_end|>")
    score(config_with(HeldoutSyntaxSuite(items=4)), run, backend, [ROW], tokenizer)
    card = Scorecard.read(run.dir.scorecard)
    assert card.items == 1
    assert {name: kpis["parsed"] for name, kpis in card.conditions.items()} == {
        "base": 0,
        "tuned": 1,
    }
    events = read_item_events(run.dir.events)
    assert [(e["condition"], e["completion"], e["parses"], e["finished"]) for e in events] == [
        ("base", "def f(", False, False),
        ("tuned", "def f(): pass", True, True),
    ]
    last = read_events(run.dir.telemetry)[-1]
    assert (last["event"], last["payload"]["conditions"]) == ("scorecard", card.conditions)


def test_a_real_graph_answers_as_base_and_as_tuned(
    run,
    tokenizer,
    tiny_backend,
    config_with,
):
    """The base's answer is that of a graph without an adapter; a large B changes it."""
    backend = tiny_backend(live=True)
    for name, parameter in backend.trainable().items():
        parameter.data.mul_(50 if name.endswith("lora_b") else 1)
    config = config_with(HeldoutSyntaxSuite(items=1, max_new_tokens=16))
    score(config, run, backend, [ROW], tokenizer)
    base, tuned = (e["completion"] for e in read_item_events(run.dir.events))
    plain = tiny_backend()
    prompt = tokenizer.encode_all(
        [tokenizer.render([{"role": "user", "content": ROW.prompt}], add_generation_prompt=True)]
    )
    ids = plain.generate(prompt, max_new_tokens=16, end_ids=tokenizer.end_ids)
    assert base == tokenizer.decode(ids[0])
    assert tuned != base


@pytest.mark.parametrize(
    ("suite", "heldout", "reason"),
    [
        (NoSuite(), [ROW], "suite=none"),
        (HeldoutSyntaxSuite(), [], "no row is held out; see data.heldout_frac"),
        (
            HeldoutSyntaxSuite(max_new_tokens=3),
            [ROW],
            "no held-out answer is under suite.max_new_tokens=3",
        ),
        (
            HeldoutSyntaxSuite(),
            [TEXT],
            "the held-out rows are plain texts, which ask nothing; take suite=none",
        ),
    ],
    ids=["suite=none", "no rows", "no short answer", "plain texts"],
)
def test_no_scorecard_has_a_reason(
    run,
    tokenizer,
    config_with,
    suite,
    heldout,
    reason,
):
    """Nothing is generated or written, and the reason is recorded."""
    backend = Answers(tokenizer, base="", tuned="")
    score(config_with(suite), run, backend, heldout, tokenizer)
    assert run.manifest.unknown["scorecard"] == reason
    assert not run.dir.scorecard.exists()
    assert not run.dir.events.exists()


def test_without_a_suite_both_models_answer_some_held_out_rows(run, tokenizer, config_with):
    """The first rows by id, with the prompt, the row's own answer, and how each answer ended."""
    backend = Answers(tokenizer, base="I do not know", tuned="def f(): pass<|im_end|>")
    rows = [TrainingPair(prompt=f"Write f{n}.", response=f"def f{n}(): pass") for n in range(5)]
    config = config_with(NoSuite(items=2))
    sample(config, run, backend, rows, tokenizer)
    found = Samples.read(run.dir.samples)
    first = sorted(rows, key=lambda pair: pair.id)[:2]
    assert [(one["item_id"], one["prompt"], one["reference"]) for one in found.items] == [
        (pair.id, pair.prompt, pair.response) for pair in first
    ]
    base, tuned = (found.items[0]["answers"][name] for name in ("base", "tuned"))
    assert (base["text"], base["finished"]) == ("I do not know", False)
    assert (tuned["text"], tuned["finished"]) == ("def f(): pass", True)
    assert not run.dir.scorecard.exists()


@pytest.mark.parametrize(
    ("suite", "heldout"),
    [
        (NoSuite(items=0), [ROW]),
        (NoSuite(), []),
        (NoSuite(), [TEXT]),
        (HeldoutSyntaxSuite(), [ROW]),
    ],
    ids=["none asked for", "no rows", "plain texts", "a suite asks"],
)
def test_nothing_is_sampled_where_nobody_asks(run, tokenizer, config_with, suite, heldout):
    """No samples are requested, and no empty record is written."""
    backend = Answers(tokenizer, base="", tuned="")
    sample(config_with(suite), run, backend, heldout, tokenizer)
    assert not run.dir.samples.exists()


def test_plain_texts_are_left_out_of_what_is_asked(run, tokenizer, config_with):
    """A plain text has no prompt, so suite and samples use the other held-out rows."""
    backend = Answers(tokenizer, base="no", tuned="yes")
    score(config_with(HeldoutSyntaxSuite()), run, backend, [TEXT, ROW], tokenizer)
    sample(config_with(NoSuite()), run, backend, [TEXT, ROW], tokenizer)
    assert {one["item_id"] for one in read_item_events(run.dir.events)} == {ROW.id}
    assert [one["item_id"] for one in Samples.read(run.dir.samples).items] == [ROW.id]


def test_equal_rows_are_sampled_once(run, tokenizer, config_with):
    """The file may have a row twice, but its record has each item once."""
    backend = Answers(tokenizer, base="no", tuned="yes")
    sample(config_with(NoSuite()), run, backend, [ROW, ROW], tokenizer)
    assert [one["item_id"] for one in Samples.read(run.dir.samples).items] == [ROW.id]


def test_samples_name_each_item_once(tmp_path):
    """A record that names an item twice is refused."""
    one = {"item_id": "a", "prompt": "p", "reference": "r", "answers": {}}
    path = tmp_path / "samples.json"
    Samples(max_new_tokens=1, items=[one]).write(path)
    text = path.read_text("utf-8")
    assert Samples.read(path).items == [one]
    record = json.loads(text)
    path.write_text(json.dumps({**record, "items": [one, one]}), "utf-8")
    with pytest.raises(DataError, match="twice"):
        Samples.read(path)


def test_without_a_sandbox_tasks_are_null_and_syntax_is_measured(run, tokenizer, config_with):
    """The scorecard has the reason, the manifest the remedy; there is no other way to execute."""
    backend = Answers(tokenizer, base="def f(", tuned="def f(): pass<|im_end|>")
    score(config_with(MiniPythonSuite(items=2)), run, backend, [], tokenizer)
    card = Scorecard.read(run.dir.scorecard)
    assert (card.sandbox, card.self_test, card.items) == (None, None, 2)
    for condition, parses in (("base", 0.0), ("tuned", 1.0)):
        kpis = card.conditions[condition]
        assert (kpis["compile_at_1"], kpis["task_success"]) == (parses, None)
        assert "install bubblewrap" in card.unknown[f"conditions.{condition}.task_success"]
    assert any("nothing that a model wrote was executed" in note for note in run.manifest.notes)


def test_a_suite_that_fails_its_own_test_scores_nothing(
    run,
    tokenizer,
    config_with,
    tmp_path,
):
    """An empty answer matches the pattern, so that any score would be meaningless."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "?", "expected": "a*"}')
    suite = JsonlSuite(path=str(rows), check=JsonlCheck.regex)
    backend = Answers(tokenizer, base="", tuned="")
    score(config_with(suite), run, backend, [], tokenizer)
    said = "suite=jsonl failed its own test: empty answers judged right: 1 (1 in all)"
    assert run.manifest.unknown["scorecard"] == said
    assert not run.dir.scorecard.exists()
