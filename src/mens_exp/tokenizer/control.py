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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer

from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Encoding

__all__ = ["MARK_BEGIN", "MARK_END", "ControlText", "Placed", "placed"]

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
MARK_BEGIN, MARK_END = "\ufdd2", "\ufdd3"  # around what a template marks as generated
_RESERVED = (_OPEN, _CLOSE, MARK_BEGIN, MARK_END)
_PRIVATE = re.compile(f"{MARK_BEGIN}[0-9a-f]+{MARK_END}")
_GUARDED = re.compile(f"{_OPEN}([0-9a-f]+){_CLOSE}")


class Placed(NamedTuple):
    """The tokens of a text that was given in pieces, and the first and last piece of each."""

    ids: np.ndarray
    first: np.ndarray
    last: np.ndarray


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
        if not guarded:
            return [
                one.ids for one in self._core.encode_batch_fast(texts, add_special_tokens=False)
            ]
        ids = self.encode([text if _OPEN not in text else "" for text in texts])
        for number in guarded:
            ids[number] = self._encode_guarded(texts[number])
        return ids

    def encode_pieces(self, texts: Sequence[Sequence[str]]) -> list[Placed]:
        """Encode texts that are given in pieces, each as `encode` would the whole.

        Args:
            texts: the pieces of each text; what is guarded lies within one piece.
        """
        whole = ["".join(pieces) for pieces in texts]
        plain = [text if _OPEN not in text else "" for text in whole]
        found = [
            _of_encoding(encoding, pieces)
            for encoding, pieces in zip(
                self._core.encode_batch(plain, add_special_tokens=False), texts, strict=True
            )
        ]
        for number, text in enumerate(whole):
            if _OPEN in text:
                found[number] = self._guarded_pieces(texts[number])
        return found

    def _guarded_pieces(self, pieces: Sequence[str]) -> Placed:
        spelled = [
            self.unguard(self._control.sub(lambda m: _private(self._ids[m[0]]), piece))
            for piece in pieces
        ]
        encoding = self._plainly.encode("".join(spelled), add_special_tokens=False)
        found = _of_encoding(encoding, spelled)
        real = [self._real.get(token, token) for token in found.ids.tolist()]
        return found._replace(ids=np.array(real, np.int64))

    @property
    def _plainly(self) -> Tokenizer:
        """The tokenizer that knows control tokens by their private spelling alone."""
        if self._plain is None:
            self._plain = self._made_plain()
        return self._plain

    def _encode_guarded(self, text: str) -> list[int]:
        private = self._control.sub(lambda m: _private(self._ids[m[0]]), text)
        whole = self.unguard(private)
        if len(_PRIVATE.findall(whole)) > len(_PRIVATE.findall(private)):
            raise DataError(
                "a text holds the private spelling of a control token",
                found=ascii(text[:60]),
                expected=f"text without the noncharacter {MARK_BEGIN!a}",
            )
        ids = self._plainly.encode(whole, add_special_tokens=False).ids
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


def placed(ids: Sequence[int], spans: np.ndarray, sizes: Sequence[int]) -> Placed:
    """Say which pieces tokens are of.

    Args:
        ids: the tokens.
        spans: begin and end of each in the whole text, ``[tokens, 2]``.
        sizes: how long each piece is.
    """
    ends = np.cumsum(np.asarray(sizes, np.int64))
    begin, end = spans.reshape(-1, 2).T
    most = max(len(sizes) - 1, 0)
    first, last = (
        np.minimum(np.searchsorted(ends, at, side="right"), most)
        for at in (begin, np.maximum(end - 1, begin))
    )
    return Placed(np.asarray(ids, np.int64), first, last)


def _of_encoding(encoding: Encoding, pieces: Sequence[str]) -> Placed:
    spans = np.array(encoding.offsets, np.int64)
    return placed(encoding.ids, spans, [len(piece) for piece in pieces])


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _private(token: int) -> str:
    return f"{MARK_BEGIN}{token:x}{MARK_END}"
