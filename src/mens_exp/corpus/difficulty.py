"""Difficulty of rows that state none, measured on the answer."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Final

from mens_exp.corpus.python_source import parse

if TYPE_CHECKING:
    from mens_exp.rows.schema import TrainingPair

__all__ = ["HIGHEST", "LOWEST", "estimated"]

LOWEST: Final = 1
HIGHEST: Final = 10
# Unverified guesses: an answer of up to 32 characters is of difficulty 1, and each doubling adds
# one, so that 16 KiB are 10; a tree of three levels (module, statement, name) is 1, and every two
# levels more add one.
_SHORTEST: Final = 32
_SHALLOWEST: Final = 3
_LEVELS: Final = 2


def estimated(pair: TrainingPair) -> int:
    """Estimate a row's difficulty from its answer.

    Returns:
        1 to 10: of the length of the response alone, or, where it is Python that parses, the mean
        of that and of the depth of its syntax tree, rounded up.
    """
    by_length = _within(1 + math.log2(max(len(pair.response), 1) / _SHORTEST))
    if (pair.language or "").casefold() != "python":
        return math.ceil(by_length)
    tree = parse(pair.response)
    if tree is None:
        return math.ceil(by_length)
    by_depth = _within(1 + (_depth(tree) - _SHALLOWEST) / _LEVELS)
    return math.ceil((by_length + by_depth) / 2)


def _within(value: float) -> float:
    return min(max(value, LOWEST), HIGHEST)


def _depth(tree: ast.AST) -> int:
    """Return the levels of a tree, contexts such as `Load` not counted."""
    deepest = 0
    waiting = [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        waiting += [
            (child, depth + 1)
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, ast.expr_context)
        ]
    return deepest
