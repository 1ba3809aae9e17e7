"""Supervision of the last k tokens, with chat templates and as plain text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.config.model import TokenizerConfig
from mens_exp.model import sources
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.implementations import VoxTokenizer
from mens_exp.tokenizer.load import load_tokenizer

PAIR = TrainingPair(prompt="Say hi.", response="hello", system="Be brief.")
TEXTS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    """Return the byte-level tokenizer with the named template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    sources.write_byte_level_tokenizer(directory)

    def made(template=None, name="hf"):
        return load_tokenizer(TokenizerConfig(name=name, chat_template=template), directory)

    return made


def encoded(tokenizer, k, *pairs, seq_len=10_000, cut="left"):
    labelling = Labelling(objective="last_k", seq_len=seq_len, truncation=cut, k=k)
    return encode(pairs or [PAIR], tokenizer, labelling)


def whole(tokenizer, documents):
    return tokenizer.spell(documents.ids.tolist())


def learned(tokenizer, documents):
    return tokenizer.spell(documents.ids[documents.supervised].tolist())


@pytest.mark.parametrize(
    ("k", "text"), [(1, "o"), (3, "llo"), (5, "hello"), (8, "i.\nhello"), (0, "hello")]
)
def test_plain_text_has_nothing_added(tokenizer_of, k, text):
    """Lines of system, prompt and response; the last k characters; k = 0 is the whole response."""
    tokenizer = tokenizer_of("plain")
    documents = encoded(tokenizer, k)
    assert whole(tokenizer, documents) == "Be brief.\nSay hi.\nhello"
    assert learned(tokenizer, documents) == text


# The layout is `{system}\n{prompt}\n{response}`: even an empty part keeps its newline.
PLAIN_ROWS = [
    (
        {"system": "Be brief.", "prompt": "Say hi.", "response": "hello"},
        b"Be brief.\nSay hi.\nhello",
    ),
    ({"prompt": "Say hi.", "response": "hello"}, b"\nSay hi.\nhello"),
    ({"system": "", "prompt": "Say hi.", "response": "hello"}, b"\nSay hi.\nhello"),
    ({"prompt": "\u00e4?", "response": "\nb"}, b"\n\xc3\xa4?\n\nb"),
]


@pytest.mark.parametrize(("row", "expected"), PLAIN_ROWS)
def test_plain_text_is_the_seeds_bytes_with_and_without_a_system_prompt(
    tokenizer_of, row, expected
):
    """The tokenizer has one id per byte, so the ids equal the text."""
    documents = encoded(tokenizer_of("plain"), 1, TrainingPair(**row))
    assert whole(tokenizer_of("plain"), documents).encode() == expected


def test_a_plain_prompt_for_generation_begins_as_a_row_does(tokenizer_of):
    """Generation starts from the same bytes as in training."""
    messages = [{"role": "user", "content": "Say hi."}]
    prompt = tokenizer_of("plain").render(messages, add_generation_prompt=True)
    assert prompt.encode() == b"\nSay hi.\n"


@pytest.mark.parametrize(
    ("k", "text"), [(1, "<|im_end|>"), (3, "lo<|im_end|>"), (0, "hello<|im_end|>")]
)
def test_chat_text_ends_with_its_end_marker(tokenizer_of, k, text):
    """The end marker is one of the k tokens."""
    tokenizer = tokenizer_of()
    documents = encoded(tokenizer, k)
    assert whole(tokenizer, documents).endswith("hello<|im_end|>")
    assert learned(tokenizer, documents) == text


@given(prompt=TEXTS, response=TEXTS, k=st.integers(1, 64), seq_len=st.integers(2, 40))
def test_the_last_k_targets_of_the_last_tokens(tokenizer_of, prompt, response, k, seq_len):
    """By definition: after truncation to seq_len ids, min(k, ids - 1) are supervised."""
    tokenizer = tokenizer_of("plain")
    documents = encoded(
        tokenizer, k, TrainingPair(prompt=prompt, response=response), seq_len=seq_len
    )
    ids = tokenizer.encode_all([f"\n{prompt}\n{response}"])[0][-seq_len:]
    count = min(k, len(ids) - 1)
    assert documents.ids.tolist() == ids
    assert documents.supervised.tolist() == [False] * (len(ids) - count) + [True] * count


def test_cut_on_the_right_the_end_may_be_lost(tokenizer_of):
    """With truncation on the right the last token is lost, so the row is dropped and counted."""
    documents = encoded(tokenizer_of("plain"), 1, seq_len=10, cut="right")
    assert (len(documents), documents.dropped, documents.truncated) == (0, 1, 1)
    assert documents.short == 0


def test_a_text_of_one_token_is_short(tokenizer_of):
    """A single token has no predecessor; of two tokens one is supervised."""
    rows = [TrainingPair(prompt="", response=text) for text in ("x", "xy", "z")]
    documents = encoded(tokenizer_of("plain"), 1, *rows)
    assert (len(documents), documents.dropped, documents.short) == (1, 2, 2)


def test_the_last_answer_of_a_conversation_alone(tokenizer_of):
    """There is one document per row, and earlier answers are part of the prompt."""
    tokenizer = tokenizer_of("plain")
    pair = TrainingPair(prompt="b", response="B", history=(("a", "A"),))
    documents = encoded(tokenizer, 0, pair)
    assert whole(tokenizer, documents) == "\na\nA\nb\nB"
    assert learned(tokenizer, documents) == "B"


@pytest.mark.parametrize("objective", ["assistant", "causal", "last_k"])
def test_the_vox_tokenizer_goes_through_the_same_masks(tokenizer_of, objective):
    """ChatML's markers are one id each, a newline is UNK, and the end marker is supervised."""
    tokenizer = tokenizer_of(name="vox")
    assert isinstance(tokenizer, VoxTokenizer)
    documents = encode([PAIR], tokenizer, Labelling(objective=objective, seq_len=1000))
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hi.<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>"
    )
    assert documents.ids.tolist() == tokenizer.encode(text)
    expected = {"assistant": "hello<|im_end|>", "last_k": "hello<|im_end|>"}
    if objective in expected:
        assert learned(tokenizer, documents) == expected[objective]
    assert documents.ids.max() <= 130
