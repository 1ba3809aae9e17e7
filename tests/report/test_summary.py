from __future__ import annotations

import shlex

import pytest

from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.report import run_page, summary, write
from mens_exp.report.summary import load


@pytest.mark.parametrize(
    ("tuned", "change", "tone"),
    [
        (1.5, "\N{MINUS SIGN}25.0%", "good"),
        (2.2, "+10.0%", "bad"),
        (2.0, "+0.0%", "quiet"),
    ],
)
def test_val_loss_is_better_when_lower(write_run, tuned, change, tone):
    """The base model's loss is 2."""
    results = {"base_val_loss": 2.0, "tuned_val_loss": tuned}
    pair = summary.val_loss(load(write_run(results=results)))
    assert (pair.base.text, pair.change, pair.tone) == ("2.0000", change, tone)


def test_val_loss_falls_back_on_telemetry(write_run):
    """A killed run has no results but may have validations."""
    pair = summary.val_loss(load(write_run(results={})))
    assert (pair.base.text, pair.tuned.text) == ("2.0000", "1.5000")


@pytest.mark.parametrize(
    ("step", "steps", "detail"),
    [(3, 6, "adapter of step 3 of 6"), (6, 6, ""), (None, 6, ""), (3, None, "")],
)
def test_an_adapter_that_is_not_the_last_says_which_it_is(write_run, step, steps, detail):
    """The step is shown beside the tuned loss, which belongs to that adapter."""
    results = {"tuned_val_loss": 1.5, "adapter_step": step, "steps": steps}
    pair = summary.val_loss(load(write_run(results=results)))
    assert (pair.tuned.detail, pair.base.detail) == (detail, "")


def test_parse_rate_carries_its_counts(write_run):
    """10 and 14 of 16 parse; one of 16 items is 6.25 points."""
    pair = summary.parse_rate(load(write_run()))
    assert (pair.base.text, pair.base.detail) == ("62.5%", "10 of 16")
    assert (pair.change, pair.tone) == ("+25.0 points", "good")
    assert pair.note == "16 items: each is worth 6.25 points"


def test_a_failed_run_has_reasons_for_every_reading(failed_run):
    """No value is invented."""
    records = load(failed_run)
    pairs = (summary.val_loss(records), summary.parse_rate(records))
    cells = [*summary.cost(records), *(side for p in pairs for side in (p.base, p.tuned))]
    assert {(cell.text, cell.absent) for cell in cells} == {("", "not reached: the run failed")}
    assert all(pair.change == "" and pair.tone == "quiet" for pair in pairs)


def test_headline_says_what_changed(write_run):
    """One sentence has both losses."""
    assert summary.headline(load(write_run())) == (
        "After 3 steps the validation loss is 1.5000 nats per token; "
        "the base model's is 2.0000 (\N{MINUS SIGN}25.0%)."
    )


def test_headline_of_a_failed_run_claims_nothing(failed_run):
    """It only says that the run failed."""
    assert summary.headline(load(failed_run)).startswith("The run failed")


def test_command_survives_a_shell(write_run):
    """An override with a space is parsed back as one word."""
    words = shlex.split(summary.command(load(write_run())))
    assert words == ["python", "-m", "mens_exp", "optim.lr=2e-4", "data.path=my rows.jsonl"]


def test_answers_to_one_prompt_stand_together(write_run, item):
    """Of two items one was completed only by the base model."""
    events = [item("base", "a", item_id="x"), item("base", "b"), item("tuned", "c", item_id="x")]
    first, second = summary.items(load(write_run(events)))
    assert [(one.who, one.text) for one in first.answers] == [("base", "a"), ("tuned", "c")]
    assert [(one.who, one.text) for one in second.answers] == [("base", "b"), ("tuned", None)]


def test_bits_per_byte_stand_beside_the_loss_where_they_are_known(
    write_run,
):
    """Lower is better; without values there is no row."""
    known = {"base_val_bits_per_byte": 1.0, "tuned_val_bits_per_byte": 0.5, "val_text_bytes": 100}
    losses = {"base_val_loss": 2.0, "tuned_val_loss": 1.0}
    pairs = summary.pairs(load(write_run(results=losses | known)))
    (pair,) = [one for one in pairs if "bits per byte" in one.label]
    assert (pair.base.text, pair.tuned.text, pair.tone) == ("1.0000", "0.5000", "good")
    assert pair.change == "\N{MINUS SIGN}50.0%"
    unknown = dict.fromkeys(known)
    labels = [one.label for one in summary.pairs(load(write_run(results=losses | unknown)))]
    assert labels == ["Validation loss", "Held-out completions that parse"]


def scored(run, *, sandbox):
    """Replace the run's scorecard by one of tasks."""
    Scorecard(
        suite="mini_python",
        suite_digest="ab" * 32,
        items=8,
        generation={"engine": "hf"},
        conditions={
            "base": {"parse_rate": 0.5, "task_success": 0.125},
            "tuned": {"parse_rate": 0.75, "task_success": 0.5},
        },
        sandbox=sandbox,
    ).write(run.scorecard)


def test_tasks_done_stand_before_what_parses(write_run):
    """The gain is in points, and the suite is named."""
    run = write_run()
    scored(run, sandbox="bubblewrap")
    tasks, parses = summary.pairs(load(run))[-2:]
    assert (tasks.label, tasks.base.text, tasks.tuned.text) == (
        "Tasks of mini_python done",
        "12.5%",
        "50.0%",
    )
    assert (tasks.change, tasks.tone) == ("+37.5 points", "good")
    assert tasks.note == "8 items: each is worth 12.5 points"
    assert parses.label == "Answers to mini_python that parse"
    assert summary.unsafe(load(run)) == ""


def test_programs_without_isolation_are_told_everywhere(write_run, screen):
    """The report, the card and the terminal all say so."""
    run = write_run()
    scored(run, sandbox="unsafe")
    records = load(run)
    said = "no evidence for a promotion"
    assert said in summary.unsafe(records)
    assert said in write.render_page(records)
    assert said in write.render_card(records)
    assert said in screen(run_page.outcome(records, most=3), 200)


@pytest.mark.parametrize(
    ("changes", "words", "tone"),
    [
        ({"task_success": True, "parses": True}, "passes", "good"),
        ({"task_success": False, "outcome": "failed_test"}, "failed test", "bad"),
        ({"task_success": False, "outcome": None}, "does not pass", "bad"),
        ({"parses": False}, "does not parse", "bad"),
        ({"parses": None}, "answered", "quiet"),
    ],
)
def test_an_outcome_says_the_most_that_is_known(item, changes, words, tone):
    """Task success is shown rather than parsing if both are known."""
    outcome = summary.outcome_of(item("base", "x", **changes))
    assert (outcome.words, outcome.tone) == (words, tone)
