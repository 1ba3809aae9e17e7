"""The number of tokens that a run would train on: counted if its rows are encoded, else estimated.

Constants come from the rows of the built-in sources, as measured.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any

from mens_exp.config.data import StdlibData, SyntheticData
from mens_exp.config.model import HfModel
from mens_exp.config.objective_spec import shares_prompts
from mens_exp.corpus import stdlib, synthetic
from mens_exp.corpus.mix import CHARS_PER_TOKEN, estimated_tokens
from mens_exp.corpus.source import cache_key, labelling_of, load_rows
from mens_exp.corpus.split import Side, asked
from mens_exp.errors import MensError, ModelFileError
from mens_exp.layout.model_cache import ready_directory
from mens_exp.rows.cache import peek
from mens_exp.rows.documents import share_prompts
from mens_exp.rows.encode import encode
from mens_exp.rows.packing import count_blocks
from mens_exp.rows.schema import REJECTED
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.row_files import Rows
    from mens_exp.rows.cache import CacheKey, TokenCounts
    from mens_exp.rows.documents import Encoded
    from mens_exp.rows.schema import TrainingPair

# measured: the length-weighted mean of the stdlib rows is 218, 328, 425 and 452 tokens if documents
# are truncated at 256, 512, 1,024 and 2,048.
_STDLIB_TYPICAL, _STDLIB_SCALE = 470, 430
_TEMPLATE_TOKENS = 40  # tokens that a chat template adds to each exchange
# measured: 4,000 generated rows of each kind, in characters of prompt and response. With SmolLM2's
# tokenizer the longest has 476 tokens without the template's, and the token-weighted mean length
# of a row is 1.1 times the plain mean.
_WRITING_CHARS, _REPAIR_CHARS = 515, 845
_GENERATED_LONGEST, _GENERATED_SPREAD = 520, 1.1
_STDLIB_SHARE = 0.33  # measured: characters of rows per byte of source read


def count_tokens(config: RunConfig, cache: Path) -> dict[str, Any]:
    """Count tokens exactly from a warm cache, or else estimate them.

    Estimates use characters, some encoded rows if the tokenizer is available, or file sizes. The
    virtual tokens of an adapter are included.
    """
    data, virtual = config.data, config.lora.spec.virtual_tokens(config.lora)
    is_whole = not asked(data.filter)
    if is_whole and isinstance(data, StdlibData) and not stdlib.is_cached(cache):
        return _of_library(data, virtual)
    if is_whole and isinstance(data, SyntheticData) and not synthetic.is_cached(data, cache):
        return _of_generator(data, virtual)
    rows = load_rows(config.data, cache, keep=True)
    if rows.streamed:
        return _of_stream(config, rows, cache)
    about = {**rows.record(), **_lopsided(config, rows), **_shared(config, rows, cache)}
    exact = _cached_counts(config, rows, cache)
    if exact is not None:
        basis = "counted, from the cache"
        return {"source": rows.source, **about, **exact, "exact": True, "basis": basis}
    scale, basis = _sampled(config, rows, cache)
    train = _document_tokens(rows, Side.TRAIN, config, scale)
    return {
        "source": rows.source,
        **about,
        "train_rows": len(rows.train),
        "train_tokens": round(sum(train)),
        "val_tokens": round(sum(_document_tokens(rows, Side.VAL, config, scale))),
        **_lengths(train),
        "exact": False,
        "basis": basis,
    }


def _of_library(data: StdlibData, virtual: int) -> dict[str, Any]:
    train = 1 - data.val_frac - data.heldout_frac
    own = _STDLIB_TYPICAL * (1 - math.exp(-(data.seq_len - virtual) / _STDLIB_SCALE))
    typical = own + virtual
    characters = stdlib.source_bytes() * _STDLIB_SHARE * typical / own
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


def _of_generator(data: SyntheticData, virtual: int) -> dict[str, Any]:
    rows = synthetic.counts(data)
    characters = _WRITING_CHARS + data.repair_frac * (_REPAIR_CHARS - _WRITING_CHARS)
    tokens = min(characters / CHARS_PER_TOKEN + _TEMPLATE_TOKENS + virtual, data.seq_len)
    return {
        "source": data.source,
        "train_rows": rows[Side.TRAIN],
        "train_tokens": round(rows[Side.TRAIN] * tokens),
        "val_tokens": round(rows[Side.VAL] * tokens),
        "longest_tokens": min(_GENERATED_LONGEST + virtual, data.seq_len),
        "typical_tokens": round(min(_GENERATED_SPREAD * tokens, data.seq_len)),
        "exact": False,
        "basis": "rows as asked for, tokens estimated; nothing is generated yet",
    }


def _of_stream(config: RunConfig, rows: Rows, cache: Path) -> dict[str, Any]:
    """Estimate from the first rows, scaled by the fraction of the files that they make up."""
    per_estimate, _ = _sampled(config, rows, cache)
    about = rows.record()
    files, read = about["streaming"].get("file_bytes", {}), about["streaming"]["first_rows"]
    scale, basis = 1.0, f"of the first {read['rows']} rows, estimated; the others are not read"
    if files and read["bytes"] and all(name.endswith(".jsonl") for name in files):
        scale = max(sum(files.values()) / read["bytes"], 1.0)
        basis = f"estimated from the first {read['rows']} rows and the sizes of the files"
    train = _document_tokens(rows, Side.TRAIN, config, per_estimate)
    return {
        "source": rows.source,
        **about,
        **_shared(config, rows, cache),
        "train_rows": round(len(rows.train) * scale),
        "heldout_rows": len(rows.heldout),  # not scaled: like validation, from the first rows only
        "train_tokens": round(round(sum(train)) * scale),
        "val_tokens": round(sum(_document_tokens(rows, Side.VAL, config, per_estimate))),
        **_lengths(train),
        "exact": False,
        "basis": basis,
    }


def _cached_counts(config: RunConfig, rows: Rows, cache: Path) -> dict[str, Any] | None:
    directory = ready_directory(config.model, cache)
    if directory is None:
        return None
    try:
        tokenizer = load_tokenizer(config.tokenizer, directory)
    except ModelFileError:
        if isinstance(config.model, HfModel):
            raise
        return None  # the run recreates damaged files of the cache
    key, val_key = (cache_key(config, rows, side, tokenizer) for side in (Side.TRAIN, Side.VAL))
    train, val = peek(cache, key), peek(cache, val_key)
    if train is None or val is None:
        return None
    rows_read = train.documents // key.labelling.rows.together
    blocks: int | None = None if config.data.packing else rows_read
    if config.data.packing and not shares_prompts(config.objective):
        blocks = count_blocks(cache, key, train)
    virtual = key.labelling.virtual_tokens
    tokens = train.tokens + virtual * train.documents
    squares = train.squares + virtual * (train.tokens + tokens)  # of lengths with virtual tokens
    return {
        "train_rows": rows_read,
        "train_blocks": blocks,
        "train_tokens": tokens,
        "val_tokens": val.tokens + virtual * val.documents,
        "longest_tokens": train.longest + virtual,
        "typical_tokens": round(squares / max(tokens, 1)),
        **_contract(config, cache, key, train),
    }


def _contract(config: RunConfig, cache: Path, key: CacheKey, counts: TokenCounts) -> dict[str, Any]:
    """Return the token part of the data contract, if an earlier run has created it."""
    from mens_exp.corpus import contract_rules, data_contract  # unused by a cold plan

    known = data_contract.known_token_part(cache, key, counts)
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


def _document_tokens(rows: Rows, side: Side, config: RunConfig, scale: float) -> array[float]:
    """Estimate the document lengths of a side; for rows on disk this reads them."""
    pairs, limit = getattr(rows, side.value), config.data.seq_len
    virtual = config.lora.spec.virtual_tokens(config.lora)
    return array("d", (min(estimated_tokens(one) * scale + virtual, limit) for one in pairs))


_SAMPLED_ROWS = 32  # encoded by a plan; takes hundredths of a second (a rough choice)


def _sampled(config: RunConfig, rows: Rows, cache: Path) -> tuple[float, str]:
    """Encode some rows; return tokens per token estimated from characters, and the basis."""
    some = _some(rows)
    documents = _encoded(config, some, cache)
    if documents is None:
        return 1.0, "estimated from the rows' characters; not encoded yet"
    tokens, about = int(documents.lengths.sum()), sum(map(estimated_tokens, some))
    return tokens / about, f"estimated from {len(some)} encoded rows; the others not encoded yet"


def _some(rows: Rows) -> list[TrainingPair]:
    step = max(-(-len(rows.train) // _SAMPLED_ROWS), 1)
    return [rows.train[row] for row in range(0, len(rows.train), step)]


def _encoded(config: RunConfig, some: list[TrainingPair], cache: Path) -> Encoded | None:
    """Encode rows without truncation; None without a tokenizer, or if encoding fails."""
    directory = ready_directory(config.model, cache)
    if directory is None or not some:
        return None
    try:
        tokenizer = load_tokenizer(config.tokenizer, directory)
        endless = dataclasses.replace(labelling_of(config), seq_len=_ENDLESS)
        return encode(some, tokenizer, endless)
    except MensError:  # the run reports it
        return None


def _shared(config: RunConfig, rows: Rows, cache: Path) -> dict[str, float]:
    """Estimate the share of tokens saved because the answers of a pair share one prompt."""
    if not shares_prompts(config.objective):
        return {}
    some = _some(rows)
    documents = _encoded(config, some, cache)
    if documents is not None:
        found = share_prompts(documents)
        return {"shared_frac": round(1 - float(found.room.sum() / found.units.sum()), 4)}
    prompts = sum(len("".join(chain(*pair.exchanges))) - len(pair.response) for pair in some)
    rejected = [str(dict(pair.fields).get(REJECTED, "")) for pair in some]
    answers = sum(map(len, (*rejected, *(pair.response for pair in some))))
    return {"shared_frac": round(prompts / max(2 * prompts + answers, 1), 4)}


_ENDLESS = 2**31  # tokens; no document is truncated


def _lengths(documents: Sequence[float]) -> dict[str, int]:
    """Return the longest document, and the token-weighted mean document length."""
    squares = sum(length**2 for length in documents)
    return {
        "longest_tokens": round(max(documents, default=0.0)),
        "typical_tokens": round(squares / max(sum(documents), 1.0)),
    }


_LOPSIDED = 0.15  # fraction of the rows by which a split may miss its target (a rough choice)


def _lopsided(config: RunConfig, rows: Rows) -> dict[str, Any]:
    """Return the row counts of a split that leaves far fewer training rows than requested."""
    own_val = getattr(config.data, "val_path", None) is not None or config.data.validates_apart
    left = 1 - config.data.heldout_frac - (0 if own_val else config.data.val_frac)
    others = len(rows.heldout) + (0 if own_val else len(rows.val))
    total = len(rows.train) + others
    if not total or len(rows.train) / total >= left - _LOPSIDED:
        return {}
    return {"lopsided": {"rows": total, "train_rows": len(rows.train), "expected_frac": left}}
