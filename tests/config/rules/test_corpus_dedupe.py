"""Settings of the corpus steps dedupe and report, and the order of these steps."""

from __future__ import annotations

import pytest

from mens_exp.config.overrides import check


def told(steps, *more):
    given = ["task=corpus", f"corpus.steps=[{steps}]", "corpus.input=a.jsonl", "corpus.output=out"]
    return [(one.where, one.what) for one in check([*given, *more], multirun=False).problems]


@pytest.mark.parametrize(
    ("steps", "more"),
    [
        ("dedupe", ["corpus.dedupe.threshold=0.7", "corpus.dedupe.permutations=256"]),
        ("validate,dedupe,split,report", ["data.seq_len=1024", "corpus.report.token_rows=null"]),
        ("split,dedupe,report", ["model=tiny_llama", "objective=causal"]),
        ("report", ["corpus.dedupe.threshold=0.9", "tokenizer=vox", "backend=burn"]),
        ("dedupe", ["corpus.dedupe.threshold=null", "corpus.dedupe.by=row"]),
    ],
)
def test_what_has_an_effect_is_accepted(steps, more):
    """The report reads the settings for duplicates and for encoding rows."""
    assert told(steps, *more) == []


@pytest.mark.parametrize(
    ("steps", "more", "where", "what"),
    [
        ("mix,dedupe", "corpus.mix.weights={a:1}", "corpus.steps", "dedupe cannot come after mix"),
        ("report,split", "seed=1", "corpus.steps", "report leaves no rows for another step"),
        (
            *("dedupe", "data.seq_len=9", "data.seq_len"),
            "has no effect without the step report",
        ),
        (
            *("split", "corpus.dedupe.by=row", "corpus.dedupe.by"),
            "has no effect without the step dedupe",
        ),
        (
            *("dedupe", "corpus.report.processes=1", "corpus.report.processes"),
            "has no effect without the step report",
        ),
        ("dedupe", "corpus.dedupe.threshold=0.3", "corpus.dedupe.threshold", "out of range"),
        ("dedupe", "corpus.dedupe.permutations=8", "corpus.dedupe.permutations", "out of range"),
        ("report", "corpus.report.token_rows=0", "corpus.report.token_rows", "out of range"),
    ],
)
def test_what_has_none_is_refused(steps, more, where, what):
    """Each is reported at its path; a wrong order is reported even beside an unread seed."""
    assert any(place == where and what in said for place, said in told(steps, more))


def test_settings_of_near_duplicates_need_a_threshold():
    """Exact deduplication has no shingles and no signatures."""
    more = ["corpus.dedupe.threshold=null", "corpus.dedupe.shingle_tokens=3"]
    why = "with corpus.dedupe.threshold=null, which looks for exact duplicates alone"
    assert told("dedupe", *more) == [("corpus.dedupe.shingle_tokens", f"has no effect {why}")]


def test_a_report_that_looks_for_no_duplicates_reads_nothing_of_them():
    """With corpus.report.duplicates=false, corpus.dedupe belongs to a step that does not run."""
    more = ["corpus.report.duplicates=false", "corpus.dedupe.by=row"]
    assert told("report", *more) == [("corpus.dedupe.by", "has no effect without the step dedupe")]
