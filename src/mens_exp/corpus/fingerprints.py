"""Fingerprints to compare rows by: made in several processes, kept on disk, little in memory."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from mens_exp.config.corpus_dedupe import DedupeBy
from mens_exp.corpus.dedupe import normalised, response_key
from mens_exp.corpus.minhash import Bands, Signer, band_keys
from mens_exp.corpus.shingles import shingles
from mens_exp.corpus.side_by_side import in_order, pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from mens_exp.rows.schema import TrainingPair

__all__ = ["KEY_WORDS", "Fingerprints", "Likeness", "compared_text", "content_key"]

KEY_WORDS: Final = 2  # 64-bit words of a content key: of a billion rows none coincide by chance
_ROWS_AT_ONCE: Final = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """The criterion for near-duplicates, and the search for candidates."""

    threshold: float
    shingle_tokens: int
    permutations: int
    bands: Bands


class _Made(NamedTuple):
    """The fingerprints of some rows."""

    keys: bytes
    sizes: np.ndarray  # [rows] int64, shingles of each
    shingles: np.ndarray  # [shingles] uint32
    signatures: np.ndarray  # [rows, permutations] uint32
    bands: np.ndarray  # [bands, rows] uint64


def content_key(pair: TrainingPair, by: DedupeBy) -> bytes:
    """Return 16 bytes that two rows share only if they are exact duplicates.

    Args:
        pair: the row.
        by: `response` compares its answers, each by `response_key`; `row` the system prompt and
            what the user asks as well, up to white space.
    """
    said = [response_key(answer) for _, answer in pair.exchanges]
    if by is DedupeBy.row:
        said += ["" if pair.system is None else f"system:{normalised(pair.system)}"]
        said += [normalised(asked) for asked, _ in pair.exchanges]
    text = "\0".join(said).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).digest()[: 8 * KEY_WORDS]


def compared_text(pair: TrainingPair, by: DedupeBy) -> str:
    """Return the text whose shingles are compared: the answers, or everything that is said."""
    if by is DedupeBy.response:
        return "\n".join(answer for _, answer in pair.exchanges)
    turns = [text for exchange in pair.exchanges for text in exchange]
    return "\n".join(turns if pair.system is None else [pair.system, *turns])


class Fingerprints:
    """Keys, shingles and signatures of rows, by the number of the row, in files.

    Attributes:
        rows: how many there are.
        keys: file of content keys.
        bands: files of band keys; none where no near-duplicates are looked for.
    """

    def __init__(self, directory: Path, like: Likeness | None) -> None:
        """Name the files; `make` writes them."""
        self.rows = 0
        self.keys = directory / "keys"
        self.bands = [directory / f"band{i}" for i in range(like.bands.bands if like else 0)]
        self._like = like
        self._shingles = directory / "shingles"
        self._signatures = directory / "signatures"
        self._offsets = np.zeros(1, np.int64)

    def make(self, pairs: Iterable[TrainingPair], by: DedupeBy, processes: int) -> None:
        """Write the fingerprints of rows.

        Args:
            pairs: the rows.
            by: what of a row is compared.
            processes: how many work.

        Raises:
            MissingExtra: datasketch is needed, and is not installed.
        """
        work = functools.partial(_made, by=by, like=self._like)
        sizes = [np.zeros(1, np.int64)]
        with contextlib.ExitStack() as stack:
            keys = stack.enter_context(self.keys.open("wb"))
            marks = stack.enter_context(self._shingles.open("wb"))
            signatures = stack.enter_context(self._signatures.open("wb"))
            bands = [stack.enter_context(path.open("wb")) for path in self.bands]
            for made in in_order(work, pieces(pairs, _ROWS_AT_ONCE), processes):
                keys.write(made.keys)
                made.shingles.tofile(marks)
                made.signatures.tofile(signatures)
                for file, band in zip(bands, made.bands, strict=True):
                    band.tofile(file)
                sizes.append(made.sizes)
                self.rows += len(made.keys) // (8 * KEY_WORDS)
        self._offsets = np.cumsum(np.concatenate(sizes))

    def shingles(self, row: int) -> np.ndarray:
        """Return the shingles of a row."""
        start, end = self._offsets[row], self._offsets[row + 1]
        return np.fromfile(self._shingles, "<u4", end - start, offset=4 * start)

    def signatures(self) -> np.ndarray:
        """Map the signatures, ``[rows, permutations] uint32``.

        What was read of a map counts as this process's memory for as long as the map is held.
        """
        assert self._like is not None, "nothing was signed"
        shape = (self.rows, self._like.permutations)
        return np.memmap(self._signatures, "<u4", "r", shape=shape)


def _made(pairs: Sequence[TrainingPair], by: DedupeBy, like: Likeness | None) -> _Made:
    keys = b"".join(content_key(pair, by) for pair in pairs)
    if like is None:
        nothing = np.zeros((0, 0), np.uint32)
        sizes = np.zeros(len(pairs), np.int64)
        return _Made(keys, sizes, nothing, nothing, nothing.astype(np.uint64))
    signer = _signer(like.permutations)
    sets = [shingles(compared_text(pair, by), like.shingle_tokens) for pair in pairs]
    signatures = np.stack([signer.sign(one) for one in sets])
    return _Made(
        keys=keys,
        sizes=np.array([len(one) for one in sets], np.int64),
        shingles=np.concatenate(sets),
        signatures=signatures,
        bands=band_keys(signatures, like.bands),
    )


@functools.cache
def _signer(permutations: int) -> Signer:
    return Signer(permutations)
