"""The interface of a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.tokenizer.control import Placed
    from mens_exp.tokenizer.templates import Message

__all__ = ["Tokenizer"]


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
