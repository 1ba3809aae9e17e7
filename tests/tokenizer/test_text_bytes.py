from __future__ import annotations

import math

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mens_exp.model import sources
from mens_exp.tokenizer.implementations import HfTokenizer, VoxTokenizer
from mens_exp.tokenizer.load import bits_per_byte, text_bytes

TEXTS = ["def f(x):\n\treturn x", "héllo wörld", "日本語 🎉", "  two spaces", "▁"]
# Like SentencePiece: ▁ for a space, and byte tokens for other characters.
PIECES = ["<unk>", "▁", "▁de", "f", "é", *(f"<0x{byte:02X}>" for byte in range(256)), "(", "x"]


def sentencepiece(*, fallback=True):
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(PIECES)},
        merges=[],
        unk_token=PIECES[0],
        byte_fallback=fallback,
    )
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    core.add_tokens([AddedToken("ünïcode", special=False)])
    return core


def read(core, tmp_path):
    core.save(str(tmp_path / "tokenizer.json"))
    return HfTokenizer.from_directory(tmp_path)


def counted(tokenizer, text):
    ids = tokenizer.encode_all([text])[0] if isinstance(text, str) else text
    return text_bytes(tokenizer, np.array(ids, np.int32))


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_are_counted_to_the_byte(tmp_path, text):
    """The total equals that of UTF-8, also if a token is part of a character."""
    sources.write_byte_level_tokenizer(tmp_path)
    tokenizer = HfTokenizer.from_directory(tmp_path)
    assert counted(tokenizer, text) == (len(text.encode()), None)
    first = tokenizer.encode_all(["é"])[0][:1]
    assert counted(tokenizer, first) == (1, None)


@pytest.mark.parametrize("text", ["def f(x", "é f", "日本語", "ünïcode"])
def test_sentencepiece_tokens_are_counted_to_the_byte(tmp_path, text):
    """A space and a byte token are one byte each, and a piece has its own text."""
    assert counted(read(sentencepiece(), tmp_path), text) == (len(text.encode()), None)


def test_control_tokens_stand_for_no_text(tmp_path):
    """An end marker adds to the loss but not to the bytes; alone it has no text."""
    tokenizer = read(sentencepiece(), tmp_path)
    end = tokenizer.core.token_to_id("</s>")
    assert counted(tokenizer, [*tokenizer.encode_all(["def"])[0], end]) == (3, None)
    assert counted(tokenizer, [end]) == (None, "no learned token represents text")


def test_unknown_tokens_have_unknown_bytes(tmp_path):
    """The result is null with a reason, although the token is a control token too."""
    total, reason = counted(read(sentencepiece(fallback=False), tmp_path), "日")
    assert total is None
    assert "unknown token" in str(reason)


def test_other_vocabularies_do_not_tell(tmp_path):
    """WordPiece drops spaces."""
    words = ["[UNK]", "a"]
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token=words[0]))
    core.decoder = decoders.WordPiece()
    total, reason = counted(read(core, tmp_path), [1])
    assert total is None
    assert "does not say" in str(reason)


def test_vox_counts_ascii_and_compounds_and_knows_no_newline():
    """`fn ` is one token of three bytes; a newline is the unknown token."""
    assert counted(VoxTokenizer(), "fn f() -> x") == (11, None)
    assert counted(VoxTokenizer(), "fn f()\n")[0] is None


def test_bits_per_byte_by_hand():
    """By hand: ten tokens of ln 2 nats are ten bits, over twenty bytes 0.5 each."""
    assert bits_per_byte(math.log(2), 10, 20) == pytest.approx(0.5)
