"""Control tokens in user text, and tokenization of the pieces between control tokens.

A chat template inserts a row's text between its control tokens, after which the author of an
``<|im_end|>`` cannot be determined. Text is therefore *guarded* before rendering: anything that
spells a control token is replaced by two noncharacters (code points that Unicode excludes from
text) around the token's number. Encoding turns guarded sequences back into plain text, in a
tokenizer that knows the template's control tokens only under such a private spelling. If nothing is
guarded, the tokenizer itself encodes.

A tokenizer first splits a text at its added tokens, and normalizes, splits and merges the text
between two of them separately. The ids of a text are therefore the concatenated ids of its pieces,
and a piece shared by many texts (a system prompt, the start of a turn, a prompt with and without
its answer) is tokenized only once. This holds for added tokens that match literally; those that
match normalized text do so inside a piece. If tokens absorb white space, match only whole words or
can overlap, or if a trial gives different ids, texts are tokenized as a whole.
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

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
MARK_BEGIN, MARK_END = "\ufdd2", "\ufdd3"  # around text that a template marks as generated
_RESERVED = (_OPEN, _CLOSE, MARK_BEGIN, MARK_END)
_PRIVATE = re.compile(f"{MARK_BEGIN}[0-9a-f]+{MARK_END}")
_GUARDED = re.compile(f"{_OPEN}([0-9a-f]+){_CLOSE}")


class Placed(NamedTuple):
    """The tokens of a text given in pieces, with the first and the last piece of each token."""

    ids: np.ndarray
    first: np.ndarray
    last: np.ndarray


class ControlText:
    """Guards text, and encodes guarded text as the plain text that it represents."""

    def __init__(self, core: Tokenizer, *, allow: bool = False) -> None:
        """Read the control tokens of a tokenizer.

        Args:
            core: the tokenizer.
            allow: whether text that spells a control token becomes that token.
        """
        self._core = core
        self._tokens = {
            token: what for token, what in core.get_added_tokens_decoder().items() if what.special
        }
        self._ids = {what.content: token for token, what in self._tokens.items()}
        controls = sorted(self._ids, key=len, reverse=True)
        # Our noncharacters are guarded too, or text that contains them would look guarded.
        self._texts = [*_RESERVED, *controls]
        self._number = {text: number for number, text in enumerate(self._texts)}
        self._control = _any_of(controls)
        self._to_guard = _any_of(_RESERVED if allow else self._texts)
        self._pieces = pieces_of(core)
        self._plain: Tokenizer | None = None
        self._real: dict[int, int] = {}

    def guard(self, text: str) -> str:
        """Replace text that spells a control token; `unguard` restores it."""
        return self._to_guard.sub(lambda m: f"{_OPEN}{self._number[m[0]]:x}{_CLOSE}", text)

    def unguard(self, text: str) -> str:
        """Return the text as it was before guarding."""
        return _GUARDED.sub(lambda m: self._texts[int(m[1], 16)], text)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts; only unguarded control tokens become control tokens."""
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

    def encode_pieces(self, texts: Sequence[Sequence[str]]) -> list[Placed]:
        """Encode texts given in pieces, with the same result as `encode` for the whole text.

        Args:
            texts: the pieces of each text; a guarded sequence must be within one piece.
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
        """The tokenizer that knows control tokens only by their private spelling."""
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
        """Copy the tokenizer, so that it knows control tokens only by their private spelling."""
        plain = Tokenizer.from_str(self._core.to_str())
        plain.encode_special_tokens = True  # encodes them as plain text
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
    """Determine the pieces that tokens belong to.

    Args:
        ids: the tokens.
        spans: start and end of each token in the whole text, ``[tokens, 2]``.
        sizes: length of each piece.
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


_TRIAL = ("", "a", " a", "\n\n", "b c ", "Été 12")


class Pieces:
    """Encodes texts with one tokenizer from their pieces."""

    def __init__(self, core: Tokenizer, ids: dict[str, int]) -> None:
        """Configure splitting at added tokens, given their texts and ids; see `pieces_of`."""
        self._core = core
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)  # as the tokenizer prefers them
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        # A piece at the start of a text may be tokenized differently than one after a control token
        # (some prepend a space), so the others are placed after this token.
        self._before = longest_first[0]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts as the tokenizer does."""
        cut = [self._cut.split(text) for text in texts]
        # Even positions are pieces, odd ones control tokens.
        first = list(dict.fromkeys(parts[0] for parts in cut))
        later = list(dict.fromkeys(piece for parts in cut for piece in parts[2::2]))
        behind = [self._before + piece for piece in later]
        found = self._core.encode_batch_fast([*first, *behind], add_special_tokens=False)
        begun = {text: one.ids for text, one in zip(first, found, strict=False)}
        known = {text: one.ids[1:] for text, one in zip(later, found[len(first) :], strict=True)}
        return [self._joined(parts, begun[parts[0]], known) for parts in cut]

    def _joined(self, parts: list[str], begun: list[int], known: dict[str, list[int]]) -> list[int]:
        ids = begun.copy()
        for token, piece in zip(parts[1::2], parts[2::2], strict=True):
            ids.append(self._ids[token])
            ids += known[piece]
        return ids


def pieces_of(core: Tokenizer) -> Pieces | None:
    """Return an encoder from pieces; None if the tokenizer does not support it."""
    added = core.get_added_tokens_decoder()
    as_written = {what.content: token for token, what in added.items() if not what.normalized}
    plain = not any(
        what.lstrip or what.rstrip or what.single_word
        for what in added.values()
        if not what.normalized
    )
    texts = list(as_written)
    apart = all(not _overlap(one, other) for one in texts for other in texts)
    if not (as_written and plain and apart) or core.encode_special_tokens:
        return None
    pieces = Pieces(core, as_written)
    tried = [joined.join([piece, *_TRIAL, piece]) for joined in texts[:3] for piece in _TRIAL]
    whole = [core.encode(text, add_special_tokens=False).ids for text in tried]
    return pieces if pieces.encode(tried) == whole else None


def _overlap(one: str, other: str) -> bool:
    """Return whether a match of one text could start inside a match of the other."""
    if one != other and one in other:
        return True
    most = min(len(one), len(other))
    return any(one.endswith(other[:length]) for length in range(1, most))
