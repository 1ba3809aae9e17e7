"""Cutting Python functions and classes out of their source text without changing what they say.

The syntax tree tells where things are, the text is what is kept: comments and layout
stay as the author wrote them. Columns of the tree count UTF-8 bytes; only `_split_at`
turns them into characters.
"""

from __future__ import annotations

import ast
import copy
import io
import re
import tokenize
import warnings
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "DefinitionNode",
    "FunctionNode",
    "cut",
    "decode",
    "parse",
    "same_but_docstring",
    "signature",
]

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
DefinitionNode: TypeAlias = FunctionNode | ast.ClassDef

# What may stand between the last name of a header and its colon, comments included.
HEADER_END: Final = re.compile(r"(?:[^:#]|#[^\n]*\n)*?:")
# Without one of these no string goes over a line's end; the slow tokenizer is spared.
LONG_STRING_MARKS: Final = ('"""', "'''", "\\\n")


def decode(data: bytes) -> str | None:
    """Decode a source file by the encoding that it declares.

    Args:
        data: the file's bytes.

    Returns:
        The text, every line end a newline; None where it cannot be decoded.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return io.TextIOWrapper(io.BytesIO(data), encoding=encoding).read()
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return None


def parse(text: str) -> ast.Module | None:
    """Parse source text, silently.

    Args:
        text: Python, perhaps.

    Returns:
        The tree; None where the text is no Python of the running interpreter.
    """
    with warnings.catch_warnings():
        # An invalid escape in someone else's file is no news to our user.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def cut(lines: Sequence[str], node: DefinitionNode) -> str:
    """Cut a function or class out of its file, less its docstring, dedented.

    Args:
        lines: the file's text split at newlines (not `str.splitlines`, which also splits
            at form feeds), so that the tree's line numbers count them.
        node: a definition of that file whose first statement is its docstring.

    Returns:
        The source with its decorators and comments. Layouts are endless: whoever trains on
        it checks it with `same_but_docstring`.
    """
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    indent = lines[node.lineno - 1][: node.col_offset]
    doc = node.body[0]
    kept = [
        *lines[first - 1 : doc.lineno - 1],
        *_beside(lines, doc),
        *lines[_end(doc)[0] : _end(node)[0]],
    ]
    return "\n".join(_dedented(kept, indent))


def same_but_docstring(text: str, node: DefinitionNode) -> DefinitionNode | None:
    """Parse a text and check that it is a definition's code, the docstring left out.

    Args:
        text: what `cut` made of the definition.
        node: the function or class as its file was parsed.

    Returns:
        The definition as parsed from the text; None where the two differ in more than
        positions and the docstring.
    """
    tree = parse(text)
    if tree is None or len(tree.body) != 1:
        return None
    bare = copy.copy(node)
    bare.body = node.body[1:]
    again = tree.body[0]
    if isinstance(again, DefinitionNode) and ast.dump(again) == ast.dump(bare):
        return again
    return None


def signature(text: str, node: DefinitionNode) -> str:
    """Return the ``def`` or ``class`` line or lines, decorators excluded.

    Args:
        text: the definition's source.
        node: the function or class parsed from that text.

    Returns:
        The header up to its colon, as written.
    """
    lines = text.split("\n")
    line, column = max([(node.lineno, node.col_offset), *map(_end, _header_parts(node))])
    before, after = _split_at(lines[line - 1], column)
    rest = HEADER_END.match("\n".join([after, *lines[line:]]))
    assert rest, "a header ends with a colon"
    return "\n".join([*lines[node.lineno - 1 : line - 1], before + rest.group()])


def _header_parts(node: DefinitionNode) -> Iterable[ast.expr | ast.arg]:
    if isinstance(node, ast.ClassDef):
        yield from (*node.bases, *(keyword.value for keyword in node.keywords))
    else:
        args = node.args
        yield from (*args.posonlyargs, *args.args, *args.kwonlyargs)
        yield from args.defaults
        for each in (args.vararg, args.kwarg, *args.kw_defaults, node.returns):
            if each is not None:
                yield each
    type_params: Iterable[ast.expr] = getattr(node, "type_params", ())  # Python 3.12 on
    yield from type_params


def _end(node: ast.expr | ast.arg | ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None, "the parser gives every node an end"
    assert node.end_col_offset is not None, "the parser gives every node an end"
    return node.end_lineno, node.end_col_offset


def _split_at(line: str, column: int) -> tuple[str, str]:
    data = line.encode("utf-8")
    return data[:column].decode("utf-8"), data[column:].decode("utf-8")


def _beside(lines: Sequence[str], doc: ast.stmt) -> list[str]:
    """Return the line of what else stands on a docstring's lines, a comment say."""
    last, column = _end(doc)
    before, _ = _split_at(lines[doc.lineno - 1], doc.col_offset)
    _, after = _split_at(lines[last - 1], column)
    line = before + after.lstrip("; \t")
    return [line.rstrip()] if line.strip() else []


def _dedented(lines: list[str], indent: str) -> list[str]:
    """Take the indentation off, except where a line begins within a string."""
    within = _rows_within_strings(lines) if indent else frozenset()
    return [line if row in within else _without(line, indent) for row, line in enumerate(lines)]


def _without(line: str, indent: str) -> str:
    if not line.strip():
        return ""
    # A comment or a bracketed line may be indented less than its function.
    return line.removeprefix(indent) if line.startswith(indent) else line.lstrip(" \t")


def _rows_within_strings(lines: list[str]) -> frozenset[int]:
    """Return which of the lines of an indented block, from 0, begin within a string."""
    text = "\n".join(lines)
    if not any(mark in text for mark in LONG_STRING_MARKS):
        return frozenset()
    rows: set[int] = set()
    open_at: list[int] = []  # f-strings are several tokens from Python 3.12 on
    try:
        # The block needs an opener, which makes the tokenizer's row 2 our row 0.
        for token in tokenize.generate_tokens(io.StringIO(f"if 1:\n{text}\n").readline):
            kind = tokenize.tok_name[token.type]
            if kind.endswith("STRING_START"):
                open_at.append(token.start[0])
            start = open_at.pop() if kind.endswith("STRING_END") else token.start[0]
            if kind == "STRING" or kind.endswith("STRING_END"):
                rows.update(range(start - 1, token.end[0] - 1))
    except (tokenize.TokenError, SyntaxError):
        return frozenset()  # what comes of it will not parse either, and is refused there
    return frozenset(rows)
