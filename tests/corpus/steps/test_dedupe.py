from __future__ import annotations

import json

from mens_exp.config.corpus import CorpusConfig, DedupeConfig
from mens_exp.corpus.split import Side
from mens_exp.corpus.steps.dedupe import dedupe
from mens_exp.corpus.steps.step import RowWriter, StepInput, read_rows
from mens_exp.rows.schema import TrainingPair

LONG = [f"word{n}" for n in range(104)]  # 100 shingles
ROWS = [
    TrainingPair(prompt="a", response=" ".join(LONG)),
    TrainingPair(prompt="b", response=" ".join(LONG[:94])),  # 90 of 100
    TrainingPair(prompt="c", response=" ".join(LONG[10:])),  # 90 of 100, and 80 of 100 of b
    TrainingPair(prompt="d", response="something else"),
    TrainingPair(prompt="e", response="something  else"),
]


def given(tmp_path, *sides, **values):
    for name in ("before", "after", "scratch"):
        (tmp_path / name).mkdir()
    with RowWriter(tmp_path / "before") as writer:
        for side, rows in sides:
            for row in rows:
                writer.write(row, side)
    return StepInput(
        files=tuple(tmp_path / "before" / name for name in writer.rows),
        directory=tmp_path / "after",
        scratch=tmp_path / "scratch",
        config=CorpusConfig(dedupe=DedupeConfig(**{"processes": 1} | values)),
    )


def test_first_rows_stay_and_the_rest_is_listed(tmp_path):
    """Listed are ids, places, the row kept, the similarity and the kind; counts match the list."""
    step = given(tmp_path, (None, ROWS))
    result = dedupe(step)
    assert list(read_rows([step.directory / "rows.jsonl"])) == [ROWS[0], ROWS[3]]
    assert (result.rows_in, result.rows_out) == (5, 2)
    assert result.dropped == {"exact duplicate": 1, "near-duplicate": 2}
    lines = [
        json.loads(one) for one in (step.directory / "duplicates.jsonl").read_text().splitlines()
    ]
    assert lines == [
        {
            "row": ROWS[row].id,
            "place": f"{step.files[0]}:{row + 1}",
            "kept": ROWS[kept].id,
            "jaccard": similarity,
            "exact": exact,
        }
        for row, kept, similarity, exact in (
            (1, 0, 0.9, False),
            (2, 0, 0.9, False),
            (4, 3, 1.0, True),
        )
    ]
    assert result.facts["chained"] == 0
    assert result.facts["missed_at_threshold"] < 0.002


def test_sides_are_one_corpus_train_first(tmp_path):
    """Validation and held-out rows that duplicate a training row go; others keep their side."""
    step = given(tmp_path, (Side.TRAIN, ROWS[:1]), (Side.VAL, ROWS[1:2]), (Side.HELDOUT, ROWS[3:]))
    result = dedupe(step)
    assert list(read_rows([step.directory / "train.jsonl"])) == ROWS[:1]
    assert list(read_rows([step.directory / "heldout.jsonl"])) == ROWS[3:4]
    assert not (step.directory / "val.jsonl").exists()
    assert result.rows_out == 2


def test_rows_that_a_cluster_joins_are_counted(tmp_path):
    """At 0.85 b and c are each near a but not near each other; c joins b's cluster through a."""
    step = given(tmp_path, (None, [ROWS[1], ROWS[0], ROWS[2]]), threshold=0.85)
    result = dedupe(step)
    assert result.dropped["near-duplicate"] == 2
    assert result.facts["chained"] == 1


def test_same_input_gives_the_same_bytes(tmp_path):
    """The output does not depend on the directory, except for the places."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first, second = (given(tmp_path / name, (None, ROWS)) for name in ("one", "two"))
    dedupe(first)
    dedupe(second)
    rows = [(step.directory / "rows.jsonl").read_bytes() for step in (first, second)]
    assert rows[0] == rows[1]
