from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from mens_exp.tokenizer.control import pieces_of

CONTROLS = ("<|a|>", "<|bb|>", "</s>")
TEXTS = st.lists(
    st.sampled_from([*CONTROLS, "<|a", "|>", "<", " ", "\n", "\n\n", "x", "y ", "É", "12", "▁"])
    | st.text(max_size=4),
    max_size=12,
).map("".join)


def core_of(
    *,
    pre_tokenizer=None,
    normalizer=None,
    tokens=None,
):
    """Return a byte tokenizer whose merges cross the boundaries of a prompt."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "▁"]
    merges = [("Ċ", "Ċ"), ("x", "x"), ("Ġ", "x"), ("Ċ", "x"), ("▁", "x")]
    vocab = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    if normalizer is not None:
        core.normalizer = normalizer
    made = tokens or [AddedToken(text, special=True, normalized=False) for text in CONTROLS]
    core.add_tokens(list(made))
    return core


CORES = {
    "bytes": core_of(),
    "regex": core_of(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix space": core_of(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "first prefix": core_of(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "always prefix": core_of(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")),
    "lower case": core_of(normalizer=normalizers.Lowercase()),
    "prepending": core_of(normalizer=normalizers.Prepend("x")),
    "normalized tokens too": core_of(
        tokens=[
            AddedToken("<|a|>", special=True, normalized=False),
            AddedToken("x12", special=False, normalized=True),
        ]
    ),
}


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@given(texts=st.lists(TEXTS, max_size=4))
def test_pieces_make_the_ids_of_the_whole(core, texts):
    """Texts are split at control tokens, with complete and partial ones in them."""
    pieces = pieces_of(core)
    assert pieces is not None
    whole = [core.encode(text, add_special_tokens=False).ids for text in texts]
    assert pieces.encode(texts) == whole


@pytest.mark.parametrize(
    "tokens",
    [
        [AddedToken("<|a|>", normalized=False, lstrip=True)],
        [AddedToken("<|a|>", normalized=False, rstrip=True)],
        [AddedToken("<|a|>", normalized=False, single_word=True)],
        [AddedToken("<|a|>", normalized=True)],
        [AddedToken("<|a|>", normalized=False), AddedToken("|", normalized=False)],
        [AddedToken("<|a|>", normalized=False), AddedToken("|><", normalized=False)],
        [AddedToken("aba", normalized=False)],
    ],
    ids=["lstrip", "rstrip", "words", "normalized", "inside", "straddling", "itself"],
)
def test_tokens_that_do_not_stand_for_themselves_are_not_cut_at(tokens):
    """Their texts are tokenized whole."""
    assert pieces_of(core_of(tokens=tokens)) is None


def test_a_piece_of_many_texts_is_tokenized_once(monkeypatch):
    """A prompt, the prompt with an answer, and the whole text have four distinct pieces."""
    seen = []

    class Counting:
        def encode_batch_fast(self, texts, **options):
            seen.extend(texts)
            return core.encode_batch_fast(texts, **options)

    core = CORES["bytes"]
    pieces = pieces_of(core)
    assert pieces is not None
    monkeypatch.setattr(pieces, "_core", Counting())
    pieces.encode(["<|a|>q</s>r", "<|a|>q</s>ran", "<|a|>q</s>ran</s>\n", "<|a|>q</s>r"])
    assert len([text for text in seen if text]) == 4
    assert len(set(seen)) == len(seen)
