"""Documents for fill-in-the-middle (FIM) training of code models on plain texts.

A text is split at two random characters into prefix, middle and suffix. With the model's own tokens
PRE, SUF and MID, a document is (arXiv:2207.14255)

- PSM: PRE prefix SUF suffix MID middle, or
- SPM: PRE SUF suffix MID prefix middle (the paper's variant 2, which begins as PSM does),

followed by the end of the text. Each part is tokenized separately, as in generation, where the
prompt ends before the middle. Other documents are plain text. As there, all tokens are supervised.

A text longer than a sequence is first split into pieces, each with its own middle (the paper's
context-level FIM). Random choices depend on the seed, the row's content and the piece.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from mens_exp.errors import ConfigError, DataError
from mens_exp.rows.answers import Answer, answer_of
from mens_exp.rows.documents import Document, RowDocuments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.rows.answers import TextEncoder
    from mens_exp.rows.documents import Ending, Labelling
    from mens_exp.rows.schema import TrainingPair

# Tokens before prefix, suffix and middle in published tokenizers.
KNOWN: Final = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
# Tokens of a sequence that a piece leaves free: five that frame it, and those added where a split
# divides a token. A document that is still too long stays plain text.
_FREE: Final = 12


class _Infilling(RowDocuments):
    """Plain texts, most of them with their middle at the end; every token is supervised."""

    only_answers = False
    follows_prompts = False

    def check_tokenizer(self, encoder: TextEncoder, labelling: Labelling) -> None:
        """Refuse a tokenizer without the tokens, or that changes the parts of a text.

        Raises:
            ConfigError: it lacks them, or changes the parts.
        """
        sentinels(encoder, dict(labelling.options).get("tokens"))

    def rendered(
        self, pair: TrainingPair, encoder: TextEncoder, labelling: Labelling
    ) -> list[Answer]:
        """Return the documents of a row as texts, in the order of its pieces.

        Raises:
            DataError: the row is not a plain text, or its text contains a token that begins a part.
            ConfigError: the tokenizer lacks the tokens, or changes the parts of a text.
        """
        if not pair.is_text:
            raise DataError(
                "objective=fim fills in the middle of plain texts, and the row is a conversation",
                where=pair.name,
                expected='rows of {"text": "…"}',
                remedy="choose objective=assistant, or name the column of a text with "
                "data.columns={text:response}",
            )
        answer_of(pair, -1, encoder)  # refuses a text that a template has rendered
        options = dict(labelling.options)
        tokens = sentinels(encoder, options.get("tokens"))
        if spelled := [one for one in tokens if one in encoder.guard(pair.response)]:
            raise DataError(
                "the text spells a token that begins a part of it",
                where=pair.name,
                found=", ".join(spelled),
                expected="a text without it",
                remedy="leave the row out",
            )
        limit = labelling.document_tokens
        made = []
        for number, text in enumerate(_pieces(pair.response, encoder, limit - _FREE)):
            plain = Answer(prompt=encoder.text_start, body=encoder.guard(text), closing="")
            moved = _moved(text, tokens, encoder, _draws(options, pair.id, number))
            made.append(plain if moved is None or _length(moved, encoder) > limit else moved)
        return made

    def documents(self, endings: Sequence[Ending], labelling: Labelling) -> list[Document]:
        """Return the documents, with every token supervised."""
        del labelling
        return [Document(own.ids, [True] * len(own.ids)) for own in endings]


FIM = _Infilling()


def sentinels(encoder: TextEncoder, given: Sequence[str] | None) -> tuple[str, str, str]:
    """Return the tokens before prefix, suffix and middle: those given, or the tokenizer's own.

    Raises:
        ConfigError: the tokenizer lacks them, or changes the parts of a text between them.
    """
    for first, second, third in KNOWN if given is None else [tuple(given)]:
        found = encoder.encode_all([first, second, third])
        if all(len(ids) == 1 for ids in found) and len({ids[0] for ids in found}) == len(found):
            tokens = first, second, third
            break
    else:
        raise ConfigError(
            "the tokenizer has no tokens to fill in the middle with",
            where="objective.tokens",
            found="none of those known by name" if given is None else ", ".join(given),
            expected="one token each before prefix, suffix and middle, such as "
            + ", ".join(KNOWN[0]),
            remedy="choose a model of code that has them, name three tokens of this one that its "
            "training left unused with objective.tokens, or set objective=causal",
        )
    text = "".join(f"{token}{part}" for token, part in zip(tokens, ("a", " b", "\n"), strict=True))
    (ids,) = encoder.encode_all([text])
    if encoder.spell(ids) != text:
        raise ConfigError(
            "the tokenizer changes the parts of a text, so that they would not join again",
            where="objective",
            found=repr(encoder.spell(ids)),
            expected=repr(text),
            remedy="choose a model whose tokenizer adds no space to a text, or objective=causal",
        )
    return tokens


def _draws(options: dict[str, Any], row: str, piece: int) -> tuple[bool, bool, float, float]:
    """Draw whether to move a piece's middle, whether as SPM, and the relative split positions."""
    key = f"{options['split_seed']}/fim/{row}/{piece}"
    drawn = hashlib.sha256(key.encode()).digest()
    moved, spm, one, other = (
        (int.from_bytes(drawn[i : i + 8], "little") >> 11) / 2**53 for i in (0, 8, 16, 24)
    )
    return moved < options["rate"], spm < options["spm_rate"], one, other


def _moved(
    text: str,
    tokens: tuple[str, str, str],
    encoder: TextEncoder,
    draws: tuple[bool, bool, float, float],
) -> Answer | None:
    """Return a piece with its middle at the end; None if it stays plain text."""
    is_moved, is_spm, *places = draws
    if not is_moved:
        return None
    first, last = sorted(int(place * (len(text) + 1)) for place in places)
    prefix, middle, suffix = map(encoder.guard, (text[:first], text[first:last], text[last:]))
    pre, suf, mid = tokens
    asked = f"{pre}{suf}{suffix}{mid}{prefix}" if is_spm else f"{pre}{prefix}{suf}{suffix}{mid}"
    return Answer(prompt=encoder.text_start + asked, body=middle, closing="")


def _length(answer: Answer, encoder: TextEncoder) -> int:
    """Return the number of tokens of a document, including the end of the text."""
    return sum(map(len, encoder.encode_all([answer.prompt, answer.body]))) + 1


def _pieces(text: str, encoder: TextEncoder, room: int) -> Iterator[str]:
    """Yield a text in pieces of at most ``room`` tokens, split after a line if possible."""
    (ids,) = encoder.encode_all([encoder.guard(text)])
    if len(ids) <= room or len(text) == 1:
        yield text
        return
    half = len(text) // 2
    at = text.rfind("\n", 0, half) + 1 or half
    yield from _pieces(text[:at], encoder, room)
    yield from _pieces(text[at:], encoder, room)
