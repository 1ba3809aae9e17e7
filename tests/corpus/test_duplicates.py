from __future__ import annotations

import numpy as np

from mens_exp.config.corpus import DedupeBy, DedupeConfig
from mens_exp.corpus.steps import dedupe as module
from mens_exp.corpus.steps.dedupe import duplicates
from mens_exp.rows.schema import TrainingPair


def find(responses, scratch, **values):
    rows = [TrainingPair(prompt=f"p{n}", response=text) for n, text in enumerate(responses)]
    return duplicates(rows, DedupeConfig(**{"processes": 1} | values), scratch)


def words(rng, count):
    return [f"w{n}" for n in rng.integers(0, 5000, count)]


def counted(one, other):
    first, second = (
        {tuple(text[i : i + 5]) for i in range(len(text) - 4)} for text in (one, other)
    )
    return len(first & second) / len(first | second)


def test_near_duplicates_are_found_and_others_stay(tmp_path):
    """Of rows planted at 0.8 to 0.85 (counted by tuples) at least 95 % are removed.

    Nothing under 0.8 does, and no row that came first.
    """
    rng = np.random.default_rng(1)
    texts = []
    for number in range(150):
        text = words(rng, 124)
        other = text[: 124 - 18 - number % 13]  # shares 102 to 90 of 120 shingles
        texts += [text, other]
    found = find([" ".join(text) for text in texts], tmp_path)
    pairs = [(row, counted(texts[row - 1], texts[row])) for row in range(1, len(texts), 2)]
    alike = [row for row, similarity in pairs if similarity >= 0.8]
    unlike = [row for row, similarity in pairs if similarity < 0.8]
    assert len(alike) > 50
    assert len(unlike) > 50
    gone = [row for row in alike if found.kept[row] == row - 1]
    assert len(gone) >= 0.95 * len(alike)
    assert all(found.kept[row] == row for row in unlike)
    assert (found.kept[::2] == np.arange(0, len(texts), 2)).all()
    assert found.similarity(gone[0]) == dict(pairs)[gone[0]]


def test_exact_duplicates_are_told_by_the_tree(tmp_path):
    """Comments and layout, which change shingles, do not matter; the first row stays."""
    found = find(["x = 1", "y = 2", "x  =  (1)  # one", "y = 2"], tmp_path)
    assert found.kept.tolist() == [0, 1, 0, 1]
    assert found.exact.tolist() == [False, False, True, True]
    facts = found.facts()
    assert (facts["exact"], facts["near"]) == (2, 0)
    assert (facts["clusters"], facts["largest_cluster"]) == (2, 2)


def test_clusters_reach_through_their_rows(tmp_path):
    """A cluster is transitive: a and c are unlike, but b joins them in any order.

    Each has 110 shingles: neighbours share 100 of 120, and a and c 90 of 130.
    """
    long = words(np.random.default_rng(2), 144)
    a, b, c = (" ".join(long[start : start + 114]) for start in (0, 10, 20))
    assert counted(a.split(), b.split()) == 100 / 120
    found = find([a, b, c], tmp_path)
    assert found.kept.tolist() == [0, 0, 0]
    (tmp_path / "other").mkdir()
    assert find([a, c, b], tmp_path / "other").kept.tolist() == [0, 0, 0]
    assert found.similarity(2) == 90 / 130


def test_an_exact_duplicate_goes_where_its_first_row_goes(tmp_path):
    """Row 2 equals row 1, which is near row 0, so both are duplicates of row 0."""
    text = words(np.random.default_rng(3), 200)
    found = find([" ".join(text), " ".join(text[:190]), " ".join(text[:190])], tmp_path)
    assert found.kept.tolist() == [0, 0, 0]
    assert found.exact.tolist() == [False, False, True]


def test_without_a_threshold_only_exact_ones_go(tmp_path):
    """Without a threshold no similarity is computed."""
    text = words(np.random.default_rng(4), 200)
    found = find([" ".join(text), " ".join(text[:190]), " ".join(text)], tmp_path, threshold=None)
    assert found.kept.tolist() == [0, 1, 0]
    assert found.similarity(2) is None
    assert "threshold" not in found.facts()


def test_rows_are_compared_by_what_is_asked_for(tmp_path):
    """`by` decides whether equal answers to other questions or conversations are duplicates."""
    rows = [
        TrainingPair(prompt="Is 3 prime?", response="Yes."),
        TrainingPair(prompt="Is 5 prime?", response="Yes."),
        TrainingPair(prompt="Is 3  prime?", response="Yes."),
        TrainingPair(prompt="Is 3 prime?", response="Yes.", system="Be brief."),
        TrainingPair(prompt="Is 3 prime?", response="Yes.", history=(("Hello", "Hi!"),)),
    ]
    kept = {}
    for by in DedupeBy:
        (tmp_path / by.value).mkdir()
        config = DedupeConfig(by=by, processes=1)
        kept[by] = duplicates(rows, config, tmp_path / by.value).kept.tolist()
    assert kept == {DedupeBy.response: [0, 0, 0, 0, 4], DedupeBy.row: [0, 1, 0, 3, 4]}


def test_processes_and_parts_do_not_change_the_result(tmp_path, monkeypatch):
    """Two processes over three chunks, sorting 100 keys at a time, give the same result."""
    rng = np.random.default_rng(5)
    texts = []
    for _ in range(600):
        text = words(rng, 60)
        texts += [" ".join(text), " ".join(text[: rng.integers(45, 60)])]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = find(texts, tmp_path / "one")
    real = module.equal_keys
    monkeypatch.setattr(module, "equal_keys", lambda *given: real(*given, 100))
    two = find(texts, tmp_path / "two", processes=2)
    assert (one.kept == two.kept).all()
    assert one.facts() == two.facts()
    assert one.facts()["near"] > 200


def test_crowded_buckets_are_compared_with_their_first_rows(tmp_path):
    """Of 100 near-equal rows, 35 exceed the limit of 65 per bucket, in each of at most 21 bands.

    They share all but their last word, and each is compared once: with the first row.
    """
    text = " ".join(words(np.random.default_rng(6), 300))
    found = find([f"{text} end{n}" for n in range(100)], tmp_path)
    assert found.kept.tolist() == [0] * 100
    assert found.compared == 99
    assert 0 < found.crowded <= 21 * 35


def test_nothing_has_no_duplicates(tmp_path):
    """Zero rows are not an error."""
    found = find([], tmp_path)
    assert found.kept.tolist() == []
    assert found.facts()["largest_cluster"] == 0
