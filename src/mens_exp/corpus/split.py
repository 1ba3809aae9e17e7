"""Exclude rows by filters, and assign the rest to sides by their group alone.

Filters use labels and texts; exact duplicates are found by normalized response. The side of a group
is derived from the SHA-256 of its name. It does not depend on a seed or on row order, so runs with
different seeds are validated on the same rows, and added rows do not move existing ones. The
exception is a corpus with few groups, see `split`. For millions of groups, 64-bit prefixes of the
hashes replace the names.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import math
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from mens_exp.corpus.python_source import parse
from mens_exp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from mens_exp.config.data import FilterConfig
    from mens_exp.rows.schema import TrainingPair

# The first word after an opening fence; rustdoc adds attributes after a comma.
_FENCE: Final = re.compile(r"^ {0,3}(?:`{3,}|~{3,})[ \t]*([^\s,`~{]+)", re.MULTILINE)


def asked(config: FilterConfig) -> dict[str, Any]:
    """Return the configured filters by name, in order of application."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def filtered(
    pairs: Sequence[TrainingPair], config: FilterConfig
) -> tuple[list[TrainingPair], Counter[str]]:
    """Return the rows that pass every filter.

    Args:
        pairs: the rows.
        config: the filters.

    Returns:
        The rows that pass, in order, and the number refused by each filter. A row counts for the
        first filter that it fails, so the counts add up to the number of refused rows.
    """
    wanted = asked(config)
    refused: Counter[str] = Counter()
    kept = []
    for pair in pairs:
        failed = first_failed(pair, wanted)
        if failed is None:
            kept.append(pair)
        else:
            refused[failed] += 1
    return kept, refused


def first_failed(pair: TrainingPair, wanted: Mapping[str, Any]) -> str | None:
    """Return the first filter (from `asked`) that a row fails; None if it passes all."""
    return next((name for name, value in wanted.items() if not _PASSES[name](pair, value)), None)


def refuse_nothing_left(before: int, refused: Counter[str]) -> None:
    """Refuse filters that no row passes.

    Args:
        before: number of rows before the filters.
        refused: number of rows refused by each filter.

    Raises:
        DataError: all rows were refused.
    """
    if before and sum(refused.values()) == before:
        counts = ", ".join(f"{name} refused {count}" for name, count in refused.items())
        raise DataError(
            "no row passes the filters",
            where="data.filter",
            found=f"{before} rows: {counts}",
            expected="at least one row",
            remedy="loosen a filter, or drop it",
        )


def _category(pair: TrainingPair, value: str) -> bool:
    return pair.category is not None and value.casefold() in pair.category.casefold()


def _language(pair: TrainingPair, value: str) -> bool:
    """Compare a row's language, or else the labels of fences in its answers, with `value`."""
    if pair.language is not None:
        return pair.language.casefold() == value.casefold()
    fences = (name for _, said in pair.exchanges for name in _FENCE.findall(said))
    return any(name.casefold() == value.casefold() for name in fences)


def _chars(pair: TrainingPair) -> int:
    return sum(len(user) + len(said) for user, said in pair.exchanges)


_PASSES: Final[dict[str, Callable[[TrainingPair, Any], bool]]] = {
    "min_rating": lambda pair, value: pair.rating is None or pair.rating >= value,
    "category": _category,
    "exclude_category": lambda pair, value: not _category(pair, value),
    "min_chars": lambda pair, value: _chars(pair) >= value,
    "max_chars": lambda pair, value: _chars(pair) <= value,
    "language": _language,
}


def without_duplicates(pairs: Iterable[TrainingPair]) -> tuple[list[TrainingPair], int]:
    """Drop rows whose response equals that of an earlier row.

    Args:
        pairs: the rows in a stable order.

    Returns:
        The first row of each response, in order, and the number of dropped rows.
    """
    kept: dict[str, TrainingPair] = {}
    rows = list(pairs)
    for pair in rows:
        kept.setdefault(response_key(pair.response), pair)
    return list(kept.values()), len(rows) - len(kept)


def response_key(response: str) -> str:
    """Hash the content of a response.

    Args:
        response: code or prose.

    Returns:
        For code that parses as Python, a hash of its syntax tree, without layout and comments. For
        anything else, such as a number, a word or a shell command that happens to be a Python
        expression, and for a tree nested too deeply to serialize, a hash of the text with
        normalized white space.
    """
    tree = parse(response)
    # The tree of a text with nothing but comments is empty; then the comments are compared.
    meaning = f"text:{normalised(response)}"
    if tree and not all(isinstance(one, ast.Expr) for one in tree.body):
        with contextlib.suppress(RecursionError):
            meaning = f"code:{_spelled(tree)}"
    return hashlib.sha256(meaning.encode("utf-8", "surrogatepass")).hexdigest()


def _spelled(tree: ast.Module) -> str:
    """Serialize a tree, equal iff `ast.dump` is, in a quarter of its time (measured)."""
    parts: list[str] = []
    _spell(tree, parts)
    return "\0".join(parts)


def _spell(node: ast.AST, parts: list[str]) -> None:
    """Append a node's kind, which determines the number of fields, and its fields."""
    kind = type(node)
    parts.append(kind.__name__)
    for name in kind._fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            _spell(value, parts)
        elif isinstance(value, list):
            parts.append("[")
            for each in value:
                if isinstance(each, ast.AST):
                    _spell(each, parts)
                else:
                    parts.append(repr(each))
            parts.append("]")
        else:
            parts.append(repr(value))


def normalised(text: str) -> str:
    """Collapse white space to single spaces, and strip the ends."""
    return " ".join(text.split())


PROJECT_END: Final = "::"  # separates project and file in a group such as serde::src/lib.rs


class Side(StrEnum):
    """The use of a row."""

    TRAIN = "train"
    VAL = "val"
    HELDOUT = "heldout"


def group_of(pair: TrainingPair) -> str:
    """Return the group of a row, which must stay on one side of the split.

    Args:
        pair: the row.

    Returns:
        Its group. Without one, its first prompt with normalized white space, so that two answers
        to one question, or two continuations, are on the same side; a plain text is its own group.
    """
    if pair.is_text:
        return pair.group or f"text:{normalised(pair.response)}"
    return pair.group or f"prompt:{normalised(pair.exchanges[0][0])}"


def project_of(pair: TrainingPair) -> str:
    """Return the project of a row: its group up to the first ``::``, or the whole group."""
    return pair.group.partition(PROJECT_END)[0] if PROJECT_END in pair.group else group_of(pair)


def side_of(group: str, val_frac: float, heldout_frac: float) -> Side:
    """Return the side of one group.

    Held-out groups have the lowest hashes and validation groups the highest, so changing one
    fraction moves groups only to or from train.

    Args:
        group: the group's name.
        val_frac: share of the groups for validation, in [0, 1).
        heldout_frac: share of the groups to hold out, in [0, 1).

    Returns:
        The side, which depends on the arguments only.

    Raises:
        ConfigError: a fraction is outside [0, 1), or no rows are left to train on.
    """
    check_fractions(val_frac, heldout_frac)
    return side_at(position_of(hash_prefix(group)), val_frac, heldout_frac)


def side_at(position: float, val_frac: float, heldout_frac: float) -> Side:
    """Return the side of a position in [0, 1), as computed by `position_of`."""
    if position < heldout_frac:
        return Side.HELDOUT
    return Side.VAL if position >= 1 - val_frac else Side.TRAIN


def split(
    pairs: Sequence[TrainingPair], val_frac: float, heldout_frac: float
) -> dict[Side, list[TrainingPair]]:
    """Split rows into the three sides by group.

    Hashing makes the shares random, and with few groups a side can be empty although its fraction
    is above zero. Then the groups are ranked by hash instead: the first are held out and the last
    are used for validation, each side with its rounded share and at least one group. With fewer
    groups than requested sides, train comes first, then validation. This is deterministic and
    needs no seed, but a group added to such a small corpus may move another one.

    Args:
        pairs: the rows.
        val_frac: share of the groups for validation, in [0, 1).
        heldout_frac: share of the groups to hold out, in [0, 1).

    Returns:
        All three sides, each with its rows in the order of `pairs`.

    Raises:
        ConfigError: a fraction is outside [0, 1), or no rows are left to train on.
    """
    check_fractions(val_frac, heldout_frac)
    groups = {group_of(pair) for pair in pairs}
    side = {group: side_of(group, val_frac, heldout_frac) for group in groups}
    if not _wanted(val_frac, heldout_frac) <= set(side.values()):
        side = _by_rank(groups, val_frac, heldout_frac)
    sides: dict[Side, list[TrainingPair]] = {name: [] for name in Side}
    for pair in pairs:
        sides[side[group_of(pair)]].append(pair)
    return sides


def assert_disjoint(sides: Mapping[Side, Iterable[TrainingPair]]) -> None:
    """Check that no group is on two sides.

    Args:
        sides: the rows of each side.

    Raises:
        DataError: a group is on two sides; both are named.
    """
    seen: dict[str, Side] = {}
    for side, pairs in sides.items():
        for pair in pairs:
            group = group_of(pair)
            first = seen.setdefault(group, side)
            if first is not side:
                raise DataError(
                    "a group is on two sides of the split",
                    where=group,
                    found=f"{first} and {side}",
                    expected="every group on one side",
                )


def check_fractions(val_frac: float, heldout_frac: float) -> None:
    """Refuse invalid shares, and shares that leave nothing to train on.

    Raises:
        ConfigError: one is outside [0, 1), or their sum is not below 1.
    """
    for name, value in (("val_frac", val_frac), ("heldout_frac", heldout_frac)):
        if not 0 <= value < 1:  # false for NaN too
            raise ConfigError(
                "not a share", where=f"data.{name}", found=value, expected="0 ≤ share < 1"
            )
    if val_frac + heldout_frac >= 1:
        raise ConfigError(
            "no rows are left to train on",
            where="data.val_frac",
            found=f"val_frac {val_frac} + heldout_frac {heldout_frac}",
            expected="a sum below 1",
        )


def _wanted(val_frac: float, heldout_frac: float) -> set[Side]:
    shares = {Side.TRAIN: 1.0, Side.VAL: val_frac, Side.HELDOUT: heldout_frac}
    return {side for side, share in shares.items() if share > 0}


def hash_prefix(group: str) -> int:
    """Return the first 64 bits of the SHA-256 of a group's name."""
    return int.from_bytes(hashlib.sha256(group.encode("utf-8")).digest()[:8], "big")


def position_of(head: int) -> float:
    """Map a hash prefix uniformly to [0, 1)."""
    # 53 bits, which a float holds exactly: more could round up to 1.0
    return math.ldexp(head >> 11, -53)


def _by_rank(groups: Iterable[str], val_frac: float, heldout_frac: float) -> dict[str, Side]:
    ranked = sorted(groups, key=lambda group: (position_of(hash_prefix(group)), group))
    total = len(ranked)
    heldout, val = ranks(total, val_frac, heldout_frac)
    sides = dict.fromkeys(ranked, Side.TRAIN)
    sides.update(dict.fromkeys(ranked[:heldout], Side.HELDOUT))
    sides.update(dict.fromkeys(ranked[total - val :], Side.VAL))
    return sides


def ranks(total: int, val_frac: float, heldout_frac: float) -> tuple[int, int]:
    """Return the number of held-out (first) and validation (last) groups in a ranked split.

    Args:
        total: number of groups.
        val_frac: share of the groups for validation, in [0, 1).
        heldout_frac: share of the groups to hold out, in [0, 1).
    """

    def share(frac: float, most: int) -> int:
        return min(max(1, round(frac * total)), most) if frac > 0 else 0

    spare = max(total - 1, 0)  # train gets the first group
    val = share(val_frac, spare - 1 if heldout_frac > 0 and spare > 1 else spare)
    return share(heldout_frac, spare - val), val


HashPrefixes: TypeAlias = "NDArray[np.uint64]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The hash prefixes at which sides end: held-out up to one, validation from another.

    ``ranked`` means that they follow the ranks of few groups, as in `split`.
    """

    heldout_until: int
    val_from: int
    ranked: bool

    def side(self, head: int) -> Side:
        """Return the side of a group."""
        if head <= self.heldout_until:
            return Side.HELDOUT
        return Side.VAL if head >= self.val_from else Side.TRAIN

    def masks(self, heads: HashPrefixes) -> dict[Side, NDArray[np.bool_]]:
        """Return a mask over the groups for each side."""
        none = np.zeros(len(heads), bool)
        held = heads <= np.uint64(self.heldout_until) if self.heldout_until >= 0 else none
        val = heads >= np.uint64(self.val_from) if self.val_from < 2**64 else none
        return {Side.TRAIN: ~(held | val), Side.VAL: val, Side.HELDOUT: held}


def distinct(heads: array[int] | HashPrefixes) -> HashPrefixes:
    """Return the distinct hash prefixes, sorted."""
    return np.unique(np.asarray(heads, dtype=np.uint64))


def bounds_of(groups: HashPrefixes, val_frac: float, heldout_frac: float) -> Bounds:
    """Return the bounds of the sides.

    Args:
        groups: the hash prefixes of all groups, from `distinct`.
        val_frac: share of the groups for validation, in [0, 1).
        heldout_frac: share of the groups to hold out, in [0, 1).
    """
    positions = np.ldexp((groups >> np.uint64(11)).astype(np.float64), -53)  # as in position_of
    total = len(groups)
    heldout = int(np.searchsorted(positions, heldout_frac))
    val = total - max(int(np.searchsorted(positions, 1 - val_frac)), heldout)
    counts = [(1.0, total - heldout - val), (val_frac, val), (heldout_frac, heldout)]
    ranked = any(share > 0 and not count for share, count in counts)
    if ranked:
        heldout, val = ranks(total, val_frac, heldout_frac)
    return Bounds(
        heldout_until=int(groups[heldout - 1]) if heldout else -1,
        val_from=int(groups[total - val]) if val else 2**64,
        ranked=ranked,
    )
