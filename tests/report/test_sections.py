from __future__ import annotations

from mens_exp.report import sections
from mens_exp.report.summary import load


def compared(records):
    """Return the rows by name, with planned, measured, ratio and basis as cells."""
    return {row[0]: row[1:] for row in sections.compared(records)}


def test_compared_puts_measured_beside_planned(write_run):
    """By hand: 6,000 of 6,144 tokens are 0.98; 274.4 of 262 seconds are 1.05."""
    rows = compared(load(write_run()))
    assert rows["steps"][2].text == "as planned"
    planned, _, ratio, _ = rows["tokens"]
    assert (planned.text, ratio.text, ratio.tone) == ("≈ 6,144", "0.98", "good")
    _, measured, ratio, _ = rows["training time"]
    assert (measured.text, ratio.text) == ("4 min 34 s", "1.05")
    assert rows["peak resident memory"][0].text == "≈ 2.00 GiB"


def test_compared_takes_the_gpu_where_there_is_one(write_run):
    """A plan for a GPU predicts GPU memory."""
    rows = compared(load(write_run(results={"peak_cuda_bytes": 1024**3}, unknown={})))
    assert rows["peak GPU memory"][1].text == "1.00 GiB"
    assert "peak resident memory" not in rows


def test_a_run_without_a_plan_says_so(failed_run):
    """There is nothing to compare."""
    (note,) = sections.planned(load(failed_run)).parts
    assert note.text == "There is no plan next to this run."


def test_a_null_fact_shows_its_reason(write_run):
    """An unknown fact is shown as its reason."""
    run = write_run(facts={"attention": None}, unknown={"facts.attention": "no batch was seen"})
    (cell,) = sections.facts(load(run))
    assert (cell.label, cell.text, cell.absent) == ("attention", "", "no batch was seen")


def test_inputs_keep_what_belongs_together(write_run):
    """Keys of the record are sorted, and rows of the table are grouped."""
    labels = [cell.label for cell in sections.inputs(load(write_run()))]
    assert labels == [
        "base model",
        "base source",
        "base weights SHA-256",
        "data: source",
        "data: training rows",
    ]


def test_attempts_are_told_when_there_were_several(write_run):
    """For a resumed run the starting checkpoint is shown."""
    first = {
        "started_utc": "2026-11-20T05:58:01.123Z",
        "ended_utc": None,
        "status": "started",
        "resumed_from_step": None,
    }
    assert sections.attempts(load(write_run(attempts=[first]))) == []
    second = {**first, "status": "succeeded", "resumed_from_step": 20}
    lines = sections.attempts(load(write_run(attempts=[first, second])))
    assert "with no recorded end" in lines[0]
    assert "resumed from step 20" in lines[1]
