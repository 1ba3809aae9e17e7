"""The token part of the data contract: made once for each encoding, and kept beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.data_contract import StoredTokens, TokenPart
from mens_exp.errors import DataError, Problems
from mens_exp.rows.roles import role_counts, supervised_tokens
from mens_exp.rows.shapes import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import numpy as np

    from mens_exp.rows.cache import CacheKey, TokenCounts
    from mens_exp.rows.encode import Encoded
    from mens_exp.rows.roles import PieceEncoder, RoleCounts
    from mens_exp.rows.schema import TrainingPair

__all__ = ["known_token_part", "token_part"]

_DIGITS = 6
_OF_ROLES = (
    *("tokens_by_role", "trained_by_role", "end_marker_trained"),
    *("ends", "ends_trained", "end_marker_trained_frac", "answer_tokens_missed"),
)


def known_token_part(cache: Path, key: CacheKey, counts: TokenCounts) -> StoredTokens | None:
    """Return the token part of an encoding, or None where none was kept, or none that is whole."""
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
    """Return the token part of an encoding; what is kept costs nothing.

    Args:
        pairs: the rows.
        documents: what was made of them.
        encoder: the tokenizer that did.
        cache: the cache's root.
        key: of the encoding.
        counts: likewise.
    """
    known = known_token_part(cache, key, counts)
    if known is not None:
        return known
    roles = role_counts(pairs, documents, encoder, key.labelling)
    if roles.why_unknown is None:
        cut: Iterable[TrainingPair] = (pairs[number] for number in roles.too_long)
        left = roles.left_of_too_long
    else:
        cut, left = pairs, counts.supervised_tokens
    lost = supervised_tokens(cut, encoder, key.labelling) - left
    made = StoredTokens(
        encoding_sha256=counts.sha256,
        tokens=_part(documents, counts, roles, lost),
        unknown={}
        if roles.why_unknown is None
        else {f"tokens.{name}": roles.why_unknown for name in _OF_ROLES},
    )
    path = _path(cache, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.write(path)
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
