"""How many tokens a run would read: counted from a warm cache, else estimated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mens_exp.config.data import WrittenData
from mens_exp.corpus import stdlib
from mens_exp.corpus.filters import asked
from mens_exp.corpus.mix import CHARS_PER_TOKEN, estimated_tokens
from mens_exp.corpus.source import cache_key, load_rows
from mens_exp.corpus.split import Side
from mens_exp.layout.cached import ready
from mens_exp.rows.cache import peek
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.source import Rows

__all__ = ["count_tokens"]

# measured: the stdlib rows' length-weighted mean is 218, 328, 425 and 452 tokens where documents
# are cut at 256, 512, 1,024 and 2,048.
_STDLIB_TYPICAL, _STDLIB_SCALE = 470, 430
_STDLIB_SHARE = 0.33  # measured: characters of rows over bytes of source read


def count_tokens(config: RunConfig, cache: Path) -> dict[str, Any]:
    """Count tokens: exactly from a warm cache, else from characters or file sizes."""
    known = isinstance(config.data, WrittenData) or asked(config.data.filter)
    if not known and not stdlib.is_cached(cache):
        characters = stdlib.source_bytes() * _STDLIB_SHARE
        train = 1 - config.data.val_frac - config.data.heldout_frac
        return {
            "source": config.data.source,
            "train_rows": None,
            "train_tokens": round(characters * train / CHARS_PER_TOKEN),
            "val_tokens": round(characters * config.data.val_frac / CHARS_PER_TOKEN),
            "longest_tokens": config.data.seq_len,
            "typical_tokens": round(
                _STDLIB_TYPICAL * (1 - math.exp(-config.data.seq_len / _STDLIB_SCALE))
            ),
            "exact": False,
            "basis": "estimated from file sizes; nothing is cached yet",
        }
    rows = load_rows(config.data, cache)
    about = rows.record()
    exact = _cached_counts(config, rows, cache)
    lengths = _lengths(rows, config.data.seq_len)
    if exact is not None:
        basis = "counted, from the cache"
        counted = {**about, **exact, **lengths}
        return {"source": rows.source, **counted, "exact": True, "basis": basis}
    return {
        "source": rows.source,
        **about,
        "train_rows": len(rows.train),
        "train_tokens": _estimate_tokens(rows, Side.TRAIN, config.data.seq_len),
        "val_tokens": _estimate_tokens(rows, Side.VAL, config.data.seq_len),
        **lengths,
        "exact": False,
        "basis": "estimated from the rows' characters; not encoded yet",
    }


def _cached_counts(config: RunConfig, rows: Rows, cache: Path) -> dict[str, int] | None:
    directory = ready(config.model, cache)
    if directory is None:
        return None
    tokenizer = load_tokenizer(config.tokenizer, directory)
    train, val = (
        peek(cache, cache_key(config, rows, side, tokenizer)) for side in (Side.TRAIN, Side.VAL)
    )
    if train is None or val is None:
        return None
    return {
        "train_rows": train.documents,
        "train_tokens": train.tokens,
        "val_tokens": val.tokens,
    }


def _estimate_tokens(rows: Rows, side: Side, seq_len: int) -> int:
    return round(sum(_document_tokens(rows, side, seq_len)))


def _document_tokens(rows: Rows, side: Side, seq_len: int) -> list[float]:
    return [min(estimated_tokens(pair), seq_len) for pair in getattr(rows, side.value)]


def _lengths(rows: Rows, seq_len: int) -> dict[str, int]:
    """Return the longest document, and the mean length of the one that a token lies in."""
    lengths = _document_tokens(rows, Side.TRAIN, seq_len) or [0.0]
    squares = sum(length**2 for length in lengths)
    return {
        "longest_tokens": round(max(lengths)),
        "typical_tokens": round(squares / max(sum(lengths), 1.0)),
    }
