from __future__ import annotations

import zlib

from mens_exp.corpus import measures as module
from mens_exp.corpus.large_files import pieces
from mens_exp.corpus.measures import LISTED, OTHERS, Measures, Source, measured
from mens_exp.rows.schema import TrainingPair

KEY = "AKIA" + "IOSFODNN7QQQQQQQ"
ROWS = [
    ("train", TrainingPair(prompt="abc", response="x = 1", language="python", category="a")),
    ("train", TrainingPair(prompt="abcd", response="x =", language="python", category="a")),
    (
        "val",
        TrainingPair(
            prompt="ab",
            response="See:\n```rust\nfn f() {}\n```\n",
            language="Rust",
            group="proj::src/f.rs",
            system="Be brief.",
        ),
    ),
    (
        "val",
        TrainingPair(
            prompt="hello", response="bonjour", language="french", history=(("q", "one two one"),)
        ),
    ),
    ("val", TrainingPair(prompt="hello", response=f"{KEY}\n{KEY}", place="rows.jsonl:5")),
]


def test_rows_characters_and_lengths_add_up():
    """By hand: five rows with six exchanges."""
    found = measured(ROWS)
    assert (found.rows, found.sides) == (5, {"train": 2, "val": 3})
    answers = [said for _, pair in ROWS for _, said in pair.exchanges]
    assert found.characters == {
        "prompts": 3 + 4 + 1 + 2 + 5 + 5,
        "answers": sum(map(len, answers)),
        "system prompts": 9,
    }
    assert found.lengths["prompt"].count == 6
    assert found.lengths["answer"].largest == 41


def test_code_is_parsed_by_the_language_that_a_row_names():
    """Names are case-insensitive and fences are removed; other languages are not judged."""
    found = measured(ROWS)
    assert found.languages == {"python": 2, "rust": 1, "french": 1, "": 1}
    assert found.parsed == {"python": 1, "rust": 1}
    assert found.kinds["python"] == {"Assign": 1, "Name": 1, "Constant": 1}
    assert found.kinds["rust"]["function_item"] == 1


def test_runs_of_tokens_are_those_of_the_answers():
    """By hand, "one two one" has three tokens, two of them distinct, two pairs and one trigram."""
    found = measured([("all", TrainingPair(prompt="p p", response="one two one"))])
    assert [(one.total, one.count) for one in found.distinct.values()] == [(3, 2), (2, 2), (1, 1)]


def test_compression_is_that_of_zlib():
    """The oracle is zlib over the answers joined by newlines."""
    found = measured(ROWS)
    text = "\n".join(said for _, pair in ROWS for _, said in pair.exchanges).encode()
    assert (found.answer_bytes, found.compressed_bytes) == (len(text), len(zlib.compress(text)))


def test_findings_have_their_place_and_no_secret():
    """Both findings of one row are listed, without the secret."""
    found = measured(ROWS)
    assert found.secrets == {"AWS access key": 2}
    assert (
        found.findings
        == [
            {
                "kind": "AWS access key",
                "place": "rows.jsonl:5",
                "field": "answer",
                "shown": "AKIA… (20 characters)",
            }
        ]
        * 2
    )
    assert KEY not in repr(found)


def test_the_first_findings_of_each_kind_are_listed():
    """All findings are counted, but only the first of each kind are listed."""
    rows = [("all", TrainingPair(prompt="Do anything now", response=KEY))] * (LISTED + 5)
    found = measured(rows)
    assert found.secrets.total() == found.injections.total() == LISTED + 5
    assert len(found.findings) == 2 * LISTED


def test_sources_are_told_by_labels_and_groups():
    """Rows and characters are counted for each label and group."""
    found = measured(ROWS)
    assert found.sources["category"]["a"] == Source(rows=2, characters=3 + 5 + 4 + 3)
    assert found.sources["project"]["proj"].rows == 1
    assert found.sources["language"]["french"] == Source(rows=1, characters=24)


def test_sources_beyond_the_most_are_counted_together(monkeypatch):
    """A separate category for each row must not fill the memory."""
    monkeypatch.setattr(module, "MOST_NAMES", 3)
    rows = [("all", TrainingPair(prompt="p", response="r", category=str(n % 5))) for n in range(10)]
    found = measured(rows)
    assert {name: one.rows for name, one in found.sources["category"].items()} == {
        "0": 2,
        "1": 2,
        "2": 2,
        OTHERS: 4,
    }


def test_parts_join_to_the_whole():
    """Merging parts is exact except for zlib, which compresses longer input better."""
    whole, joined = measured(ROWS), Measures()
    for part in pieces(ROWS, 2):
        joined.join(measured(part))
    for name in ("sides", "characters", "lengths", "languages", "parsed", "kinds"):
        assert getattr(joined, name) == getattr(whole, name)
    for name in ("secrets", "injections", "findings", "sources"):
        assert getattr(joined, name) == getattr(whole, name)
    counts = [[one.count for one in found.distinct.values()] for found in (joined, whole)]
    assert counts[0] == counts[1]
