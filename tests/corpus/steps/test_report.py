from __future__ import annotations

import builtins

import pytest

from mens_exp.artifacts.corpus_record import CorpusReport
from mens_exp.config.corpus import CorpusConfig, DedupeConfig, ReportConfig
from mens_exp.corpus.split import Side
from mens_exp.corpus.steps.report import RECORD, report
from mens_exp.corpus.steps.step import RowWriter, StepInput
from mens_exp.rows.schema import TrainingPair

KEY = "AKIA" + "IOSFODNN7QQQQQQQ"
ROWS = [
    TrainingPair(prompt="one", response="x = 1", language="python", category="maths"),
    TrainingPair(prompt="two", response="x  =  1", language="python", category="maths"),
    TrainingPair(prompt="three", response="def f(:", language="python", category=f"key {KEY}"),
    TrainingPair(prompt="four", response=f"the key is {KEY}"),
]


def made(tmp_path, rows, run=None, **values):
    for name in ("before", "after", "scratch"):
        (tmp_path / name).mkdir()
    with RowWriter(tmp_path / "before") as writer:
        for number, row in enumerate(rows):
            writer.write(row, Side.VAL if number == 0 else Side.TRAIN)
    config = CorpusConfig(
        report=ReportConfig(**{"processes": 1} | values), dedupe=DedupeConfig(processes=1)
    )
    step = StepInput(
        files=tuple(tmp_path / "before" / name for name in sorted(writer.rows)),
        directory=tmp_path / "after",
        scratch=tmp_path / "scratch",
        config=config,
        run=run,
    )
    result = report(step)
    assert (result.rows_in, result.rows_out, result.dropped) == (len(rows), len(rows), {})
    return CorpusReport.read(step.directory / RECORD)


def test_rows_are_measured_and_what_is_unknown_has_a_reason(tmp_path):
    """Values by hand; without a run the token counts are null with a reason."""
    found = made(tmp_path, ROWS)
    assert (found.rows, found.sides) == (4, {"train": 3, "val": 1})
    assert found.parse == {
        "": {"rows": 1, "parsed": None},
        "python": {"rows": 3, "parsed": 2},
    }
    assert found.constructs["python"]["occurring"] == {"Assign": 2, "Constant": 2, "Name": 2}
    assert "While" in found.constructs["python"]["absent"]
    assert found.duplicates is not None
    assert (found.duplicates["exact"], found.duplicates["near"]) == (1, 0)
    assert found.tokens is None
    assert found.unknown == {
        "tokens": "no run names the tokenizer",
        "parse.": "these rows name no language",
    }
    assert found.before == []


def test_no_secret_gets_into_the_record(tmp_path):
    """The record gives the place of a secret, in an answer or a label, but not its text."""
    found = made(tmp_path, ROWS)
    assert KEY not in (tmp_path / "after" / RECORD).read_text("utf-8")
    (finding,) = found.safety["findings"]
    assert finding["place"].endswith("train.jsonl:3")
    assert finding["shown"] == "AKIA… (20 characters)"
    assert [one["name"] for one in found.sources["category"]] == [
        "maths",
        "",
        "key AKIA… (20 characters)",
    ]


def test_shares_add_up_and_the_small_ones_are_put_together(tmp_path):
    """Of 59 categories 50 are listed, of which the first has two rows."""
    rows = [TrainingPair(prompt="p", response=str(n), category=f"{n % 59:02d}") for n in range(60)]
    shares = made(tmp_path, rows).sources["category"]
    assert len(shares) == 51
    assert (shares[0]["name"], shares[0]["rows"]) == ("00", 2)
    assert (shares[-1]["name"], shares[-1]["rows"]) == ("(others)", 9)
    assert sum(one["rows_share"] for one in shares) == pytest.approx(1)
    assert sum(one["characters_share"] for one in shares) == pytest.approx(1)


def test_tokens_are_those_of_the_run(tmp_path, tiny_config, tiny_base):
    """Counts follow the run's tokenizer, objective and sequence length; one of four rows is cut."""
    run = tiny_config("data.seq_len=64")
    rows = [*ROWS[:3], TrainingPair(prompt="four", response="y" * 100)]
    found = made(tmp_path, rows, run)
    assert found.tokens is not None
    assert (found.tokens["encoded_rows"], found.tokens["exact"]) == (4, True)
    assert (found.tokens["seq_len"], found.tokens["objective"]) == (64, "assistant")
    assert found.tokens["truncated_documents"] == 1
    assert found.tokens["lost_tokens"] > 40
    assert "tokens" not in found.unknown


def test_some_rows_stand_for_all(tmp_path, tiny_config, tiny_base):
    """Two of four rows are encoded, and the result is marked as an estimate."""
    found = made(tmp_path, ROWS, tiny_config(), token_rows=2)
    assert found.tokens is not None
    assert (found.tokens["encoded_rows"], found.tokens["exact"]) == (2, False)
    assert found.tokens["documents"] == 4


def test_a_tokenizer_that_is_not_here_is_unknown(
    tmp_path,
    tiny_config,
    monkeypatch,
):
    """A missing tokenizer gives null with a reason; Vox needs no files of a model."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "empty"))
    for name in ("hf", "vox"):
        (tmp_path / name).mkdir()
    found = made(tmp_path / "hf", ROWS, tiny_config())
    assert found.tokens is None
    assert "is not on this machine yet" in found.unknown["tokens"]
    assert made(tmp_path / "vox", ROWS, tiny_config("tokenizer=vox")).tokens is not None


def test_rows_that_cannot_be_encoded_are_no_end_of_the_report(tmp_path, tiny_config, tiny_base):
    """The reason names the row without quoting it."""
    template = tmp_path / "template.jinja"
    template.write_text("always the same")
    run = tiny_config(f"tokenizer.chat_template={template}")
    found = made(tmp_path, ROWS, run)
    assert found.tokens is None
    assert "drops the row's prompt" in found.unknown["tokens"]
    assert KEY not in found.unknown["tokens"]


def test_nobody_looks_for_duplicates_unasked(tmp_path):
    """Duplicates are null, and the reason names the setting."""
    found = made(tmp_path, ROWS, duplicates=False)
    assert found.duplicates is None
    assert found.unknown["duplicates"] == "corpus.report.duplicates is false"


def test_without_the_library_duplicates_are_unknown(tmp_path, monkeypatch):
    """The rest of the report is complete."""
    real = builtins.__import__

    def without(name, *rest):
        if name == "datasketch":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    from mens_exp.corpus import minhash

    minhash._signer.cache_clear()
    found = made(tmp_path, ROWS)
    assert found.duplicates is None
    assert "datasketch is needed" in found.unknown["duplicates"]
    assert found.rows == 4


def test_number_of_processes_does_not_change_the_record(tmp_path):
    """The record is the same for any number of processes over several chunks."""
    rows = [
        TrainingPair(prompt=f"p{n}", response=f"x{n % 7} = {n}", language="python")
        for n in range(1200)
    ]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    made(tmp_path / "one", rows)
    made(tmp_path / "two", rows, processes=2)
    texts = [(tmp_path / name / "after" / RECORD).read_text("utf-8") for name in ("one", "two")]
    assert texts[0] == texts[1]
