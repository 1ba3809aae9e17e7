from __future__ import annotations

import json

from mens_exp import cli
from mens_exp.artifacts.corpus_record import CorpusRecord, CorpusReport, StepRecord

WORDS = [f"word{n}" for n in range(120)]


def make(tmp_path, number, *more):
    return cli.main(
        [
            "task=corpus",
            f"corpus.input={tmp_path / 'rows.jsonl'}",
            f"corpus.output={tmp_path / 'out'}",
            "corpus.dedupe.processes=1",
            f"hydra.run.dir={tmp_path / f'run-{number}'}",
            *more,
        ]
    )


def test_duplicates_go_and_the_page_says_what_is_left(tmp_path, capsys):
    """Of twelve rows one is a copy and one a near-duplicate; a second run finds nothing to do."""
    texts = [f"answer number {n}" for n in range(10)] + ["answer  number 3", " ".join(WORDS)]
    texts.append(" ".join(WORDS[:115]))
    lines = [json.dumps({"prompt": f"p{n}", "response": text}) for n, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), "utf-8")
    asked = [
        *("corpus.steps=[dedupe,split,report]", "corpus.report.processes=1"),
        *("model=tiny_llama", "data.seq_len=64"),
    ]
    assert make(tmp_path, 1, *asked) == 0
    out = tmp_path / "out"
    assert f"Report: {out}/corpus_report.html" in capsys.readouterr().out.replace("\n", "")
    dedupe = StepRecord.read(out / "01-dedupe/step.json")
    assert dedupe.dropped == {"exact duplicate": 1, "near-duplicate": 1}
    assert len((out / "01-dedupe/duplicates.jsonl").read_text("utf-8").splitlines()) == 2
    report = CorpusReport.read(out / "03-report/corpus_report.json")
    assert report.rows == 11
    assert [one["step"] for one in report.before] == ["dedupe", "split"]
    assert report.duplicates is not None
    assert (report.duplicates["exact"], report.duplicates["near"]) == (0, 0)
    assert report.tokens is not None
    assert report.tokens["truncated_documents"] == 1
    page = (out / "corpus_report.html").read_text("utf-8")
    assert "11 rows" in page
    # The corpus consists of the files of the last step that outputs rows.
    assert {name.partition("/")[0] for name in CorpusRecord.read(out / "corpus.json").files} == {
        "02-split"
    }
    assert make(tmp_path, 2, *asked) == 0
    assert capsys.readouterr().out.count("already done") == 3
    assert (out / "corpus_report.html").read_text("utf-8") == page
    # Without the report, a page would describe another corpus.
    assert make(tmp_path, 3, "corpus.steps=[dedupe,split]") == 0
    assert not (out / "corpus_report.html").exists()
