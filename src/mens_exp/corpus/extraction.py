"""Training pairs from source files: Python definitions, Rust items, Markdown code blocks.

For Python and Rust, the prompt is the signature and the documentation. The response is the source
without the documentation, so that text in the prompt is not supervised as an answer. For Markdown,
the prompt is the text before a block: its heading and the preceding paragraph.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mens_exp.corpus.python_source import (
    DefinitionNode,
    FunctionNode,
    cut,
    parse,
    same_but_docstring,
    signature,
)
from mens_exp.corpus.rust import cut_rust, first_error, outer_doc, parse_rust, text_of
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from tree_sitter import Node

MIN_BODY_LINES: Final = 2  # unverified guess: one line teaches little beyond its signature
MAX_RESPONSE_CHARS: Final = 4_000  # unverified guess: some 1,000 tokens, two packed sequences


def python_pairs(
    text: str,
    *,
    module: str,
    group: str,
    category: str,
    dropped: Counter[str],
    classes: bool = False,
    language: str | None = None,
) -> list[TrainingPair]:
    """Extract a pair from every documented function and method of a file.

    Nested functions are part of the outer function and make no separate pair.

    Args:
        text: the file's source with normalized newlines.
        module: its dotted name, for the prompts.
        group: the group of every pair.
        category: the category of every pair.
        dropped: counter of skipped definitions by reason; updated in place.
        classes: also make a pair of every documented class, before those of its methods.
        language: the language of every pair; None leaves it unset.

    Returns:
        The pairs in file order.
    """
    tree = parse(text)
    if tree is None:
        dropped["file_does_not_parse"] += 1
        return []
    lines = text.split("\n")
    pairs = []
    for node, owner in _definitions(tree, module, classes=classes):
        try:
            docstring = _docstring(node)
            response, bare = _response(lines, node)
        except _UnfitError as unfit:
            dropped[str(unfit)] += 1
            continue
        header = signature(response, bare)
        pairs.append(
            TrainingPair(
                prompt=f"{_task(node, owner, module)}\n\n```python\n{header}\n```\n\n{docstring}",
                response=response,
                category=category,
                language=language,
                group=group,
            )
        )
    return pairs


def _task(node: DefinitionNode, owner: str, module: str) -> str:
    if isinstance(node, ast.ClassDef):
        return f"Write the Python class `{owner}.{node.name}`."
    if owner == module:
        return f"Write the Python function `{owner}.{node.name}`."
    return f"Write the method `{node.name}` of the Python class `{owner}`."


class _UnfitError(Exception):
    """A definition cannot become a pair; the argument is the reason, a key of `dropped`."""


def _definitions(
    node: ast.AST, owner: str, *, classes: bool
) -> Iterator[tuple[DefinitionNode, str]]:
    """Yield definitions with the dotted name of their parent, in source order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield child, owner
        elif isinstance(child, ast.ClassDef):
            if classes:
                yield child, owner
            yield from _definitions(child, f"{owner}.{child.name}", classes=classes)
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            # a definition under an `if` or a `try`
            yield from _definitions(child, owner, classes=classes)


def _docstring(node: DefinitionNode) -> str:
    """Return the docstring of a definition that is suitable for training."""
    if node.name.lstrip("_").lower().startswith("test"):
        raise _UnfitError("test")
    docstring = (ast.get_docstring(node) or "").strip()
    if not docstring:
        raise _UnfitError("undocumented")
    if not _is_text(docstring):
        raise _UnfitError("docstring_is_not_text")
    if all(_is_stub(statement) for statement in node.body[1:]):
        raise _UnfitError("stub")
    return docstring


def _response(lines: list[str], node: DefinitionNode) -> tuple[str, DefinitionNode]:
    """Return the source without docstring, and the definition parsed from it."""
    response = cut(lines, node)
    if len(response) > MAX_RESPONSE_CHARS:
        raise _UnfitError("long")
    bare = same_but_docstring(response, node)
    if bare is None:
        raise _UnfitError("cut_changes_code")
    if ast.get_docstring(bare, clean=False) is not None:
        raise _UnfitError("second_docstring")
    if _python_body_lines(response, bare) < MIN_BODY_LINES:
        raise _UnfitError("short")
    return response, bare


def _is_text(docstring: str) -> bool:
    """Return whether a docstring is valid UTF-8 text; escapes can produce NUL or surrogates."""
    return "\0" not in docstring and not any("\ud800" <= char <= "\udfff" for char in docstring)


def _is_stub(statement: ast.stmt) -> bool:
    """Return whether a statement is ``pass``, ``...`` or ``raise NotImplementedError``."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) and statement.value.value is Ellipsis
    if not isinstance(statement, ast.Raise):
        return False
    raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def _python_body_lines(text: str, node: DefinitionNode) -> int:
    """Count the lines of a definition's body, without blank lines and comment lines."""
    body = text.split("\n")[node.body[0].lineno - 1 :]
    return sum(1 for line in body if line.strip() and not line.lstrip().startswith("#"))


_KINDS: Final = {
    "function_item": "function",
    "struct_item": "struct",
    "enum_item": "enum",
    "trait_item": "trait",
}
_TEST_MARKS: Final = ("#[test]", "#[cfg(test)]", "#[bench]", "::test]", "#[should_panic")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """A Rust item with its attributes and documentation."""

    node: Node
    attributes: tuple[Node, ...]
    doc: str
    owner: str  # the type or trait of a method; empty for a free item
    path: str  # enclosing modules


class _UnfitItemError(Exception):
    """An item cannot become a pair; the argument is the reason, a key of `dropped`."""


def rust_pairs(
    text: str, *, crate: str, group: str, category: str, dropped: Counter[str]
) -> list[TrainingPair]:
    """Extract a pair from every documented function, method, struct, enum and trait of a file.

    Args:
        text: the file's source with normalized newlines.
        crate: the module name used in the prompts, such as ``serde::de``.
        group: the group of every pair.
        category: the category of every pair.
        dropped: counter of skipped items by reason; updated in place.

    Returns:
        The pairs in file order.

    Raises:
        MissingExtra: tree-sitter or its grammar for Rust is not installed.
    """
    data = text.encode("utf-8")
    tree = parse_rust(data)
    if first_error(tree) is not None:
        dropped["file_does_not_parse"] += 1
        return []
    pairs = []
    for item in _items(tree.root_node, "", crate, dropped):
        try:
            pairs.append(_pair(item, data, group, category))
        except _UnfitItemError as unfit:
            dropped[str(unfit)] += 1
    return pairs


def _items(node: Node, owner: str, path: str, dropped: Counter[str]) -> Iterator[_Item]:
    """Yield the items of a file and its modules, and the methods of its impls and traits."""
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
        raise _UnfitItemError("undocumented")
    if "\0" in item.doc:
        raise _UnfitItemError("doc_is_not_text")
    body = item.node.child_by_field_name("body")
    if body is None or _rust_body_lines(body) < MIN_BODY_LINES:
        raise _UnfitItemError("short")
    response = cut_rust(data, [*item.attributes, item.node])
    if len(response) > MAX_RESPONSE_CHARS:
        raise _UnfitItemError("long")
    if first_error(parse_rust(response.encode("utf-8"))) is not None:
        raise _UnfitItemError("cut_changes_code")
    head = cut_rust(data, [item.node], body.start_byte).rstrip()
    return TrainingPair(
        prompt=f"{_rust_task(item)}\n\n```rust\n{head}\n```\n\n{item.doc}",
        response=response,
        category=category,
        language="rust",
        group=group,
    )


def _rust_task(item: _Item) -> str:
    if item.owner:
        owner = " ".join(item.owner.split())
        return f"Write the method `{_name(item.node)}` of the Rust type `{item.path}::{owner}`."
    return f"Write the Rust {_KINDS[item.node.type]} `{item.path}::{_name(item.node)}`."


def _name(node: Node) -> str:
    name = node.child_by_field_name("name")
    assert name is not None, "the grammar gives every such item a name"
    return text_of(name)


def _rust_body_lines(body: Node) -> int:
    """Count the lines of a body, without blank lines, comments and lone brackets."""
    lines = (line.strip() for line in text_of(body).split("\n"))
    return sum(1 for line in lines if line.strip("{}(),;") and not line.startswith("//"))


# CommonMark: up to three spaces, three or more marks, then the info string, which contains no
# backticks after backtick marks.
_FENCE: Final = re.compile(r"(?P<indent> {0,3})(?P<marks>`{3,}(?=[^`]*$)|~{3,})[ \t]*(?P<info>.*)$")
_HEADING: Final = re.compile(r" {0,3}#{1,6}[ \t]+(?P<text>.*?)(?:[ \t]+#+)?[ \t]*$")
_LANGUAGE: Final = re.compile(r"[\w+#-]+")
_SAME: Final = {"py": "python", "python3": "python", "rs": "rust", "sh": "bash", "js": "javascript"}


@dataclass(slots=True)
class _Block:
    """A fenced block with the text before it."""

    heading: str
    paragraph: str
    info: str
    lines: list[str] = field(default_factory=list)


def markdown_pairs(
    text: str, *, group: str, category: str, dropped: Counter[str]
) -> list[TrainingPair]:
    """Extract a pair from every fenced block with a language and preceding text.

    Args:
        text: the file with normalized newlines.
        group: the group of every pair.
        category: the category of every pair.
        dropped: counter of skipped blocks by reason; updated in place.

    Returns:
        The pairs in file order, with the block's language in lower case.
    """
    pairs = []
    for block in _blocks(text, dropped):
        code = "\n".join(block.lines)
        prompt = "\n\n".join(part for part in (block.heading, block.paragraph) if part)
        language = _language(block.info)
        if language is None:
            dropped["block_without_language"] += 1
        elif not prompt:
            dropped["nothing_leads_to_block"] += 1
        elif len(code) > MAX_RESPONSE_CHARS:
            dropped["long"] += 1
        elif sum(1 for line in block.lines if line.strip()) < MIN_BODY_LINES:
            dropped["short"] += 1
        elif "\0" in prompt + code:
            dropped["block_is_not_text"] += 1
        else:
            pairs.append(
                TrainingPair(
                    prompt=prompt, response=code, category=category, language=language, group=group
                )
            )
    return pairs


def _language(info: str) -> str | None:
    """Return the language of an info string: ``python`` for ``py title=x`` or ``{.python}``."""
    found = _LANGUAGE.match(info.strip().lstrip("{."))
    if found is None:
        return None
    name = found.group().lower()
    return _SAME.get(name, name)


def _blocks(text: str, dropped: Counter[str]) -> Iterator[_Block]:
    heading, paragraph, is_open = "", list[str](), False
    lines = iter(text.split("\n"))
    for line in lines:
        fence, title = _FENCE.match(line), _HEADING.match(line)
        if fence is not None:
            block = _Block(heading, " ".join(paragraph), fence["info"])
            if _read(block, fence, lines):
                yield block
            else:
                dropped["block_without_end"] += 1
            is_open = False  # adjacent blocks share the text before the first one
        elif title is not None:
            heading, paragraph, is_open = title["text"].strip(), [], False
        elif line.strip():
            paragraph = [*paragraph, line.strip()] if is_open else [line.strip()]
            is_open = True
        else:
            is_open = False


def _read(block: _Block, fence: re.Match[str], lines: Iterator[str]) -> bool:
    """Read a block's lines up to its closing fence; return False if there is none."""
    end = re.compile(rf" {{0,3}}{re.escape(fence['marks'][0])}{{{len(fence['marks'])},}}[ \t]*$")
    indent = len(fence["indent"])
    for line in lines:
        if end.match(line):
            return True
        blanks = len(line) - len(line.lstrip(" "))
        block.lines.append(line[min(indent, blanks) :])
    return False
