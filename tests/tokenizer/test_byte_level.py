from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mens_exp.config.model import RandomModel
from mens_exp.model import sources
from mens_exp.model.sources import BYTE_LEVEL_VOCAB_SIZE
from mens_exp.tokenizer.implementations import HfTokenizer

USED = 259  # 3 control tokens and 256 bytes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("byte_level")
    sources.write_byte_level_tokenizer(directory)
    return HfTokenizer.from_directory(directory)


@given(text=st.text())
@example(text="")
@example(text=" leading, trailing ")
@example(text="\x00\r\n\t\u2028🐍\ufeff")
@example(text="<|im_start|")
def test_any_text_survives(tokenizer, text):
    """Any text round-trips with one id per UTF-8 byte."""
    (ids,) = tokenizer.encode_all([text])
    assert len(ids) == len(text.encode())
    assert all(3 <= token < USED <= BYTE_LEVEL_VOCAB_SIZE for token in ids)
    assert tokenizer.decode(ids) == text


def test_markers_are_one_id_each(tokenizer):
    """The three control tokens have the first ids and are omitted in decoding."""
    (ids,) = tokenizer.encode_all(["<|endoftext|><|im_start|>a<|im_end|>"])
    assert [ids[0], ids[1], ids[3]] == [0, 1, 2]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids) == "a"


def test_vocabulary_fits_the_random_model(tokenizer):
    """The embedding has a row for each id, and the stated size is the default."""
    assert tokenizer.last_id == USED - 1
    assert RandomModel(name="tiny").vocab_size == BYTE_LEVEL_VOCAB_SIZE


def test_transformers_reads_the_same_tokenizer(tokenizer, tmp_path):
    """Ids, markers and padding equal those of AutoTokenizer."""
    from transformers import AutoTokenizer

    sources.write_byte_level_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    text = "<|im_start|>user\nGrüße 🐍<|im_end|>"
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode_all([text])[0]
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
