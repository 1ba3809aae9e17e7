"""Exact duplicates: rows whose responses say the same."""

from __future__ import annotations

import ast
import hashlib
from typing import TYPE_CHECKING

from mens_exp.corpus.python_source import parse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mens_exp.rows.schema import TrainingPair

__all__ = ["dedupe", "normalised", "response_key"]


def dedupe(pairs: Iterable[TrainingPair]) -> tuple[list[TrainingPair], int]:
    """Drop rows whose response an earlier row has.

    Args:
        pairs: the rows, in an order that the caller keeps stable.

    Returns:
        The first row of each response, in the order given, and how many were dropped.
    """
    kept: dict[str, TrainingPair] = {}
    rows = list(pairs)
    for pair in rows:
        kept.setdefault(response_key(pair.response), pair)
    return list(kept.values()), len(rows) - len(kept)


def response_key(response: str) -> str:
    """Hash what a response says.

    Args:
        response: code or prose.

    Returns:
        For code that parses as Python, a hash of its syntax tree: layout and comments
        do not count. For anything else, a hash of its words.
    """
    tree = parse(response)
    # Only comments make an empty tree, and there the comments are what is said.
    meaning = f"code:{ast.dump(tree)}" if tree and tree.body else f"text:{normalised(response)}"
    return hashlib.sha256(meaning.encode("utf-8", "surrogatepass")).hexdigest()


def normalised(text: str) -> str:
    """Return the text with every run of white space made one space, and none at the ends."""
    return " ".join(text.split())
