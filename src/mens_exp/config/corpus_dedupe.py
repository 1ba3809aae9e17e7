"""Settings of the corpus step dedupe: its definition of a duplicate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mens_exp.config.fields import setting, unless

__all__ = ["DedupeBy", "DedupeConfig"]


class DedupeBy(Enum):
    """The part of a row that is compared."""

    response = "response"
    row = "row"


_NEAR = unless("corpus.dedupe.threshold", None, why="which looks for exact duplicates alone")


@dataclass(kw_only=True, slots=True)
class DedupeConfig:
    """Settings of the step dedupe; the first row of each cluster stays."""

    by: DedupeBy = setting(
        DedupeBy.response,
        "What of two rows is compared: response, all answers (the same code asked for in two ways "
        "is a duplicate), or row, the system prompt and what the user asks as well (for rows of "
        "short answers, where many are rightly the same).",
    )
    threshold: float | None = setting(
        0.8,
        "Jaccard similarity of two rows' sets of shingles from which they are near-duplicates "
        "(measured: benchmarks/dedupe.py plants pairs at 0.7 to 0.95); it is computed, not "
        "estimated, for each pair that MinHash brings together. Null: exact duplicates alone.",
        ge=0.5,
        le=1,
    )
    shingle_tokens: int = setting(
        5,
        "Tokens of a shingle; a token is a word, or a character that is in none. Exact duplicates "
        "are told by the syntax tree in Python, by the words elsewhere.",
        ge=1,
        le=50,
        only_if=_NEAR,
    )
    permutations: int = setting(
        128,
        "Values of a MinHash signature, 4 bytes each on disk. At 0.8 and 128 the bands are 21 of 6 "
        "rows, and miss 0.17 % of the pairs at the threshold.",
        ge=16,
        le=1024,
        only_if=_NEAR,
    )
    processes: int = setting(
        2, "Processes that parse and sign rows; the result is the same for any number.", ge=1
    )
