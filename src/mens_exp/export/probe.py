"""The text that two models are compared on: real text, encoded once, the same for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.artifacts.certificate import ProbeRecord
from mens_exp.artifacts.digest import digest
from mens_exp.errors import DataError
from mens_exp.rows.encode import encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mens_exp.rows.encode import Labelling
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["Probe", "of_rows", "of_text"]

_LEAST = 2  # tokens of a document: one, and one that follows it


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Documents as ids, each of at least two tokens.

    Attributes:
        documents: in order.
        source: where they are from, in words.
    """

    documents: tuple[tuple[int, ...], ...]
    source: str

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(map(len, self.documents))

    def record(self) -> ProbeRecord:
        """Describe the probe by content."""
        return ProbeRecord(
            source=self.source,
            documents=len(self.documents),
            tokens=self.tokens,
            sha256=digest([list(ids) for ids in self.documents]),
        )


def of_rows(
    sides: Mapping[str, Sequence[TrainingPair]],
    tokenizer: Tokenizer,
    labelling: Labelling,
    tokens: int,
) -> Probe:
    """Take whole rows, as they are trained on, until there are tokens enough.

    Args:
        sides: sides of the split by name, the first to be taken from first; a small corpus has
            too little held out, and then the others fill up.
        tokenizer: with its chat template.
        labelling: how rows become documents, and how long these are.
        tokens: at least so many, as long as there are rows.

    Raises:
        DataError: the template spoils a row, or no row has two tokens.
    """
    documents: list[tuple[int, ...]] = []
    used = []
    for name, pairs in sides.items():
        missing = tokens - sum(map(len, documents))
        if missing <= 0:
            break
        found = _taken(pairs, tokenizer, labelling, missing)
        if found:
            used.append(f"{len(found)} of {name}")
        documents += found
    if not documents:
        raise DataError("there is no row to compare on", where="parity", expected="held-out rows")
    return Probe(documents=tuple(documents), source=f"rows: {', '.join(used)}")


def _taken(
    pairs: Sequence[TrainingPair], tokenizer: Tokenizer, labelling: Labelling, tokens: int
) -> list[tuple[int, ...]]:
    """Encode a few rows at a time until there are tokens enough."""
    found: list[tuple[int, ...]] = []
    for start in range(0, len(pairs), 16):
        encoded = encode(pairs[start : start + 16], tokenizer, labelling)
        for i in range(len(encoded)):
            ids = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
            if len(ids) >= _LEAST:
                found.append(tuple(ids))
            tokens -= len(ids)
            if tokens <= 0:
                return found
    return found


def of_text(path: Path, tokenizer: Tokenizer, *, seq_len: int, tokens: int) -> Probe:
    """Take a file's text from its beginning, in pieces of ``seq_len`` tokens.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or holds too little.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "is no text that can be read",
            where="parity.text",
            found=f"{path}: {error}",
            expected="a file in UTF-8",
        ) from error
    (ids,) = tokenizer.encode_all([text])
    if len(ids) < tokens:
        raise DataError(
            "the text is too short to compare on",
            where="parity.text",
            found=f"{path}: {len(ids)} tokens",
            expected=f"parity.tokens={tokens} or more",
            remedy="name a longer text, or lower parity.tokens",
        )
    pieces = [tuple(ids[start : start + seq_len]) for start in range(0, tokens, seq_len)]
    documents = tuple(piece for piece in pieces if len(piece) >= _LEAST)
    return Probe(documents=documents, source=f"text: {path.name}")
