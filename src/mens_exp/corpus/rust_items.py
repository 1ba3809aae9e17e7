"""Training pairs from the documented items of one Rust file.

As for Python: the prompt is the signature and the documentation, the response the source without
that documentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mens_exp.corpus.functions import MAX_RESPONSE_CHARS, MIN_BODY_LINES
from mens_exp.corpus.rust_source import cut, first_error, outer_doc, parse, text_of
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from tree_sitter import Node

__all__ = ["pairs_of"]

_KINDS: Final = {
    "function_item": "function",
    "struct_item": "struct",
    "enum_item": "enum",
    "trait_item": "trait",
}
_TEST_MARKS: Final = ("#[test]", "#[cfg(test)]", "#[bench]", "::test]", "#[should_panic")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """One item with what stands before it: its attributes, and its documentation."""

    node: Node
    attributes: tuple[Node, ...]
    doc: str
    owner: str  # the type or trait whose method it is; empty for a free item
    path: str  # of its modules


class _UnfitError(Exception):
    """An item makes no pair; the argument is the reason, a key of the counts."""


def pairs_of(
    text: str, *, crate: str, group: str, category: str, dropped: Counter[str]
) -> list[TrainingPair]:
    """Make a pair of every documented function, method, struct, enum and trait of a file.

    Args:
        text: the file's source, line ends made newlines.
        crate: what the prompts call the file's module, such as ``serde::de``.
        group: the group of every pair.
        category: the category of every pair.
        dropped: counts, by reason, what was not taken; added to.

    Returns:
        The pairs, in the order of the file.

    Raises:
        MissingExtra: tree-sitter or its grammar for Rust is not installed.
    """
    data = text.encode("utf-8")
    tree = parse(data)
    if first_error(tree) is not None:
        dropped["file_does_not_parse"] += 1
        return []
    pairs = []
    for item in _items(tree.root_node, "", crate, dropped):
        try:
            pairs.append(_pair(item, data, group, category))
        except _UnfitError as unfit:
            dropped[str(unfit)] += 1
    return pairs


def _items(node: Node, owner: str, path: str, dropped: Counter[str]) -> Iterator[_Item]:
    """Yield the items of a file, of its modules, and the methods of its impls and traits."""
    attributes: list[Node] = []
    doc: list[str] = []
    for child in node.named_children:
        if child.type in {"line_comment", "block_comment"}:
            said = outer_doc(child)
            doc += [] if said is None else [said]
            continue
        if child.type == "attribute_item":
            attributes.append(child)
            continue
        if any(mark in text_of(each) for each in attributes for mark in _TEST_MARKS):
            dropped["test"] += 1
        else:
            if child.type in _KINDS:
                yield _Item(
                    node=child,
                    attributes=tuple(attributes),
                    doc="\n".join(doc).strip(),
                    owner=owner,
                    path=path,
                )
            yield from _within(child, path, dropped)
        attributes, doc = [], []


def _within(node: Node, path: str, dropped: Counter[str]) -> Iterator[_Item]:
    body = node.child_by_field_name("body")
    if body is None:
        return
    if node.type == "mod_item":
        yield from _items(body, "", f"{path}::{_name(node)}", dropped)
    elif node.type == "trait_item":
        yield from _items(body, _name(node), path, dropped)
    elif node.type == "impl_item":
        of = node.child_by_field_name("type")
        yield from _items(body, "" if of is None else text_of(of), path, dropped)


def _pair(item: _Item, data: bytes, group: str, category: str) -> TrainingPair:
    if not item.doc:
        raise _UnfitError("undocumented")
    if "\0" in item.doc:
        raise _UnfitError("doc_is_not_text")
    body = item.node.child_by_field_name("body")
    if body is None or _body_lines(body) < MIN_BODY_LINES:
        raise _UnfitError("short")
    response = cut(data, [*item.attributes, item.node])
    if len(response) > MAX_RESPONSE_CHARS:
        raise _UnfitError("long")
    if first_error(parse(response.encode("utf-8"))) is not None:
        raise _UnfitError("cut_changes_code")
    head = cut(data, [item.node], body.start_byte).rstrip()
    return TrainingPair(
        prompt=f"{_task(item)}\n\n```rust\n{head}\n```\n\n{item.doc}",
        response=response,
        category=category,
        language="rust",
        group=group,
    )


def _task(item: _Item) -> str:
    if item.owner:
        owner = " ".join(item.owner.split())
        return f"Write the method `{_name(item.node)}` of the Rust type `{item.path}::{owner}`."
    return f"Write the Rust {_KINDS[item.node.type]} `{item.path}::{_name(item.node)}`."


def _name(node: Node) -> str:
    name = node.child_by_field_name("name")
    assert name is not None, "the grammar gives every such item a name"
    return text_of(name)


def _body_lines(body: Node) -> int:
    """Count the lines of a body that are neither blank, a comment nor a bracket alone."""
    lines = (line.strip() for line in text_of(body).split("\n"))
    return sum(1 for line in lines if line.strip("{}(),;") and not line.startswith("//"))
