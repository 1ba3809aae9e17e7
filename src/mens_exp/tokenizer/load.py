"""The tokenizer interface, loading the configured tokenizer, and the bytes its ids stand for.

A loss in nats per token says as much about the tokenizer as about the model; in bits per byte it
does not. Control tokens stand for no text: their loss counts, their bytes do not.
"""

from __future__ import annotations

import json
import math
import re
from datetime import date
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mens_exp.errors import ConfigError
from mens_exp.tokenizer import implementations
from mens_exp.tokenizer.implementations import HfTokenizer, VoxTokenizer
from mens_exp.tokenizer.templates import DATE, is_dated, template_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tokenizers import Tokenizer as Core

    from mens_exp.config.model import TokenizerConfig
    from mens_exp.tokenizer.control import Placed
    from mens_exp.tokenizer.templates import Message


class Tokenizer(Protocol):
    """Text to ids and back, under a chat template."""

    @property
    def chat_template(self) -> str:
        """Jinja source of the chat template in force."""

    @property
    def template_source(self) -> str:
        """The source of the chat template."""

    @property
    def template_sha256(self) -> str:
        """Hash of the chat template in force."""

    @property
    def is_dated(self) -> bool:
        """Whether the chat template asks for the date."""

    @property
    def date(self) -> str:
        """The day that a chat template gets where it asks for the date."""

    @property
    def allow_control_text(self) -> bool:
        """Whether a row's text that spells a control token is that token."""

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of control tokens by role."""

    @property
    def sha256(self) -> str:
        """Hash of what turns text into ids."""

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""

    @property
    def end_ids(self) -> set[int]:
        """Ids that end an answer."""

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sequence token, where there is one."""

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer by itself puts that token before every text."""

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, where there is one."""

    @property
    def pad_id(self) -> int:
        """Id that fills padding."""

    @property
    def last_id(self) -> int:
        """Highest id there is."""

    def render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """Render a conversation under the chat template."""

    def generated_spans(self, messages: list[Message]) -> list[tuple[int, int]] | None:
        """Return what the template marks as generated, or None where it has no markers."""

    def guard(self, text: str) -> str:
        """Return a text as `render` pastes it into the template."""

    def unguard(self, text: str) -> str:
        """Return a rendered text as a reader should see it."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without adding special tokens."""

    def encode_pieces(self, texts: Sequence[Sequence[str]]) -> list[Placed]:
        """Encode texts given in pieces, and say which piece each token is of."""

    def encode_prompts(self, conversations: Sequence[list[Message]]) -> list[list[int]]:
        """Encode conversations up to where the assistant begins."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens left out."""

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens spelled out."""


def load_tokenizer(config: TokenizerConfig, directory: Path) -> Tokenizer:
    """Return the tokenizer, under the chat template in force.

    Args:
        config: the `tokenizer` group.
        directory: of the base model, where tokenizer=hf finds its files.

    Raises:
        ModelFileError: tokenizer.json is absent or no tokenizer.
        ConfigError: the file of a chat template is absent or cannot be read, or `tokenizer.date`
            is set for a template that asks for no date.
    """
    tokenizer = (
        _vox(config) if config.name == "vox" else HfTokenizer.from_directory(directory, config)
    )
    check_date(config, tokenizer.chat_template)
    return tokenizer


def check_date(config: TokenizerConfig, template: str | None) -> None:
    """Refuse a date that is none, or that nothing would read.

    Args:
        config: the `tokenizer` group.
        template: the chat template in force; None where it is not known yet.

    Raises:
        ConfigError: `tokenizer.date` is no date, or is set for a template that asks for none.
    """
    try:
        date.fromisoformat(config.date)
    except ValueError as error:
        raise ConfigError(
            "is no date",
            where="tokenizer.date",
            found=config.date,
            expected="a day as YYYY-MM-DD",
        ) from error
    if config.date != DATE and template is not None and not is_dated(template):
        raise ConfigError(
            "the chat template asks for no date",
            where="tokenizer.date",
            found=config.date,
            expected="a template that uses strftime_now or date_string",
            remedy="leave tokenizer.date out",
        )


def _vox(config: TokenizerConfig) -> VoxTokenizer:
    if config.chat_template is None:
        return VoxTokenizer()
    template, source = template_named(config.chat_template)
    return VoxTokenizer(chat_template=template, template_source=source, date=config.date)


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
    lengths = _byte_lengths(tokenizer)
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


def _byte_lengths(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the bytes of each id, ``[ids] int64``; None where the tokenizer does not tell."""
    if isinstance(tokenizer, implementations.VoxTokenizer):
        texts = {
            i: len(tokenizer.decode([i]).encode()) for i in range(implementations.VOX_VOCAB_SIZE)
        }
        unknown = {implementations.VOX_UNK}
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
