"""A Hugging Face tokenizer read from its files, torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from mens_exp.artifacts.digest import sha256_bytes, sha256_file
from mens_exp.errors import ModelFileError
from mens_exp.tokenizer.templates import CHATML, Message, render

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["HfTokenizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTokenizer:
    """tokenizer.json, its special tokens and its chat template."""

    core: Tokenizer = field(repr=False)
    chat_template: str
    template_is_own: bool
    special_tokens: dict[str, str]
    sha256: str

    @classmethod
    def from_directory(cls, directory: Path) -> HfTokenizer:
        """Read the tokenizer of a model directory.

        Raises:
            ModelFileError: tokenizer.json is absent or no tokenizer.
        """
        path = directory / "tokenizer.json"
        try:
            core = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for every fault
            raise ModelFileError("is no tokenizer", where=str(path), found=str(error)) from error
        core.no_padding()
        core.no_truncation()
        config = _tokenizer_config(directory)
        template = _own_template(directory, config)
        return cls(
            core=core,
            chat_template=template if template is not None else CHATML,
            template_is_own=template is not None,
            special_tokens=_special_tokens(config),
            sha256=sha256_file(path),
        )

    @property
    def template_sha256(self) -> str:
        """Hash of the chat template in force."""
        return sha256_bytes(self.chat_template.encode())

    @property
    def end_ids(self) -> set[int]:
        """Ids that end an answer: the end-of-sequence token and ChatML's end marker."""
        names = {self.special_tokens.get("eos_token"), "<|im_end|>"}
        ids = (self.core.token_to_id(name) for name in names if name)
        return {token for token in ids if token is not None}

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""
        added = self.core.get_added_tokens_decoder()
        return {token for token, what in added.items() if what.special}

    @property
    def pad_id(self) -> int:
        """Id that fills padding; masked by length, never by its value."""
        for name in (self.special_tokens.get("pad_token"), self.special_tokens.get("eos_token")):
            token = self.core.token_to_id(name) if name else None
            if token is not None:
                return int(token)
        return 0

    def render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """Render a conversation under the chat template in force."""
        return render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens,
        )

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without adding special tokens of the tokenizer's own."""
        encodings = self.core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens left out."""
        return str(self.core.decode(list(ids), skip_special_tokens=True))


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelFileError("cannot be read", where=str(path), found=str(error)) from error
    return dict(value)


def _own_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
