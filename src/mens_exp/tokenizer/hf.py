"""A Hugging Face tokenizer read from its files, torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from mens_exp.artifacts.digest import sha256_bytes, sha256_file
from mens_exp.errors import DataError, ModelFileError
from mens_exp.tokenizer.templates import CHATML, Message, render

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["HfTokenizer"]

_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_PROBE = "a small answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTokenizer:
    """tokenizer.json, its special tokens and its chat template.

    ``end_ids`` are the ids that end an answer: the end-of-sequence token, and the control
    token that the chat template puts behind an answer.
    """

    core: Tokenizer = field(repr=False)
    chat_template: str
    template_is_own: bool
    special_tokens: dict[str, str]
    end_ids: set[int]
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
        own = _own_template(directory, config)
        template = CHATML if own is None else own
        special_tokens = _special_tokens(config)
        return cls(
            core=core,
            chat_template=template,
            template_is_own=own is not None,
            special_tokens=special_tokens,
            end_ids=_end_ids(core, template, special_tokens),
            sha256=sha256_file(path),
        )

    @property
    def template_sha256(self) -> str:
        """Hash of the chat template in force."""
        return sha256_bytes(self.chat_template.encode())

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, where there is one."""
        return _id_of(self.core, self.special_tokens.get("eos_token"))

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""
        return _control_ids(self.core)

    @property
    def last_id(self) -> int:
        """Largest id there is."""
        return max(self.core.get_vocab(with_added_tokens=True).values(), default=0)

    @property
    def pad_id(self) -> int:
        """Id that fills padding; masked by length, never by its value."""
        for name in (self.special_tokens.get("pad_token"), self.special_tokens.get("eos_token")):
            token = _id_of(self.core, name)
            if token is not None:
                return token
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


def _id_of(core: Tokenizer, token: str | None) -> int | None:
    found = core.token_to_id(token) if token else None
    return None if found is None else int(found)


def _control_ids(core: Tokenizer) -> set[int]:
    added = core.get_added_tokens_decoder()
    return {token for token, what in added.items() if what.special}


def _end_ids(core: Tokenizer, template: str, special_tokens: dict[str, str]) -> set[int]:
    """Return the ids that end an answer, the template's own marker read off a small answer."""
    eos = _id_of(core, special_tokens.get("eos_token"))
    ends = set() if eos is None else {eos}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = render(template, turns, add_generation_prompt=False, **special_tokens)
    except DataError:  # a template that wants other turns is refused when rows are encoded
        return ends
    closing = core.encode(text.rpartition(_PROBE)[2], add_special_tokens=False).ids
    controls = _control_ids(core)
    return ends | set([token for token in closing if token in controls][:1])


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, over the file that older tokenizers keep their tokens in."""
    config = _read_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return config | _read_object(directory / "special_tokens_map.json")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelFileError("cannot be read", where=str(path), found=str(error)) from error
    if not isinstance(value, dict):
        raise ModelFileError("is no JSON object", where=str(path))
    return value


def _own_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        if template is None:
            raise ModelFileError(
                "has chat templates, but none called default",
                where=str(directory / "tokenizer_config.json"),
                remedy="write the one to use into chat_template.jinja",
            )
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
