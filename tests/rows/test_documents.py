"""Documents of one row, further values per token, and further fields of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import two_answers

from mens_exp.config.objective import OBJECTIVES
from mens_exp.errors import DataError, SetupError
from mens_exp.rows import encode as shards
from mens_exp.rows.cache import CacheKey, encoded_parts
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode, encode_parts
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.implementations import VoxTokenizer

BETTER = TrainingPair(prompt="say hi", response="hi there", fields=(("worse", "no"),))
LONG = replace(BETTER, fields=(("worse", "n" * 100),))


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Register an objective that compares an answer with a worse one."""
    two_answers.offer(monkeypatch)


def encoded(*pairs, seq_len=200, **settings):
    labelling = Labelling(objective="both", seq_len=seq_len, **settings)
    return encode(pairs, VoxTokenizer(), labelling)


def key_of(labelling):
    return CacheKey(
        rows_sha256="r",
        tokenizer_sha256="t",
        template_sha256="c",
        special_tokens_sha256="s",
        date=None,
        allow_control_text=False,
        labelling=labelling,
    )


def spelled(documents):
    """Return each document's supervised text and its further values."""
    bounds = list(zip(documents.offsets[:-1], documents.offsets[1:], strict=True))
    learned = [documents.ids[a:b][documents.supervised[a:b]].tolist() for a, b in bounds]
    values = [documents.extra["place"][a:b].tolist() for a, b in bounds]
    return [VoxTokenizer().spell(ids) for ids in learned], values


def test_a_row_gives_two_documents_side_by_side():
    """Each document has its own answer and a value per token."""
    documents = encoded(BETTER, BETTER)
    texts, values = spelled(documents)
    assert [text[:2] for text in texts] == ["hi", "no", "hi", "no"]
    assert documents.together == 2
    assert documents.units.tolist() == [documents.lengths[:2].sum()] * 2
    assert documents.unrolled == 0  # both documents of a row are one unit
    for sign, length, found in zip((1, -1, 1, -1), documents.lengths, values, strict=True):
        assert found == [sign * place for place in range(length)]


@pytest.mark.parametrize(("side", "first"), [("right", 0), ("left", 41)])
def test_each_document_is_cut_to_its_share_with_its_values(side, first):
    """Two documents of a row get half of the sequence length each."""
    whole = encoded(LONG, seq_len=1000)
    assert whole.lengths[1] > 100
    limit = int(whole.lengths[1]) - 41
    documents = encoded(LONG, seq_len=2 * limit, truncation=side)
    assert documents.lengths.tolist() == [whole.lengths[0], limit]
    assert documents.truncated == 1
    _, (_, values) = spelled(documents)
    assert values == [-place for place in range(first, first + limit)]


def test_a_document_that_loses_its_answer_takes_the_other_along():
    """A single document has nothing to be compared with."""
    prompt = "p" * 90
    documents = encoded(BETTER, replace(LONG, prompt=prompt), BETTER, seq_len=180)
    assert (len(documents), documents.dropped) == (4, 2)


def test_a_row_without_the_field_is_refused():
    """The error gives the place of the row and the missing field."""
    plain = TrainingPair(prompt="p", response="r", place="a.jsonl:7")
    with pytest.raises(DataError, match="a row lacks the fields") as caught:
        encoded(BETTER, plain)
    assert "a.jsonl:7" in caught.value.where
    assert (caught.value.found, caught.value.expected) == ("no fields", "worse")


def test_a_field_that_nothing_reads_is_refused():
    """Ignoring the field would train something other than the row says."""
    labelling = Labelling(objective="assistant", seq_len=200)
    with pytest.raises(DataError, match="found worse · expected no fields"):
        encode([BETTER], VoxTokenizer(), labelling)


def test_documents_are_refused_by_a_spec_that_names_none(monkeypatch):
    """The import path of an objective's documents is resolved when rows are encoded."""
    spec = replace(OBJECTIVES.named("both"), documents="math:pi")
    monkeypatch.setattr(OBJECTIVES, "_known", {"both": spec})
    with pytest.raises(SetupError, match="the objective both cannot be used"):
        encoded(BETTER)


def test_the_cache_keeps_units_and_values(tmp_path, monkeypatch):
    """The values survive shards of several rows and the joined entry."""
    monkeypatch.setattr(shards, "_SHARD", 3)
    monkeypatch.setattr(shards, "_POOL_FROM", 5)
    monkeypatch.setattr(shards, "usable_cores", lambda: 1)
    labelling = Labelling(objective="both", seq_len=200, options=(("beta", 0.1),))
    pairs = [replace(BETTER, response=f"hi {i}") for i in range(8)]
    key = key_of(labelling)

    def build(kept):
        return encode_parts(pairs, VoxTokenizer(), labelling, kept)

    expected = encode(pairs, VoxTokenizer(), labelling)
    for _ in range(2):  # built, then opened from the cache
        documents, counts = encoded_parts(tmp_path, key, build)
        assert (documents.together, counts.documents) == (2, 16)
        assert np.array_equal(documents.offsets, expected.offsets)
        assert np.array_equal(documents.extra["place"], expected.extra["place"])


def test_a_setting_of_its_own_makes_another_cache_entry(tmp_path):
    """Labels without options keep their earlier cache keys."""
    plain = Labelling(objective="both", seq_len=200)
    keyed = [replace(plain, options=(("beta", value),)) for value in (0.1, 0.2)]
    built = []

    def build(kept):
        built.append(kept)
        return encode_parts([BETTER], VoxTokenizer(), plain, kept)

    for labelling in (plain, *keyed) * 2:  # built, then opened from the cache
        encoded_parts(tmp_path, key_of(labelling), build)
    assert len(built) == len(list((tmp_path / "encoded").glob("*/offsets.npy"))) == 3
    assert "options" not in plain.record()
