"""The number of tokens a run would read: counted from a warm cache, else estimated."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

from mens_exp.config.data import StdlibData, SyntheticData
from mens_exp.corpus import stdlib, synthetic
from mens_exp.corpus.filters import asked
from mens_exp.corpus.mix import CHARS_PER_TOKEN, estimated_tokens
from mens_exp.corpus.source import cache_key, load_rows
from mens_exp.corpus.split import Side
from mens_exp.layout.cached import ready
from mens_exp.rows.cache import peek
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.source import Rows
    from mens_exp.rows.cache import CacheKey, TokenCounts

__all__ = ["count_tokens"]

# measured: the stdlib rows' length-weighted mean is 218, 328, 425 and 452 tokens where documents
# are cut at 256, 512, 1,024 and 2,048.
_STDLIB_TYPICAL, _STDLIB_SCALE = 470, 430
_TEMPLATE_TOKENS = 40  # a chat template's own, of each exchange
# measured: 4,000 generated rows of each kind, characters of prompt and response; under SmolLM2's
# tokenizer the longest of them has 476 tokens less the template's, and the mean length of the row
# that a token lies in is 1.1 times the mean.
_WRITING_CHARS, _REPAIR_CHARS = 515, 845
_GENERATED_LONGEST, _GENERATED_SPREAD = 520, 1.1
_STDLIB_SHARE = 0.33  # measured: characters of rows over bytes of source read


def count_tokens(config: RunConfig, cache: Path) -> dict[str, Any]:
    """Count tokens: exactly from a warm cache, else from characters or file sizes."""
    data = config.data
    is_whole = not asked(data.filter)
    if is_whole and isinstance(data, StdlibData) and not stdlib.is_cached(cache):
        return _of_library(data)
    if is_whole and isinstance(data, SyntheticData) and not synthetic.is_cached(data, cache):
        return _of_generator(data)
    rows = load_rows(config.data, cache)
    if rows.streamed:
        return _of_stream(rows, data.seq_len)
    about = rows.record()
    exact = _cached_counts(config, rows, cache)
    train = _document_tokens(rows, Side.TRAIN, config.data.seq_len)
    lengths = _lengths(train)
    if exact is not None:
        basis = "counted, from the cache"
        counted = {**about, **exact, **lengths}
        return {"source": rows.source, **counted, "exact": True, "basis": basis}
    return {
        "source": rows.source,
        **about,
        "train_rows": len(rows.train),
        "train_tokens": round(sum(train)),
        "val_tokens": _estimate_tokens(rows, Side.VAL, config.data.seq_len),
        **lengths,
        "exact": False,
        "basis": "estimated from the rows' characters; not encoded yet",
    }


def _of_library(data: StdlibData) -> dict[str, Any]:
    characters = stdlib.source_bytes() * _STDLIB_SHARE
    train = 1 - data.val_frac - data.heldout_frac
    typical = _STDLIB_TYPICAL * (1 - math.exp(-data.seq_len / _STDLIB_SCALE))
    return {
        "source": data.source,
        "train_rows": None,
        "train_tokens": round(characters * train / CHARS_PER_TOKEN),
        "val_tokens": round(characters * data.val_frac / CHARS_PER_TOKEN),
        "longest_tokens": data.seq_len,
        "typical_tokens": round(typical),
        "exact": False,
        "basis": "estimated from file sizes; nothing is cached yet",
    }


def _of_generator(data: SyntheticData) -> dict[str, Any]:
    rows = synthetic.counts(data)
    characters = _WRITING_CHARS + data.repair_frac * (_REPAIR_CHARS - _WRITING_CHARS)
    tokens = min(characters / CHARS_PER_TOKEN + _TEMPLATE_TOKENS, data.seq_len)
    return {
        "source": data.source,
        "train_rows": rows[Side.TRAIN],
        "train_tokens": round(rows[Side.TRAIN] * tokens),
        "val_tokens": round(rows[Side.VAL] * tokens),
        "longest_tokens": min(_GENERATED_LONGEST, data.seq_len),
        "typical_tokens": round(min(_GENERATED_SPREAD * tokens, data.seq_len)),
        "exact": False,
        "basis": "rows as asked for, tokens estimated; nothing is generated yet",
    }


def _of_stream(rows: Rows, seq_len: int) -> dict[str, Any]:
    """Estimate from the first rows, and how large a part of the files these are."""
    about = rows.record()
    files, read = about["streaming"].get("file_bytes", {}), about["streaming"]["first_rows"]
    scale, basis = 1.0, f"of the first {read['rows']} rows, estimated; the others are not read"
    if files and read["bytes"] and all(name.endswith(".jsonl") for name in files):
        scale = max(sum(files.values()) / read["bytes"], 1.0)
        basis = f"estimated from the first {read['rows']} rows and the sizes of the files"
    train = _document_tokens(rows, Side.TRAIN, seq_len)
    return {
        "source": rows.source,
        **about,
        "train_rows": round(len(rows.train) * scale),
        "train_tokens": round(round(sum(train)) * scale),
        "val_tokens": _estimate_tokens(rows, Side.VAL, seq_len),
        **_lengths(train),
        "exact": False,
        "basis": basis,
    }


def _cached_counts(config: RunConfig, rows: Rows, cache: Path) -> dict[str, Any] | None:
    directory = ready(config.model, cache)
    if directory is None:
        return None
    tokenizer = load_tokenizer(config.tokenizer, directory)
    key, val_key = (cache_key(config, rows, side, tokenizer) for side in (Side.TRAIN, Side.VAL))
    train, val = peek(cache, key), peek(cache, val_key)
    if train is None or val is None:
        return None
    return {
        "train_rows": train.documents,
        "train_tokens": train.tokens,
        "val_tokens": val.tokens,
        **_contract(config, cache, key, train),
    }


def _contract(config: RunConfig, cache: Path, key: CacheKey, counts: TokenCounts) -> dict[str, Any]:
    """Return the token part of the data contract where an earlier run has made it."""
    from mens_exp.corpus import contract_rules, token_part  # a cold plan does without

    known = token_part.known_token_part(cache, key, counts)
    if known is None:
        return {}
    refusals = contract_rules.of_tokens(known.tokens, config.data.contract, key.labelling)
    return {
        "contract": {
            "tokens": known.tokens,
            "unknown": known.unknown,
            "refusals": [str(error) for error in refusals],
        }
    }


def _estimate_tokens(rows: Rows, side: Side, seq_len: int) -> int:
    return round(sum(_document_tokens(rows, side, seq_len)))


def _document_tokens(rows: Rows, side: Side, seq_len: int) -> array[float]:
    """Estimate the documents of a side; of rows on disk this reads them."""
    return array("d", (min(estimated_tokens(pair), seq_len) for pair in getattr(rows, side.value)))


def _lengths(documents: Sequence[float]) -> dict[str, int]:
    """Return the longest document, and the mean length of the one that a token lies in."""
    squares = sum(length**2 for length in documents)
    return {
        "longest_tokens": round(max(documents, default=0.0)),
        "typical_tokens": round(squares / max(sum(documents), 1.0)),
    }
