"""Rust source text as tree-sitter sees it, and items cut out of it as they were written."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from mens_exp.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tree_sitter import Node, Parser, Tree

__all__ = ["EXTRA", "cut", "first_error", "outer_doc", "parse", "text_of"]

EXTRA: Final = "pip install 'mens-exp[corpus]'"
# Where a line's first blanks are the text's own, not the layout's.
_VERBATIM: Final = frozenset({"string_literal", "raw_string_literal", "block_comment"})


def parse(data: bytes) -> Tree:
    """Parse Rust; what does not parse stands in the tree as errors.

    Args:
        data: UTF-8.

    Raises:
        MissingExtra: tree-sitter or its grammar for Rust is not installed.
    """
    return _parser().parse(data)


@functools.cache
def _parser() -> Parser:
    try:
        import tree_sitter
        import tree_sitter_rust
    except ImportError as error:
        raise MissingExtra(
            "tree-sitter and its Rust grammar are needed to read Rust", remedy=f"run: {EXTRA}"
        ) from error
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_rust.language()))


def first_error(tree: Tree) -> tuple[int, int] | None:
    """Return line and column, from 1, of the first thing that is no Rust; None where all is."""
    node = tree.root_node
    if not node.has_error:
        return None
    while not (node.is_error or node.is_missing):
        inner = next((child for child in node.children if child.has_error), None)
        if inner is None:
            break
        node = inner
    return node.start_point.row + 1, node.start_point.column + 1


def text_of(node: Node) -> str:
    """Return what a node spans."""
    return (node.text or b"").decode("utf-8")


def outer_doc(comment: Node) -> str | None:
    """Return the text of an outer doc comment, ``///`` or ``/** */``, without its marks.

    Returns:
        The text, less the one blank that usually follows the marks; None where the node is no
        such comment.
    """
    parts = {child.type: child for child in comment.named_children}
    if "outer_doc_comment_marker" not in parts:
        return None
    said = text_of(parts["doc_comment"]) if "doc_comment" in parts else ""
    if comment.type == "line_comment":
        return said.rstrip("\r\n").removeprefix(" ")
    lines = said.strip().split("\n")
    return "\n".join(line.strip().removeprefix("*").removeprefix(" ") for line in lines)


def cut(data: bytes, nodes: list[Node], end: int | None = None) -> str:
    """Return what neighbours span, dedented; a line that begins within a string is left as it is.

    Args:
        data: the file.
        nodes: an item's attributes and the item, say.
        end: the byte to stop before; None is the last node's end.
    """
    column, row = nodes[0].start_point.column, nodes[0].start_point.row
    within = {row for node in nodes for row in _verbatim_rows(node)}
    text = data[nodes[0].start_byte : nodes[-1].end_byte if end is None else end].decode("utf-8")
    first, *lines = text.split("\n")
    dedented = [
        line if number in within else _dedented(line, column)
        for number, line in enumerate(lines, start=row + 1)
    ]
    return "\n".join([first, *dedented])


def _dedented(line: str, column: int) -> str:
    blanks = len(line) - len(line.lstrip(" \t"))
    return line[min(column, blanks) :]


def _verbatim_rows(node: Node) -> Iterator[int]:
    """Yield the rows of the file that begin within a string or a comment of a node."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node.type in _VERBATIM:
            yield from range(node.start_point.row + 1, node.end_point.row + 1)
        else:
            waiting += node.children
