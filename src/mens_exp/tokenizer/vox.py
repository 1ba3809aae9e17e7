"""VoxTokenizer: 131 ids, bit-compatible with the Vox mens trainer's, its losses included.

0 is PAD, 1 UNK, 2 EOS; printable ASCII is 3 to 97; 33 compounds follow from 98. At each place the
first compound *in list order* that matches is taken, not the longest; then an ASCII character;
then UNK for the one byte there. Newlines, tabs and every byte of non-ASCII text are therefore lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.artifacts.digest import digest, sha256_bytes
from mens_exp.tokenizer.control import Placed, placed
from mens_exp.tokenizer.templates import CHATML, DATE, Message, generated_spans, is_dated, render

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMPOUNDS", "VOCAB_SIZE", "VoxTokenizer"]

PAD, UNK, EOS = 0, 1, 2
_FIRST_ASCII, _LAST_ASCII = 32, 126
COMPOUNDS = (
    "workflow", "activity", "ret ", "let ", "actor ", "fn ", "type ", "import ", "spawn(",
    "match ", "with {", "->", "=>", "::", "..", "!=", "==", ">=", "<=", "<|im_start|>",
    "<|im_end|>", "```", "@mcp", "@table", "@query", "@mutation", "@action", "@server", "@test",
    "@component", "@agent_def", "@skill", "@v0",
)  # fmt: skip
_FIRST_COMPOUND = 3 + _LAST_ASCII - _FIRST_ASCII + 1
VOCAB_SIZE = _FIRST_COMPOUND + len(COMPOUNDS)
_IM_START, _IM_END = (_FIRST_COMPOUND + COMPOUNDS.index(f"<|im_{x}|>") for x in ("start", "end"))

# Every id fits a byte, so that text between compounds is encoded by one table lookup a run.
_OF_BYTE = bytes(
    byte - _FIRST_ASCII + 3 if _FIRST_ASCII <= byte <= _LAST_ASCII else UNK for byte in range(256)
)
_OF_COMPOUND = {
    text.encode(): bytes([_FIRST_COMPOUND + place]) for place, text in enumerate(COMPOUNDS)
}
# An alternation takes the first alternative that matches, which is list order.
_COMPOUND = re.compile(b"(" + b"|".join(map(re.escape, _OF_COMPOUND)) + b")")
_TEXT = (
    "",  # PAD
    "\N{REPLACEMENT CHARACTER}",  # UNK
    "",  # EOS
    *map(chr, range(_FIRST_ASCII, _LAST_ASCII + 1)),
    *COMPOUNDS,
)
_BYTES = [1] * _FIRST_COMPOUND + [len(text) for text in COMPOUNDS]


@dataclass(frozen=True, kw_only=True, slots=True)
class VoxTokenizer:
    """The fixed tokenizer, under ChatML's exact strings; a marker in a text is that marker."""

    chat_template: str = CHATML
    template_source: str = "ChatML"
    date: str = DATE
    allow_control_text: bool = True  # its ids leave no way to tell a row's markers from ours

    @property
    def sha256(self) -> str:
        """Hash of the vocabulary."""
        return digest({"tokenizer": "vox", "vocabulary": list(_TEXT)})

    @property
    def template_sha256(self) -> str:
        """Hash of the chat template in force."""
        return sha256_bytes(self.chat_template.encode())

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of control tokens by role; PAD, UNK and EOS have none."""
        return {}

    @property
    def is_dated(self) -> bool:
        """Whether the chat template asks for the date."""
        return is_dated(self.chat_template)

    @property
    def bos_id(self) -> None:
        """There is no begin-of-sequence token."""
        return

    @property
    def adds_bos(self) -> bool:
        """Nothing stands before a text."""
        return False

    @property
    def eos_id(self) -> int:
        """Id of the end-of-sequence token."""
        return EOS

    @property
    def pad_id(self) -> int:
        """Id that fills padding."""
        return PAD

    @property
    def last_id(self) -> int:
        """Highest id there is."""
        return VOCAB_SIZE - 1

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""
        return {PAD, EOS, _IM_START, _IM_END}

    @property
    def end_ids(self) -> set[int]:
        """Ids that end an answer: EOS, and ChatML's end marker."""
        return {EOS, _IM_END}

    def render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """Render a conversation under the chat template."""
        return render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            today=self.date,
        )

    def generated_spans(self, messages: list[Message]) -> list[tuple[int, int]] | None:
        """Return what the template marks as generated, in characters of `render`'s text."""
        return generated_spans(self.chat_template, messages, today=self.date)

    def guard(self, text: str) -> str:
        """Return the text as it is: a marker in it is that marker."""
        return text

    def unguard(self, text: str) -> str:
        """Return the text as it is."""
        return text

    def encode_prompts(self, conversations: Sequence[list[Message]]) -> list[list[int]]:
        """Encode conversations up to where the assistant begins, as training does."""
        return [self.encode(self.render(c, add_generation_prompt=True)) for c in conversations]

    def encode(self, text: str) -> list[int]:
        """Encode a text; lone surrogates are three bytes, as in the UTF-8 of the reference."""
        pieces = _COMPOUND.split(text.encode("utf-8", "surrogatepass"))
        runs = [piece.translate(_OF_BYTE) for piece in pieces]
        runs[1::2] = [_OF_COMPOUND[piece] for piece in pieces[1::2]]
        return list(b"".join(runs))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts."""
        return [self.encode(text) for text in texts]

    def encode_pieces(self, texts: Sequence[Sequence[str]]) -> list[Placed]:
        """Encode texts given in pieces, and say which piece each token is of; bytes are counted."""
        return [_placed(self.encode("".join(pieces)), pieces) for pieces in texts]

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids; control tokens have their texts already."""
        return self.decode(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids: PAD and EOS are dropped, UNK is U+FFFD.

        So is an id past the vocabulary, which a model whose table was filled up can still emit.
        """
        unknown = _TEXT[UNK]
        return "".join([_TEXT[i] if 0 <= i < VOCAB_SIZE else unknown for i in ids])


def _placed(ids: list[int], pieces: Sequence[str]) -> Placed:
    """Every id is one byte, but for the compounds."""
    sizes = np.array([_BYTES[token] for token in ids], np.int64)
    ends = np.cumsum(sizes)
    lengths = [len(piece.encode("utf-8", "surrogatepass")) for piece in pieces]
    return placed(ids, np.stack([ends - sizes, ends], axis=1), lengths)
