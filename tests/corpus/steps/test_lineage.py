from __future__ import annotations

from mens_exp.artifacts.corpus_record import StepRecord
from mens_exp.corpus.steps.report import steps_before

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


def written(directory, source, made, **facts):
    directory.mkdir(parents=True)
    StepRecord(
        step=directory.name.partition("-")[2],
        key="0" * 64,
        settings={},
        made_by={},
        inputs={"rows.jsonl": source},
        outputs={
            "rows.jsonl": {"sha256": made, "rows": 3},
            "quarantine.jsonl": {"sha256": C, "rows": None},
        },
        rows_in=4,
        rows_out=3,
        dropped={"bad": 1},
        facts=facts,
        seconds=0.1,
        peak_bytes=None,
    ).write(directory / "step.json")
    return directory / "rows.jsonl"


def test_steps_are_followed_back_by_number_and_content(tmp_path):
    """Steps are matched by number and digest, also where a step changed nothing."""
    written(tmp_path / "01-extract", C, A)
    written(tmp_path / "02-validate", A, A)
    last = written(tmp_path / "03-dedupe", A, B)
    assert [one["step"] for one in steps_before([last])] == ["extract", "validate", "dedupe"]
    assert steps_before([last])[0] == {
        "step": "extract",
        "rows_in": 4,
        "rows_out": 3,
        "dropped": {"bad": 1},
        "sources": None,
    }


def test_what_another_corpus_left_is_not_taken_for_a_step(tmp_path):
    """A directory whose files are not the input of the next step is ignored."""
    written(tmp_path / "01-extract", C, B)
    last = written(tmp_path / "02-validate", A, A)
    assert [one["step"] for one in steps_before([last])] == ["validate"]


def test_given_files_were_made_by_no_step(tmp_path):
    """Plain input files, unreadable records and an empty list have no steps before them."""
    assert steps_before([tmp_path / "rows.jsonl"]) == []
    (tmp_path / "step.json").write_text("{}")
    assert steps_before([tmp_path / "rows.jsonl"]) == []
    assert steps_before([]) == []


def test_of_a_mix_the_shares_are_told(tmp_path):
    """The mix step records requested and actual shares."""
    about = {"weight": 3, "share_asked": 0.75, "share": 0.7, "rows": 7, "of": 9, "passes": 0.8}
    last = written(tmp_path / "01-mix", C, A, sources={"x": about})
    (mix,) = steps_before([last])
    assert mix["sources"] == {"x": {"share_asked": 0.75, "share": 0.7, "rows": 7, "passes": 0.8}}
