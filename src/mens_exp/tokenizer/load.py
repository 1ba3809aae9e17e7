"""The tokenizer interface, loading of the configured tokenizer, and byte counts of token ids.

A loss in nats per token depends on the tokenizer as much as on the model; in bits per byte it does
not. Control tokens correspond to no text: their loss counts, their bytes do not.
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
        """Jinja source of the effective chat template."""

    @property
    def template_source(self) -> str:
        """The source of the chat template."""

    @property
    def template_sha256(self) -> str:
        """Hash of the effective chat template."""

    @property
    def is_dated(self) -> bool:
        """Whether the chat template uses the date."""

    @property
    def date(self) -> str:
        """The date passed to a chat template that uses one."""

    @property
    def allow_control_text(self) -> bool:
        """Whether row text that spells a control token becomes that token."""

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of control tokens by role."""

    @property
    def sha256(self) -> str:
        """Hash of everything that affects tokenization."""

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""

    @property
    def end_ids(self) -> set[int]:
        """Ids that end an answer."""

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sequence token, if there is one."""

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer itself prepends that token to every text."""

    @property
    def text_start(self) -> str:
        """The control token that the tokenizer puts before every text; empty if none."""

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, if there is one."""

    @property
    def pad_id(self) -> int:
        """Id used for padding."""

    @property
    def last_id(self) -> int:
        """Highest id."""

    def render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """Render a conversation with the chat template."""

    def generated_spans(self, messages: list[Message]) -> list[tuple[int, int]] | None:
        """Return the spans that the template marks as generated; None if it has no markers."""

    def guard(self, text: str) -> str:
        """Return a text in the form that `render` inserts into the template."""

    def unguard(self, text: str) -> str:
        """Return a rendered text in readable form."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without adding special tokens."""

    def encode_pieces(self, texts: Sequence[Sequence[str]]) -> list[Placed]:
        """Encode texts given in pieces, with the pieces of each token."""

    def encode_prompts(self, conversations: Sequence[list[Message]]) -> list[list[int]]:
        """Encode conversations up to the start of the assistant's turn."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids without control tokens."""

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids, including the text of control tokens."""


def load_tokenizer(config: TokenizerConfig, directory: Path) -> Tokenizer:
    """Return the configured tokenizer with its effective chat template.

    Args:
        config: the `tokenizer` group.
        directory: directory of the base model, which contains the files for tokenizer=hf.

    Raises:
        ModelFileError: tokenizer.json is missing or invalid.
        ConfigError: the chat template file is missing or cannot be read, or `tokenizer.date` is
            set for a template that does not use the date.
    """
    tokenizer = (
        _vox(config) if config.name == "vox" else HfTokenizer.from_directory(directory, config)
    )
    check_date(config, tokenizer.chat_template)
    return tokenizer


def check_date(config: TokenizerConfig, template: str | None) -> None:
    """Refuse a date that is invalid, or that the template does not use.

    Args:
        config: the `tokenizer` group.
        template: the effective chat template; None if it is not known yet.

    Raises:
        ConfigError: `tokenizer.date` is not a date, or the template does not use it.
    """
    try:
        date.fromisoformat(config.date)
    except ValueError as error:
        raise ConfigError(
            "is not a date",
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
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's representation of a space
_UNKNOWN = -1


def text_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> tuple[int | None, str | None]:
    """Count the UTF-8 bytes of the text that ids represent.

    Args:
        tokenizer: the tokenizer that produced the ids.
        ids: ``[n]`` integers.

    Returns:
        The count for the text as encoded (including a normalizer's changes and a prepended
        space); or None and the reason.
    """
    lengths = _byte_lengths(tokenizer)
    if lengths is None:
        return None, "this tokenizer does not say which bytes a token represents"
    found = lengths[ids]
    if (found == _UNKNOWN).any():
        return None, "the text has bytes that the tokenizer writes as its unknown token"
    total = int(found.sum())
    return (total, None) if total else (None, "no learned token represents text")


def bits_per_byte(loss: float, tokens: int, count: int) -> float:
    """Convert a mean loss in nats per token to bits per byte of text.

    Args:
        loss: mean over the supervised tokens.
        tokens: number of supervised tokens.
        count: number of bytes that they represent.
    """
    return loss * tokens / count / math.log(2)


def _byte_lengths(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the bytes of each id, ``[ids] int64``; None if the tokenizer does not provide them."""
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
    """Classify the vocabulary: byte-level (True), SentencePiece (False), or other (None)."""
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
    """Return the id of the unknown token; a byte-level vocabulary does not need one."""
    found = core.token_to_id(str(getattr(core.model, "unk_token", None)))
    return set() if found is None else {int(found)}


def _of_core(core: Core, *, is_bytes: bool) -> Iterator[tuple[int, int]]:
    """Yield ids and byte counts; each character of a byte-level token is one byte."""
    for token, number in core.get_vocab(with_added_tokens=False).items():
        if is_bytes:
            yield number, len(token)
        elif _BYTE.fullmatch(token):
            yield number, 1
        else:
            yield number, len(token.replace(_SPACE, " ").encode("utf-8", "surrogatepass"))
    for number, added in core.get_added_tokens_decoder().items():
        yield number, len(added.content.encode())
