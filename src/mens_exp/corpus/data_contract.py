"""Parts of the data contract: statistics of the rows and of their tokens.

The token part is computed once per encoding and stored with it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from mens_exp.artifacts.data_contract import StoredTokens, TokenPart
from mens_exp.corpus.benchmarks import NGRAM_WORDS, OverlapIndex, searched_texts, texts_of
from mens_exp.corpus.split import distinct, hash_prefix, normalised
from mens_exp.corpus.token_counts import drawn
from mens_exp.errors import DataError, Problems
from mens_exp.rows.answers import messages_of
from mens_exp.rows.roles import role_counts, supervised_tokens
from mens_exp.rows.shapes import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from mens_exp.artifacts.data_contract import Clash, OverlapPart, RowsPart
    from mens_exp.corpus.row_files import Rows
    from mens_exp.corpus.split import HashPrefixes
    from mens_exp.rows.cache import CacheKey, TokenCounts
    from mens_exp.rows.documents import Encoded, Labelling
    from mens_exp.rows.roles import PieceEncoder, RoleCounts
    from mens_exp.rows.schema import TrainingPair

CONTAINED = 0.5  # share of an item's n-grams above which a row contains it; unverified guess
_PROMPTS = 16  # documents whose prompts are compared: a wrong template affects all of them
_MOST_ROWS = 2048  # searched for these documents
_MOST_NAMED = 5
MOST_ITEMS: Final = 10_000  # held-out rows indexed; measured: 300 MB at 100 words each
_AT_ONCE: Final = 16_384  # rows per batch; unverified guess


class PromptEncoder(Protocol):
    """The part of the tokenizer interface that evaluation uses."""

    def encode_prompts(self, conversations: Sequence[list[dict[str, str]]]) -> list[list[int]]:
        """Encode conversations up to the start of the assistant's reply."""


def rows_part(
    rows: Rows, documents: Encoded, encoder: PromptEncoder, labelling: Labelling
) -> RowsPart:
    """Compute the row statistics of the contract.

    Args:
        rows: the rows of all sides.
        documents: the encoded training rows.
        encoder: the tokenizer of the evaluation.
        labelling: the labelling of the documents.
    """
    trained = _trained(rows.train)
    apart = 0
    both: set[str] = set()
    for pairs in (rows.val, rows.heldout):
        ids, groups = _known(pairs, trained)
        apart += ids
        both |= groups
    checked, otherwise = _prompts(rows.train, documents, encoder, labelling)
    return {
        "groups_on_two_sides": sorted(both)[:_MOST_NAMED],
        "rows_on_two_sides": apart,
        "conversations": trained.conversations,
        "repeated_answers": trained.repeated,
        "prompts_checked": checked,
        "prompts_otherwise": otherwise,
        "mix_off": _mix_off(rows.taken.get("mixed")),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """Distinct 64-bit prefixes of the training rows' ids and groups, and counts."""

    ids: HashPrefixes
    groups: HashPrefixes
    conversations: int
    repeated: int


def _trained(pairs: Iterable[TrainingPair]) -> _Trained:
    ids, groups = array("Q"), array("Q")
    conversations = repeated = 0
    last = None
    for pair in pairs:
        ids.append(int(pair.id, 16))
        if pair.group and pair.group != last:
            groups.append(hash_prefix(pair.group))
            last = pair.group
        conversations += bool(pair.history)
        repeated += bool(pair.history) and _repeats(pair)
    return _Trained(
        ids=distinct(ids),
        groups=distinct(groups),
        conversations=conversations,
        repeated=repeated,
    )


def _known(pairs: Iterable[TrainingPair], trained: _Trained) -> tuple[int, set[str]]:
    """Return the number of rows, and the groups, that also occur in the training rows."""
    rows = 0
    rest = iter(pairs)
    groups: set[str] = set()
    while some := list(islice(rest, _AT_ONCE)):
        ids = np.array([int(pair.id, 16) for pair in some], np.uint64)
        heads = np.array([hash_prefix(pair.group) for pair in some], np.uint64)
        rows += int(np.isin(ids, trained.ids).sum())
        known = np.isin(heads, trained.groups)
        groups |= {pair.group for pair, one in zip(some, known, strict=True) if one and pair.group}
    return rows, groups


def heldout_part(rows: Rows) -> OverlapPart | None:
    """Compare training rows with held-out rows, or with a sample of at most `MOST_ITEMS`."""
    count, against = len(rows.heldout), "the held-out rows"
    if not count:
        return None
    if count > MOST_ITEMS:
        against = f"{MOST_ITEMS:,} of {against}, drawn evenly"
    some = drawn(rows.heldout, count, MOST_ITEMS)
    items = ((one.id, "\n".join(texts_of(one))) for one in some)
    return overlap_part(rows.train, items, against, by_functions=False)


def overlap_part(
    train: Iterable[TrainingPair],
    items: Iterable[tuple[str, str]],
    against: str,
    *,
    by_functions: bool = True,
) -> OverlapPart:
    """Compare training rows with a benchmark.

    Args:
        train: the training rows.
        items: id and text (prompt and reference) of each item.
        against: name of the benchmark, for the record.
        by_functions: also match Python functions that were renamed.
    """
    index = OverlapIndex(items, by_functions=by_functions)
    worst: dict[str, Clash] = {}
    sharing = 0
    for pair in train:
        overlaps = index.overlaps(searched_texts(pair))
        sharing += bool(overlaps)
        for one in overlaps:
            if one.item not in worst or one.share > worst[one.item]["share"]:
                worst[one.item] = {
                    "row": pair.id,
                    "item": one.item,
                    "shared": one.shared,
                    "share": round(one.share, 4),
                }
    ordered = sorted(worst.values(), key=lambda one: (-one["share"], one["item"]))
    contained = sum(one["share"] >= CONTAINED for one in ordered)
    return {
        "against": against,
        "items": len(index),
        "ngram_words": NGRAM_WORDS,
        "sharing": len(ordered),
        "contained": contained,
        "contained_frac": round(contained / len(index), 6) if len(index) else 0.0,
        "rows_sharing": sharing,
        "worst": ordered[:_MOST_NAMED],
    }


def _repeats(pair: TrainingPair) -> bool:
    """Return whether a conversation repeats an answer verbatim."""
    answers = [normalised(said) for _, said in pair.exchanges]
    return len(set(answers)) < len(answers)


def _prompts(
    train: Sequence[TrainingPair], documents: Encoded, encoder: PromptEncoder, labelling: Labelling
) -> tuple[int, int]:
    """Compare the beginnings of the first documents with the prompts of evaluation.

    Returns:
        The number compared, and the number that differ. None are compared if documents differ by
        design, if plain texts cannot be distinguished from conversations because every token of
        both is supervised, or if too many rows without supervised tokens would have to be searched
        for the rows of the first documents.
    """
    rows = _PROMPTS + documents.dropped
    if rows > _MOST_ROWS or not labelling.rows.follows_prompts:
        return 0, 0
    asked = [pair for pair in train[:rows] if not pair.is_text]
    has_texts = len(asked) < len(train[:rows])
    if has_texts and not labelling.rows.only_answers:
        return 0, 0
    conversations = [messages_of(pair, k) for pair in asked for k in range(len(pair.exchanges))]
    prompts = {tuple(ids) for ids in encoder.encode_prompts(conversations)}
    checked = otherwise = 0
    for number in range(min(_PROMPTS, len(documents))):
        part = slice(documents.offsets[number], documents.offsets[number + 1])
        ids = tuple(documents.ids[part].tolist())
        if len(ids) >= labelling.document_tokens:
            continue  # possibly truncated
        if has_texts and _last_answer(documents.supervised[part]) == 1:
            continue  # a plain text, which has no prompt
        checked += 1
        if labelling.rows.only_answers:
            otherwise += ids[: _last_answer(documents.supervised[part])] not in prompts
        else:
            otherwise += not any(ids[: len(prompt)] == prompt for prompt in prompts)
    return checked, otherwise


def _last_answer(learned: np.ndarray) -> int:
    """Return the start of the last run of supervised tokens."""
    return int(np.flatnonzero(learned & ~np.append(False, learned[:-1]))[-1])


def _mix_off(mixed: dict[str, Any] | None) -> float | None:
    """Return the largest deviation, in rows, of a source from its exact share."""
    if mixed is None:
        return None
    sources = mixed["sources"].values()
    total = sum(one["weight"] for one in sources)
    off = (abs(one["rows"] - one["weight"] / total * mixed["rows"]) for one in sources)
    return round(float(max(off)), 4)


_DIGITS = 6
_OF_ROLES = (
    *("tokens_by_role", "trained_by_role", "end_marker_trained"),
    *("ends", "ends_trained", "end_marker_trained_frac", "answer_tokens_missed"),
)


def known_token_part(cache: Path, key: CacheKey, counts: TokenCounts) -> StoredTokens | None:
    """Return the stored token part of an encoding; None if it is missing, stale or damaged."""
    try:
        stored = StoredTokens.read(_path(cache, key))
    except (DataError, Problems):
        return None
    return stored if stored.encoding_sha256 == counts.sha256 else None


def token_part(
    pairs: Sequence[TrainingPair],
    documents: Encoded,
    encoder: PieceEncoder,
    *,
    cache: Path,
    key: CacheKey,
    counts: TokenCounts,
) -> StoredTokens:
    """Return the token part of an encoding, from the cache if possible.

    Args:
        pairs: the rows.
        documents: the encoded rows.
        encoder: the tokenizer of the encoding.
        cache: the cache directory.
        key: cache key of the encoding.
        counts: token counts of the encoding.
    """
    known = known_token_part(cache, key, counts)
    if known is not None:
        return known
    roles = role_counts(pairs, documents, encoder, key.labelling)
    # objective=kto pairs rows with answers of other rows, so a part of them would get others.
    some = [*islice(pairs, 1)]
    is_own = key.labelling.rows.prepared(some) is some
    if roles.why_unknown is None and is_own:
        cut: Iterable[TrainingPair] = (pairs[number] for number in roles.too_long)
        left = roles.left_of_too_long
    else:
        cut, left = pairs, counts.supervised_tokens
    lost = max(supervised_tokens(cut, encoder, key.labelling) - left, 0)
    made = StoredTokens(
        encoding_sha256=counts.sha256,
        tokens=_part(documents, counts, roles, lost),
        unknown={}
        if roles.why_unknown is None
        else {f"tokens.{name}": roles.why_unknown for name in _OF_ROLES},
    )
    made.keep(_path(cache, key))
    return made


def _path(cache: Path, key: CacheKey) -> Path:
    return cache / "data_contract" / f"{key.directory(cache).name}.json"


def _part(documents: Encoded, counts: TokenCounts, roles: RoleCounts, lost: int) -> TokenPart:
    is_known = roles.why_unknown is None
    learned, dropped = counts.supervised_tokens, counts.dropped
    return {
        "documents": counts.documents,
        "tokens": counts.tokens,
        "trained_tokens": learned,
        "trained_frac": _share(learned, counts.tokens),
        "tokens_by_role": _by_role(roles.tokens) if is_known else None,
        "trained_by_role": _by_role(roles.trained) if is_known else None,
        "end_marker_trained": 0 < roles.ends == roles.ends_trained if is_known else None,
        "ends": roles.ends if is_known else None,
        "ends_trained": roles.ends_trained if is_known else None,
        "end_marker_trained_frac": _share(roles.ends_trained, counts.documents)
        if is_known
        else None,
        "answer_tokens_missed": roles.missed if is_known else None,
        "trained_tokens_lost": lost,
        "trained_tokens_lost_frac": _share(lost, learned + lost),
        "nothing_to_learn": dropped,
        "nothing_to_learn_frac": _share(dropped, counts.documents + dropped),
        "longest": int(documents.lengths.max(initial=0)),
        "truncated": counts.truncated,
    }


def _by_role(counts: np.ndarray) -> dict[str, int]:
    return {role.name.lower(): int(counts[role]) for role in Role}


def _share(part: int, whole: int) -> float:
    return round(part / whole, _DIGITS) if whole else 0.0
