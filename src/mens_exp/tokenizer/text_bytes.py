"""Bytes of text that token ids stand for, so that losses compare across tokenizers.

A loss in nats a token says as much about the tokenizer as about the model; in bits a byte it does
not. Control tokens stand for no text: their loss counts, their bytes are none.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.tokenizer import vox
from mens_exp.tokenizer.hf import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer as Core

    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["bits_per_byte", "text_bytes"]

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece spells a space
_UNKNOWN = -1


def text_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> tuple[int | None, str | None]:
    """Count the UTF-8 bytes of the text that ids stand for.

    Args:
        tokenizer: that made the ids.
        ids: ``[n]`` integers.

    Returns:
        The count, as the text was encoded (a normalizer's changes, and a space that it put
        before a text, included); or None and the reason.
    """
    lengths = _lengths(tokenizer)
    if lengths is None:
        return None, "this tokenizer does not tell which bytes a token stands for"
    found = lengths[ids]
    if (found == _UNKNOWN).any():
        return None, "the text has bytes that the tokenizer writes as its unknown token"
    total = int(found.sum())
    return (total, None) if total else (None, "no learned token stands for text")


def bits_per_byte(loss: float, tokens: int, count: int) -> float:
    """Return a mean loss in nats a token as bits a byte of the text.

    Args:
        loss: mean over the learned tokens.
        tokens: how many they are.
        count: bytes of the text that they stand for.
    """
    return loss * tokens / count / math.log(2)


def _lengths(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the bytes of each id, ``[ids] int64``; None where the tokenizer does not tell."""
    if isinstance(tokenizer, vox.VoxTokenizer):
        texts = {i: len(tokenizer.decode([i]).encode()) for i in range(vox.VOCAB_SIZE)}
        unknown = {vox.UNK}
    elif isinstance(tokenizer, HfTokenizer):
        is_bytes = _is_byte_level(tokenizer.core)
        if is_bytes is None:
            return None
        texts = dict(_of_core(tokenizer.core, is_bytes=is_bytes))
        unknown = set() if is_bytes else _unknown(tokenizer.core)
    else:
        return None
    texts |= dict.fromkeys(tokenizer.special_ids, 0) | dict.fromkeys(unknown, _UNKNOWN)
    lengths = np.full(tokenizer.last_id + 1, _UNKNOWN, np.int64)
    lengths[list(texts)] = list(texts.values())
    return lengths


def _is_byte_level(core: Core) -> bool | None:
    """Tell byte-level vocabularies (True) from SentencePiece's (False); None for any other."""
    kinds = set(_kinds(json.loads(core.to_str()).get("decoder")))
    if "ByteLevel" in kinds:
        return True
    return False if kinds & {"ByteFallback", "Metaspace"} else None


def _kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for one in decoder.get("decoders", ()):
            yield from _kinds(one)


def _unknown(core: Core) -> set[int]:
    """Return the id of the unknown token; a byte-level vocabulary never needs one."""
    found = core.token_to_id(str(getattr(core.model, "unk_token", None)))
    return set() if found is None else {int(found)}


def _of_core(core: Core, *, is_bytes: bool) -> Iterator[tuple[int, int]]:
    """Yield ids and bytes; a character of a byte-level token is a byte."""
    for token, number in core.get_vocab(with_added_tokens=False).items():
        if is_bytes:
            yield number, len(token)
        elif _BYTE.fullmatch(token):
            yield number, 1
        else:
            yield number, len(token.replace(_SPACE, " ").encode("utf-8", "surrogatepass"))
    for number, added in core.get_added_tokens_decoder().items():
        yield number, len(added.content.encode())
