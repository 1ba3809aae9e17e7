"""Similarity of rows: hashed shingles and MinHash signatures with bands, kept on disk.

A token is a run of letters, digits and underscores, a letter of a script without spaces, or any
other single character except white space. A shingle is a fixed number of consecutive tokens; a
shorter text is one shingle. Shingles are hashed to 32 bits: between two texts of 250 shingles each,
one pair of texts in 70,000 has a collision.

Two signatures agree at one position with a probability equal to the Jaccard similarity j of the
sets, and in all rows of at least one band with ``1 - (1 - j**rows)**bands`` (Leskovec, Rajaraman
and Ullman, Mining of Massive Datasets, 3.4). Fingerprints are computed in several processes and
kept mostly on disk.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from mens_exp.config.corpus import DedupeBy
from mens_exp.corpus.large_files import map_in_order, pieces
from mens_exp.corpus.split import normalised, response_key
from mens_exp.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from datasketch import MinHash

    from mens_exp.rows.schema import TrainingPair

UNSPACED: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Kana and Han, for use in a character class; one character is roughly a word."""
_TOKEN: Final = re.compile(rf"[^\W{UNSPACED}]+|\S")
_MULTIPLIER: Final = 0x9E3779B97F4A7C15  # the odd number nearest to 2**64 over the golden ratio
_MOST_KNOWN: Final = 2**17  # cached token hashes, some 20 MB
_known: dict[str, int] = {}


def tokens(text: str) -> list[str]:
    """Split a text into tokens."""
    return _TOKEN.findall(text)


def shingles(text: str, size: int) -> np.ndarray:
    """Return the set of a text's shingles.

    Args:
        text: any text.
        size: tokens per shingle.

    Returns:
        ``[shingles] uint32``, sorted, distinct, never empty; identical on every machine.
    """
    hashes = token_hashes(text)
    found = runs(hashes, min(size, len(hashes)) or 1)
    if not len(found):  # a text without any token
        found = np.zeros(1, np.uint64)
    return np.unique((found >> np.uint64(32)).astype(np.uint32))


def token_hashes(text: str) -> np.ndarray:
    """Return the 64-bit hash of each token of a text, in order."""
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    hashes = []
    for token in tokens(text):
        value = _known.get(token)
        if value is None:
            raw = token.encode("utf-8", "surrogatepass")
            value = int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")
            _known[token] = value
        hashes.append(value)
    return np.array(hashes, np.uint64)


def runs(hashes: np.ndarray, size: int) -> np.ndarray:
    """Return the 64-bit hash of each token n-gram, in order.

    Args:
        hashes: the token hashes.
        size: tokens per n-gram, at least 1; hashes of different sizes are unrelated.
    """
    found = np.full(max(len(hashes) - size + 1, 0), size, np.uint64)
    with np.errstate(over="ignore"):
        for place in range(size):
            found *= np.uint64(_MULTIPLIER)
            found += hashes[place : place + len(found)]
    return mixed(found)


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Jaccard similarity of two shingle sets.

    Args:
        one: as `shingles` returns it.
        other: as `shingles` returns it.
    """
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)


def mixed(values: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit values (the finalizer of MurmurHash3, a bijection)."""
    half = np.uint64(33)
    with np.errstate(over="ignore"):
        values = (values ^ (values >> half)) * np.uint64(0xFF51AFD7ED558CCD)
        values = (values ^ (values >> half)) * np.uint64(0xC4CEB9FE1A85EC53)
    spread: np.ndarray = values ^ (values >> half)
    return spread


MOST_MISSED: Final = 0.005  # fraction of pairs at the threshold, if the permutations allow it


class Bands(NamedTuple):
    """The bands of a signature: ``bands`` of ``rows`` values each."""

    bands: int
    rows: int

    def missed(self, similarity: float) -> float:
        """Return the probability that two sets of this Jaccard similarity agree in no band."""
        return float((1 - similarity**self.rows) ** self.bands)


def bands_for(threshold: float, permutations: int) -> Bands:
    """Choose the bands with the fewest false candidates and few missed near-duplicates.

    Args:
        threshold: Jaccard similarity at or above which rows are near-duplicates.
        permutations: values per signature.

    Returns:
        The most rows per band that miss at most `MOST_MISSED` of the pairs at the threshold; one
        row per band if even that misses more.
    """
    for rows in range(permutations, 1, -1):
        bands = Bands(bands=permutations // rows, rows=rows)
        if bands.missed(threshold) <= MOST_MISSED:
            return bands
    return Bands(bands=permutations, rows=1)


class Signer:
    """Computes MinHash signatures of shingle sets.

    ``datasketch`` draws and applies the permutations. `rensa` is nine times as fast (measured at
    250 shingles: 5 against 43 microseconds), but this is a tenth of the time per row, its
    signatures change between versions, and it would be an additional dependency.
    """

    def __init__(self, permutations: int) -> None:
        """Draw the permutations.

        Args:
            permutations: values per signature.

        Raises:
            MissingExtra: datasketch is not installed.
        """
        self._empty = _empty(permutations)

    def sign(self, shingles: np.ndarray) -> np.ndarray:
        """Return the signature of a set, ``[permutations] uint32``."""
        made = self._empty.copy()
        made.update_batch(shingles)
        return np.asarray(made.hashvalues, np.uint32)


def band_keys(signatures: np.ndarray, bands: Bands) -> np.ndarray:
    """Hash each band of each signature.

    Args:
        signatures: ``[rows, permutations] uint32``.
        bands: the layout of the bands; values after the last band are ignored.

    Returns:
        ``[bands, rows] uint64``; equal bands have equal keys, and collisions are rare.
    """
    used = signatures[:, : bands.bands * bands.rows].astype(np.uint64)
    keys = np.zeros((len(used), bands.bands), np.uint64)
    with np.errstate(over="ignore"):
        for place in range(bands.rows):
            keys = mixed(keys * np.uint64(_MULTIPLIER) + used[:, place :: bands.rows])
    return np.ascontiguousarray(keys.T)


def _empty(permutations: int) -> MinHash:
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise MissingExtra(
            "datasketch is needed to find near-duplicates",
            where="corpus.dedupe.threshold",
            remedy="run: pip install 'mens-exp[corpus]', or look for exact duplicates alone with "
            "corpus.dedupe.threshold=null",
        ) from error
    return MinHash(num_perm=permutations, hashfunc=_as_it_is)


def _as_it_is(value: int) -> int:
    """Return the shingle, which is already a hash."""
    return value


KEY_WORDS: Final = 2  # 64-bit words per content key: no chance collision in a billion rows
_ROWS_AT_ONCE: Final = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """The criterion for near-duplicates, and the search for candidates."""

    threshold: float
    shingle_tokens: int
    permutations: int
    bands: Bands


class _Made(NamedTuple):
    """The fingerprints of a batch of rows."""

    keys: bytes
    sizes: np.ndarray  # [rows] int64, shingles per row
    shingles: np.ndarray  # [shingles] uint32
    signatures: np.ndarray  # [rows, permutations] uint32
    bands: np.ndarray  # [bands, rows] uint64


def content_key(pair: TrainingPair, by: DedupeBy) -> bytes:
    """Return a 16-byte key that is equal for exact duplicates only.

    Args:
        pair: the row.
        by: `response` compares answers by `response_key`; `row` also compares the system prompt
            and the user's turns, ignoring white space differences, and further fields such as a
            label or a rejected answer.
    """
    said = [response_key(answer) for _, answer in pair.exchanges]
    if by is DedupeBy.row:
        said += ["" if pair.system is None else f"system:{normalised(pair.system)}"]
        said += [normalised(asked) for asked, _ in pair.exchanges]
        said += [f"{name}:{value!r}" for name, value in pair.fields]
    text = "\0".join(said).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).digest()[: 8 * KEY_WORDS]


def compared_text(pair: TrainingPair, by: DedupeBy) -> str:
    """Return the text whose shingles are compared: the answers, or the whole conversation."""
    if by is DedupeBy.response:
        return "\n".join(answer for _, answer in pair.exchanges)
    turns = [text for exchange in pair.exchanges for text in exchange]
    return "\n".join(turns if pair.system is None else [pair.system, *turns])


class Fingerprints:
    """Keys, shingles and signatures of rows by row number, in files.

    Attributes:
        rows: number of rows.
        keys: file of content keys.
        bands: files of band keys; empty without a search for near-duplicates.
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
            by: the part of a row that is compared.
            processes: number of processes.

        Raises:
            MissingExtra: datasketch is required and not installed.
        """
        work = functools.partial(_made, by=by, like=self._like)
        sizes = [np.zeros(1, np.int64)]
        with contextlib.ExitStack() as stack:
            keys = stack.enter_context(self.keys.open("wb"))
            marks = stack.enter_context(self._shingles.open("wb"))
            signatures = stack.enter_context(self._signatures.open("wb"))
            bands = [stack.enter_context(path.open("wb")) for path in self.bands]
            for made in map_in_order(work, pieces(pairs, _ROWS_AT_ONCE), processes):
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
        """Memory-map the signatures, ``[rows, permutations] uint32``.

        Pages that were read count as memory of this process until the map is released.
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
