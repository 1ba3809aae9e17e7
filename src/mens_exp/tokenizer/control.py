"""Text that spells a control token, kept apart from the control tokens that a template writes.

A chat template pastes a row's text between its control tokens, and afterwards nobody can tell
who wrote ``<|im_end|>``. So the text is *guarded* before it is rendered: what spells a control
token stands there as two noncharacters (code points that Unicode keeps out of all text) with the
token's number between them. Encoding turns what is guarded back into plain text, in a tokenizer
that knows the template's control tokens by such a private spelling alone. Where nothing is
guarded, the tokenizer itself encodes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer

from mens_exp.errors import DataError
from mens_exp.tokenizer.pieces import pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MARK_BEGIN", "MARK_END", "ControlText"]

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
MARK_BEGIN, MARK_END = "\ufdd2", "\ufdd3"  # around what a template marks as generated
_RESERVED = (_OPEN, _CLOSE, MARK_BEGIN, MARK_END)
_PRIVATE = re.compile(f"{MARK_BEGIN}[0-9a-f]+{MARK_END}")
_GUARDED = re.compile(f"{_OPEN}([0-9a-f]+){_CLOSE}")


class ControlText:
    """Guards text, and encodes what is guarded as the text that it is."""

    def __init__(self, core: Tokenizer, *, allow: bool = False) -> None:
        """Read the control tokens of a tokenizer.

        Args:
            core: the tokenizer.
            allow: let text that spells a control token be that token.
        """
        self._core = core
        self._tokens = {
            token: what for token, what in core.get_added_tokens_decoder().items() if what.special
        }
        self._ids = {what.content: token for token, what in self._tokens.items()}
        controls = sorted(self._ids, key=len, reverse=True)
        # Ours are always guarded, or text that holds them would be taken for a guard.
        self._texts = [*_RESERVED, *controls]
        self._number = {text: number for number, text in enumerate(self._texts)}
        self._control = _any_of(controls)
        self._to_guard = _any_of(_RESERVED if allow else self._texts)
        self._pieces = pieces_of(core)
        self._plain: Tokenizer | None = None
        self._real: dict[int, int] = {}

    def guard(self, text: str) -> str:
        """Replace what spells a control token; `unguard` gives the text back."""
        return self._to_guard.sub(lambda m: f"{_OPEN}{self._number[m[0]]:x}{_CLOSE}", text)

    def unguard(self, text: str) -> str:
        """Return the text as it was before it was guarded."""
        return _GUARDED.sub(lambda m: self._texts[int(m[1], 16)], text)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts; control tokens are those that are not guarded."""
        guarded = [number for number, text in enumerate(texts) if _OPEN in text]
        if not guarded and self._pieces is not None:
            return self._pieces.encode(texts)
        if not guarded:
            return [
                one.ids for one in self._core.encode_batch_fast(texts, add_special_tokens=False)
            ]
        ids = self.encode([text if _OPEN not in text else "" for text in texts])
        for number in guarded:
            ids[number] = self._encode_guarded(texts[number])
        return ids

    def _encode_guarded(self, text: str) -> list[int]:
        if self._plain is None:
            self._plain = self._made_plain()
        private = self._control.sub(lambda m: _private(self._ids[m[0]]), text)
        whole = self.unguard(private)
        if len(_PRIVATE.findall(whole)) > len(_PRIVATE.findall(private)):
            raise DataError(
                "a text holds the private spelling of a control token",
                found=ascii(text[:60]),
                expected=f"text without the noncharacter {MARK_BEGIN!a}",
            )
        ids = self._plain.encode(whole, add_special_tokens=False).ids
        return [self._real.get(token, token) for token in ids]

    def _made_plain(self) -> Tokenizer:
        """Copy the tokenizer so that it knows control tokens by their private spelling alone."""
        plain = Tokenizer.from_str(self._core.to_str())
        plain.encode_special_tokens = True  # that is: as the text they are
        plain.add_tokens(
            [
                AddedToken(
                    _private(token),
                    single_word=what.single_word,
                    lstrip=what.lstrip,
                    rstrip=what.rstrip,
                    normalized=what.normalized,
                    special=False,
                )
                for token, what in self._tokens.items()
            ]
        )
        privates = {token: plain.token_to_id(_private(token)) for token in self._tokens}
        self._real = {new: token for token, new in privates.items() if new is not None}
        return plain


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _private(token: int) -> str:
    return f"{MARK_BEGIN}{token:x}{MARK_END}"
