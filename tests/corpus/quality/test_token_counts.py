from __future__ import annotations

import numpy as np
import pytest

from mens_exp.corpus.token_counts import drawn, token_counts
from mens_exp.errors import DataError
from mens_exp.model import sources
from mens_exp.rows.documents import Labelling
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.implementations import HfTokenizer

# One token per byte, and one for each of the three markers of ChatML.
TEMPLATE = len("xuser\nSay hi.x\nxassistant\n")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    sources.write_byte_level_tokenizer(directory)
    return HfTokenizer.from_directory(directory)


def rows(*answers):
    return [TrainingPair(prompt="Say hi.", response="x" * length) for length in answers]


def test_tokens_are_those_of_training(tokenizer):
    """Template, answer and end marker count; only answer and end marker are supervised."""
    found = token_counts(rows(2, 10), 2, tokenizer, Labelling(objective="assistant", seq_len=1000))
    assert (found["documents"], found["tokens"]) == (2, 2 * TEMPLATE + 3 + 11)
    assert found["supervised_tokens"] == 14
    assert found["supervised_share"] == 14 / found["tokens"]
    assert (found["exact"], found["tokens_se"], found["lost_tokens"]) == (True, 0, 0)
    assert found["lengths"]["largest"] == TEMPLATE + 11
    assert found["tokenizer_sha256"] == tokenizer.sha256


def test_truncation_loses_what_lies_beyond_it(tokenizer):
    """By hand: with 10 tokens after the template, 2 answers of 20 lose 11 each, that of 5 none."""
    limit = Labelling(objective="assistant", seq_len=TEMPLATE + 10)
    found = token_counts(rows(20, 20, 5), 3, tokenizer, limit)
    assert (found["truncated_documents"], found["dropped_documents"]) == (2, 0)
    assert found["lost_tokens"] == found["lost_supervised_tokens"] == 22
    assert found["lost_supervised_share"] == 22 / (21 + 21 + 6)


def test_a_document_without_anything_to_learn_is_lost(tokenizer):
    """If the prompt fills the sequence, all tokens of the document count as lost."""
    prompt = TrainingPair(prompt="x" * 100, response="yes")
    limit = Labelling(objective="assistant", seq_len=60)
    found = token_counts([*rows(2), prompt], 2, tokenizer, limit)
    assert found["dropped_documents"] == 1
    assert found["lost_tokens"] == TEMPLATE - len("Say hi.") + 100 + 4
    assert found["documents"] == 2


def test_parts_of_a_long_text_lose_nothing(tokenizer):
    """Each part but the first repeats a token of the one before, which no text has twice."""
    text = TrainingPair(prompt="", response="x" * 100)
    limit = Labelling(objective="causal", seq_len=20)
    found = token_counts([text], 1, tokenizer, limit)
    assert found["documents"] == 1
    assert (found["lost_tokens"], found["lost_supervised_tokens"]) == (0, 0)


def test_rows_stand_for_others(tokenizer):
    """Of 1,000 rows 250 are sampled; the true total is within four standard errors."""
    rng = np.random.default_rng(0)
    every = rows(*rng.integers(1, 200, 1000).tolist())
    whole = Labelling(objective="assistant", seq_len=1000)
    exact = token_counts(every, 1000, tokenizer, whole)
    some = list(drawn(every, 1000, 250))
    found = token_counts(some, 1000, tokenizer, whole)
    assert (found["encoded_rows"], found["exact"], found["documents"]) == (250, False, 1000)
    assert abs(found["tokens"] - exact["tokens"]) < 4 * found["tokens_se"]
    lengths = np.array([len(pair.response) for pair in some])
    spread = 1000 * lengths.std(ddof=1) / 250**0.5 * 0.75**0.5
    assert found["tokens_se"] == pytest.approx(spread)


def test_rows_are_drawn_once_in_order_and_alike_each_time():
    """The sample has no repeats, keeps the order and is deterministic."""
    every = [TrainingPair(prompt=str(n), response="r") for n in range(500)]
    some = [int(pair.prompt) for pair in drawn(every, 500, 50)]
    assert len(set(some)) == 50
    assert some == sorted(some) == [int(pair.prompt) for pair in drawn(every, 500, 50)]
    assert list(drawn(every, 500, 500)) == list(drawn(every, 500, None)) == every


def test_rows_that_cannot_be_encoded_are_an_error(tmp_path):
    """A template that loses prompt or answer is an error."""
    sources.write_byte_level_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("always the same")
    forgetful = HfTokenizer.from_directory(tmp_path)
    whole = Labelling(objective="assistant", seq_len=1000)
    with pytest.raises(DataError, match="drops the row's prompt"):
        token_counts(rows(2), 1, forgetful, whole)
