"""Text to ids piece by piece: what stands between two control tokens is tokenized once.

A tokenizer cuts a text at its added tokens before anything else, and what lies between two of them
is normalized, split and merged by itself. So the ids of a text are those of its pieces one after
the other, and a piece that many texts have (a system prompt, the opening of a turn, a prompt with
and without its answer) needs to be tokenized only once.

That holds for added tokens that match as they are written; those that match normalized text do so
inside a piece. Where tokens swallow white space, match whole words only, or could be found inside
one another, and where a trial comes out otherwise than it should, texts are tokenized whole.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

__all__ = ["Pieces", "pieces_of"]

_TRIAL = ("", "a", " a", "\n\n", "b c ", "Été 12")


class Pieces:
    """Encodes texts of one tokenizer from their pieces."""

    def __init__(self, core: Tokenizer, ids: dict[str, int]) -> None:
        """Cut at added tokens, whose texts and ids are given; `pieces_of` says where one may."""
        self._core = core
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)  # as the tokenizer prefers them
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        # A piece that begins a text may be tokenized otherwise than one behind a control token
        # (some put a space before it), so the others stand behind this one.
        self._before = longest_first[0]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts as the tokenizer does."""
        cut = [self._cut.split(text) for text in texts]
        # Even places are pieces, odd ones control tokens.
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
    """Return what encodes texts from their pieces, or None where a tokenizer does not allow it."""
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
    """Tell whether a match of one text could begin inside a match of the other."""
    if one != other and one in other:
        return True
    most = min(len(one), len(other))
    return any(one.endswith(other[:length]) for length in range(1, most))
