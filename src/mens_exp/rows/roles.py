"""Attribution of training tokens to their authors, by comparing documents with their rows.

The documents of an encoding are rebuilt from the rows by a different method than the encoder's: the
rows' texts and the template's own text are kept apart, so that the author of each token is known.
If the ids differ, the document was not built from its row, and no roles are reported.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mens_exp.rows.answers import TextEncoder
from mens_exp.rows.documents import ROWS_TOGETHER, spans
from mens_exp.rows.encode import ANCHORS, encode, text_parts
from mens_exp.rows.files import release_pages
from mens_exp.rows.shapes import Role, Shape, contents_of, shape_of_answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mens_exp.rows.documents import Encoded, Labelling, RowDocuments
    from mens_exp.rows.schema import TrainingPair

_ROLES = len(Role)


class PlacedTokens(Protocol):
    """The tokens of a text given in pieces, with the first and the last piece of each token."""

    @property
    def ids(self) -> np.ndarray:
        """The tokens."""

    @property
    def first(self) -> np.ndarray:
        """The piece in which each token starts."""

    @property
    def last(self) -> np.ndarray:
        """The piece in which each token ends."""


@dataclass(frozen=True, slots=True)
class _Joined:
    ids: np.ndarray
    first: np.ndarray
    last: np.ndarray


class PieceEncoder(TextEncoder, Protocol):
    """A tokenizer that reports which pieces of a text its tokens belong to."""

    def encode_pieces(self, texts: Sequence[Sequence[str]]) -> Sequence[PlacedTokens]:
        """Encode texts given in pieces, with the pieces of each token."""


@dataclass(kw_only=True, slots=True)
class RoleCounts:
    """Counts of an encoding's tokens by role.

    Attributes:
        tokens: tokens by role.
        trained: supervised tokens by role.
        documents: number of attributed documents.
        ends: documents that include the end marker of their last answer.
        ends_trained: those of them in which it is supervised.
        missed: unsupervised tokens of last answers. Exceptions are the first token after truncation
            on the left, which has no predecessor, and the only answer token left by truncation on
            the right, which may begin in the template's text.
        too_long: rows with a document over the limit.
        left_of_too_long: supervised tokens that remain of those rows.
        why_unknown: reason why documents could not be attributed; None if all were.
    """

    tokens: np.ndarray = field(default_factory=lambda: np.zeros(_ROLES, np.int64))
    trained: np.ndarray = field(default_factory=lambda: np.zeros(_ROLES, np.int64))
    documents: int = 0
    ends: int = 0
    ends_trained: int = 0
    missed: int = 0
    too_long: list[int] = field(default_factory=list)
    left_of_too_long: int = 0
    why_unknown: str | None = None


@dataclass(frozen=True, slots=True)
class _Document:
    """An untruncated document, its last answer, and the position of the answer's end."""

    ids: np.ndarray
    roles: np.ndarray
    is_answer: np.ndarray
    end: int | None

    def part(self, part: slice) -> _Document:
        """Return a part of the document."""
        end = self.end - part.start if self.end is not None else None
        return _Document(self.ids[part], self.roles[part], self.is_answer[part], end)


def role_counts(
    pairs: Sequence[TrainingPair], documents: Encoded, encoder: PieceEncoder, labelling: Labelling
) -> RoleCounts:
    """Count tokens by role.

    Args:
        pairs: the rows.
        documents: the result of `encode`.
        encoder: the tokenizer with its template, as used by `encode`.
        labelling: the labelling, as used by `encode`.
    """
    counter = _Counter(documents, encoder, labelling)
    for part in spans(len(pairs)):
        counter.take(part.start, list(pairs[part]))
        release_pages(documents.ids, documents.supervised)
    found = counter.found
    if found.why_unknown is None and found.documents < len(documents):
        name = pairs[counter.stuck].name if counter.stuck is not None else "the last row"
        found.why_unknown = f"a document is not its row as the template renders its parts: {name}"
    return found


def supervised_tokens(
    pairs: Iterable[TrainingPair], encoder: TextEncoder, labelling: Labelling
) -> int:
    """Count the tokens of rows that would be supervised without a length limit."""
    endless = dataclasses.replace(labelling, seq_len=2**31 - 1)
    rest, total = iter(pairs), 0
    some = list(itertools.islice(rest, ROWS_TOGETHER))
    while some:
        following = list(itertools.islice(rest, ROWS_TOGETHER))
        if len(following) == 1:  # as in `spans`
            some, following = some + following, []
        total += int(encode(some, encoder, endless).supervised.sum())
        some = following
    return total


def _numbered(
    rows: RowDocuments, pairs: Sequence[TrainingPair], first: int
) -> tuple[list[int], list[TrainingPair]]:
    """Return the rows with each of their answers, and the number of the row of each."""
    ready = enumerate(rows.prepared(pairs), start=first)
    found = [(number, one) for number, pair in ready for one in rows.variants(pair)]
    return [number for number, _ in found], [one for _, one in found]


class _Counter:
    """Iterates over rows and documents in parallel."""

    def __init__(self, documents: Encoded, encoder: PieceEncoder, labelling: Labelling) -> None:
        self.documents, self.encoder, self.labelling = documents, encoder, labelling
        self.rows, self.limit = labelling.rows, labelling.document_tokens
        self.special = np.array(sorted(encoder.special_ids), np.int64)
        self.shapes: dict[tuple[bool | None, bool, int], Shape | None] = {}
        self.found = RoleCounts()
        self.stuck: int | None = None

    def take(self, first: int, pairs: Sequence[TrainingPair]) -> None:
        """Attribute the documents of some rows; ``first`` is the number of the first row."""
        if self.found.why_unknown is not None:
            return
        numbers, variants = _numbered(self.rows, pairs, first)
        last = [len(pair.exchanges) - 1 for pair in variants]
        shaped = [self._shape(pair, k) for pair, k in zip(variants, last, strict=True)]
        if not all(shaped):
            self.found.why_unknown = "the chat template does not show which text is whose"
            return
        texts = [
            self._texts(shape, pair, k)
            for shape, pair, k in zip(shaped, variants, last, strict=True)
            if shape is not None
        ]
        placed = self.encoder.encode_pieces(texts)
        found = zip(numbers, variants, shaped, texts, placed, strict=True)
        for number, of_row in itertools.groupby(found, key=lambda one: one[0]):
            before, is_long = int(self.found.trained.sum()), False
            for _, pair, shape, pieces, one in of_row:
                assert shape is not None, "asked above"
                whole = self._document(shape, one)
                self._answer(number, pair, shape, pieces, whole)
                is_long = is_long or len(whole.ids) > self.limit
            if is_long:
                self.found.too_long.append(number)
                self.found.left_of_too_long += int(self.found.trained.sum()) - before

    def _answer(
        self, number: int, pair: TrainingPair, shape: Shape, pieces: list[str], whole: _Document
    ) -> None:
        placed = self.found.documents
        self._place(pair, shape, pieces, whole)
        if self.found.documents == placed and self.stuck is None:
            self.stuck = number  # may also mean that no part of it was within the limit

    def _place(self, pair: TrainingPair, shape: Shape, pieces: list[str], whole: _Document) -> None:
        if pair.is_text:
            for part in text_parts(len(whole.ids), self.limit):
                self._match(whole.part(part))
            return
        *earlier, _ = learned = self.rows.answers(pair, self.labelling)
        in_one = self._are_in_one(pair, earlier, shape)
        if in_one and (self._match(whole) or self._match(self._apart(shape, pieces))):
            return
        for document in self._each(pair, learned if earlier else ()):
            self._match(document)

    def _each(self, pair: TrainingPair, answers: Sequence[int]) -> Iterator[_Document]:
        """Yield the documents of every answer, because a template may change earlier answers."""
        for k in answers:
            shape = self._shape(pair, k)
            if shape is None:
                continue
            pieces = self._texts(shape, pair, k)
            (placed,) = self.encoder.encode_pieces([pieces])
            before = self.found.documents
            yield self._document(shape, placed)
            if self.found.documents == before:
                yield self._apart(shape, pieces)

    def _are_in_one(self, pair: TrainingPair, earlier: Sequence[int], shape: Shape) -> bool:
        """Return whether one document has all answers, as the template keeps them unchanged."""
        shapes = [self._shape(pair, k) for k in earlier]
        return all(one is not None and one.begins(shape) for one in shapes)

    def _shape(self, pair: TrainingPair, exchange: int) -> Shape | None:
        if pair.conversation is not None:  # tool calls are specific to the row
            return shape_of_answer(pair, exchange, self.encoder)
        key = (None if pair.system is None else bool(pair.system), pair.is_text, exchange)
        if key not in self.shapes:
            self.shapes[key] = shape_of_answer(pair, exchange, self.encoder)
        return self.shapes[key]

    def _texts(self, shape: Shape, pair: TrainingPair, exchange: int) -> list[str]:
        guarded = [self.encoder.guard(text) for text in contents_of(pair, exchange)]
        return [piece.of(guarded) for piece in shape.pieces]

    def _apart(self, shape: Shape, pieces: list[str]) -> _Document:
        """Tokenize prompt, answer and closing separately, as for a token that would straddle."""
        bounds = (0, shape.prompt, shape.answer + 1, len(pieces))
        (prompt,) = self.encoder.encode_pieces([pieces[: shape.prompt]])
        rest = [pieces[a:b] for a, b in itertools.pairwise(bounds[1:])]
        found = [prompt, *map(self._continued, rest)]
        joined = _Joined(
            np.concatenate([one.ids for one in found]),
            np.concatenate([one.first + at for one, at in zip(found, bounds, strict=False)]),
            np.concatenate([one.last + at for one, at in zip(found, bounds, strict=False)]),
        )
        return self._document(shape, joined)

    def _continued(self, pieces: list[str]) -> PlacedTokens:
        """Tokenize pieces as `encode_continued` does."""
        for anchor in ANCHORS:
            (before,) = self.encoder.encode_all([anchor])
            (placed,) = self.encoder.encode_pieces([[anchor, *pieces]])
            many = len(before)
            if placed.ids[:many].tolist() == before:
                return _Joined(placed.ids[many:], placed.first[many:] - 1, placed.last[many:] - 1)
        return self.encoder.encode_pieces([pieces])[0]

    def _document(self, shape: Shape, placed: PlacedTokens) -> _Document:
        by_piece = np.array([piece.role for piece in shape.pieces], np.int64)
        first, last = by_piece[placed.first], by_piece[placed.last]
        # A token that straddles is attributed to the row's text, not the template's.
        roles = np.where(last != Role.TEMPLATE, last, first)
        is_answer = placed.last == shape.answer
        special = np.isin(placed.ids, self.special) & (roles == Role.TEMPLATE)
        end = None
        for piece in np.flatnonzero(by_piece == Role.ASSISTANT):
            behind = np.flatnonzero(special & (placed.first > piece))[:1]
            roles[behind] = Role.END_MARKER
            if piece == shape.answer:
                own = shape.pieces[piece].content is None  # tool calls may include their own end
                last = np.flatnonzero(is_answer & np.isin(placed.ids, self.special) & own)[-1:]
                end = next((int(place) for place in (*behind, *last)), None)
        ids, as_rendered = placed.ids, self.rows.as_rendered
        if as_rendered:
            until = len(ids) if end is None else end + 1
            return _Document(ids[:until], roles[:until], is_answer[:until], end)
        if end is None and self.encoder.eos_id is not None:
            ids = np.append(ids, self.encoder.eos_id)
            roles, is_answer = np.append(roles, Role.END_MARKER), np.append(is_answer, [False])
            end = len(ids) - 1
        return _Document(ids, roles, is_answer, end)

    def _match(self, whole: _Document) -> bool:
        """Consume the next document of the encoding if it matches."""
        number = self.found.documents
        if number == len(self.documents):
            return False
        kept = self._kept(whole.ids)
        part = slice(self.documents.offsets[number], self.documents.offsets[number + 1])
        if not np.array_equal(whole.ids[kept], self.documents.ids[part]):
            return False
        roles, supervised = whole.roles[kept], self.documents.supervised[part]
        found = self.found
        found.documents += 1
        found.tokens += np.bincount(roles, minlength=_ROLES)
        found.trained += np.bincount(roles[supervised], minlength=_ROLES)
        missed = whole.is_answer[kept] & ~supervised
        behind = np.append([True], np.diff(kept) > 1)  # the first token, and the first after a cut
        # Truncation on the right may leave one answer token, which begins in the template.
        is_cut = kept[-1] < len(whole.ids) - 1
        lone = is_cut and not whole.is_answer[kept[-2:-1]].any()
        behind[-1] |= lone
        found.missed += int((missed & ~behind).sum())
        place = np.flatnonzero(kept == whole.end) if whole.end is not None else np.zeros(0, int)
        if len(place):
            found.ends += 1
            found.ends_trained += int(supervised[place[0]])
        return True

    def _kept(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions kept under the length limit."""
        length, limit = len(ids), self.limit
        if length <= limit:
            return np.arange(length)
        if self.labelling.truncation == "right":
            return np.arange(limit)
        bos = self.encoder.bos_id
        opening = int(bos is not None and ids[0] == bos and not (ids[1:] == bos).any())
        return np.append(np.arange(opening), np.arange(length - limit + opening, length))
