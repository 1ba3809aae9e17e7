from __future__ import annotations

from collections import Counter

import pytest

from mens_exp.config.corpus import MixBy, MixStepConfig
from mens_exp.config.data import MixData, MixStop
from mens_exp.corpus.mix import mixed
from mens_exp.corpus.steps.arrange import mix
from mens_exp.corpus.steps.step import read_rows
from mens_exp.errors import DataError, Problems
from mens_exp.rows.schema import TrainingPair


def source(name, count):
    return [
        TrainingPair(prompt=f"{name}{number}", response="r" * 100, category=name)
        for number in range(count)
    ]


A, B = source("a", 30), source("b", 5)
WEIGHTS = {"a": 0.75, "b": 0.25}


@pytest.mark.parametrize("stop", [MixStop.all_exhausted, MixStop.first_exhausted, MixStop.budget])
def test_rows_on_disk_are_drawn_as_rows_in_memory_are(work, stop):
    """The rows and their order equal those of data=mix, in whatever order the files are given."""
    budget = 2_000 if stop is MixStop.budget else None
    config = MixStepConfig(weights=WEIGHTS, stop=stop, budget_tokens=budget, seed=3)
    shuffled = [row for pair in zip(B, A[:5], strict=True) for row in pair] + A[5:]
    result = work.do(mix, [work.file("x.jsonl", shuffled)], mix=config)
    as_data = MixData(sources=[], stop=stop, budget_tokens=budget, mix_seed=3)
    rows, record = mixed({"a": A, "b": B}, WEIGHTS, as_data)
    assert list(read_rows([work.out / "rows.jsonl"])) == rows
    assert result.facts["sources"] == record


def test_all_exhausted_has_the_exact_shares(work):
    """By hand: 30 rows of a at 3/4 make 40 in all, so b has 10, each of its 5 rows twice."""
    work.do(mix, [work.file("x.jsonl", A + B)], mix=MixStepConfig(weights=WEIGHTS))
    rows = work.lines("rows.jsonl")
    assert Counter(row["category"] for row in rows) == {"a": 30, "b": 10}
    assert set(Counter(row["prompt"] for row in rows if row["category"] == "b").values()) == {2}


def test_files_are_sources_by_their_names(work):
    """The name of a source is the file's name without its suffixes."""
    files = [work.file("one.jsonl", A), work.file("two.jsonl", B)]
    config = MixStepConfig(by=MixBy.file, weights={"one": 6, "two": 1})
    result = work.do(mix, files, mix=config)
    assert {name: each["rows"] for name, each in result.facts["sources"].items()} == {
        "one": 30,
        "two": 5,
    }


def test_after_a_split_train_alone_is_drawn(work):
    """Validation and held-out files are copied unchanged."""
    files = [work.file("train.jsonl", A + B), work.file("val.jsonl", source("c", 2))]
    work.do(mix, files, mix=MixStepConfig(weights=WEIGHTS))
    assert {name: len(rows) for name, rows in work.rows().items()} == {
        "train.jsonl": 40,
        "val.jsonl": 2,
    }


def test_sources_and_weights_that_do_not_meet_are_told_together(work):
    """A source without a weight and a misspelled weight are reported at once."""
    config = MixStepConfig(weights={"aa": 1.0})
    with pytest.raises(Problems) as caught:
        work.do(mix, [work.file("x.jsonl", A + B)], mix=config)
    assert "a (30 rows), b (5 rows)" in str(caught.value)
    assert "corpus.mix.weights.aa: a weight does not belong to any source" in str(caught.value)
    assert "the nearest is a" in str(caught.value)


def test_too_many_repeats_are_refused(work):
    """A hundred passes over a source mean that a weight is wrong."""
    config = MixStepConfig(weights={"a": 0.01, "b": 0.99})
    with pytest.raises(DataError, match=r"corpus\.mix\.weights: .*over 100 times"):
        work.do(mix, [work.file("x.jsonl", A + B)], mix=config)
