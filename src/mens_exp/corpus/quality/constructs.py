"""Language constructs that programs use: the kinds of nodes in their syntax trees."""

from __future__ import annotations

import ast
import functools
import json
from typing import TYPE_CHECKING, Final

from mens_exp.corpus import rust_source
from mens_exp.corpus.python_source import parse

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KINDS_IN", "all_kinds"]

_CLASSES: Final = (
    *("stmt", "expr", "boolop", "operator", "unaryop", "cmpop"),
    *("excepthandler", "pattern", "type_param"),
)
# What stands in no class of its own. `Index` and `ExtSlice` are of Python 3.8 and before.
_ALONE: Final = ("comprehension", "keyword", "alias", "withitem", "match_case", "arg")
_GONE: Final = frozenset({"Index", "ExtSlice"})


def all_kinds(language: str) -> frozenset[str]:
    """Return every kind of node that a language has; none where nobody lists them.

    Raises:
        MissingExtra: the grammar of Rust is asked for and not installed.
    """
    kinds = _ALL.get(language)
    return kinds() if kinds is not None else frozenset()


@functools.cache
def _python_kinds() -> frozenset[str]:
    found = {name for name in _ALONE if hasattr(ast, name)}
    for name in _CLASSES:
        kinds = getattr(ast, name).__subclasses__() if hasattr(ast, name) else []
        found |= {kind.__name__ for kind in kinds if kind.__module__ == "ast"}
    return frozenset(found - _GONE)


@functools.cache
def _rust_kinds() -> frozenset[str]:
    language = rust_source.parse(b"").language
    assert language is not None, "the parser was given one"
    ids = range(language.node_kind_count)
    named = [i for i in ids if language.node_kind_is_named(i) and language.node_kind_is_visible(i)]
    return frozenset(kind for i in named if (kind := language.node_kind_for_id(i)) is not None)


def _in_python(code: str) -> frozenset[str] | None:
    tree = parse(code)
    if tree is None:
        return None
    return _python_kinds() & {type(node).__name__ for node in ast.walk(tree)}


def _in_rust(code: str) -> frozenset[str] | None:
    tree = rust_source.parse(code.encode("utf-8", "surrogatepass"))
    if tree.root_node.has_error:
        return None
    found, waiting = set(), [tree.root_node]
    while waiting:
        node = waiting.pop()
        if node.is_named:
            found.add(node.type)
        waiting += node.children
    return _rust_kinds() & found


def _in_json(code: str) -> frozenset[str] | None:
    try:
        json.loads(code)
    except (ValueError, RecursionError):
        return None
    return frozenset()


_ALL: Final[dict[str, Callable[[], frozenset[str]]]] = {
    "python": _python_kinds,
    "rust": _rust_kinds,
}
# The kinds of nodes in code of a language, or None where it does not parse.
KINDS_IN: Final[dict[str, Callable[[str], frozenset[str] | None]]] = {
    "python": _in_python,
    "rust": _in_rust,
    "json": _in_json,
}
