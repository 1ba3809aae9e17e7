"""Python functions and classes: extracted from source text, and matched by syntax tree.

The syntax tree provides positions; comments and layout are kept as written. Columns of the tree
count UTF-8 bytes; only `_split_at` converts them to characters.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import io
import re
import tokenize
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
DefinitionNode: TypeAlias = FunctionNode | ast.ClassDef

# The text from the last name of a header to its colon, including comments.
HEADER_END: Final = re.compile(r"(?:[^:#]|#[^\n]*\n)*?:")
# Without one of these, no string spans lines, and the slow tokenizer is not needed.
LONG_STRING_MARKS: Final = ('"""', "'''", "\\\n")


_FENCED: Final = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)
# Minimum nodes, names and constants of a function to match. Measured: two pairs of HumanEval's 164
# solutions match each other, and none of the standard library's 4,377 functions matches one.
_LEAST_PARTS: Final = 30
_STATEMENTS: Final = (ast.For, ast.While, ast.If, ast.Return, ast.With, ast.Try, ast.comprehension)
# The fields of nodes that hold names.
_NAMES: Final = {
    "Name": "id",
    "arg": "arg",
    "ExceptHandler": "name",
    "Global": "names",
    "Nonlocal": "names",
    "FunctionDef": "name",
    "AsyncFunctionDef": "name",
    "ClassDef": "name",
}
# Fields in which a copy may differ: annotations, decorators and the context of a value.
_LEFT_OUT: Final = frozenset(
    {"annotation", "returns", "decorator_list", "type_comment", "type_params", "ctx", "kind"}
)


def decode(data: bytes) -> str | None:
    """Decode a source file with its declared encoding.

    Args:
        data: the file's bytes.

    Returns:
        The text with normalized newlines; None if it cannot be decoded.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return io.TextIOWrapper(io.BytesIO(data), encoding=encoding).read()
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return None


def parse(text: str) -> ast.Module | None:
    """Parse source text without warnings.

    Args:
        text: any text.

    Returns:
        The tree; None if the text is not valid Python for the running interpreter.
    """
    with warnings.catch_warnings():
        # Users need no warning about invalid escapes in source files of others.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def cut(lines: Sequence[str], node: DefinitionNode) -> str:
    """Extract a function or class from its file, dedented and without its docstring.

    Args:
        lines: the file's text split at newlines (not with `str.splitlines`, which also splits
            at form feeds), to match the tree's line numbers.
        node: a definition in that file whose first statement is its docstring.

    Returns:
        The source with its decorators and comments. Not every layout is handled: verify the
        result with `same_but_docstring`.
    """
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    indent = lines[node.lineno - 1][: node.col_offset]
    doc = node.body[0]
    kept = [
        *lines[first - 1 : doc.lineno - 1],
        *_next_to_docstring(lines, doc),
        *lines[_end(doc)[0] : _end(node)[0]],
    ]
    return "\n".join(_dedented(kept, indent))


def same_but_docstring(text: str, node: DefinitionNode) -> DefinitionNode | None:
    """Parse a text and check that it is a definition's code without the docstring.

    Args:
        text: the result of `cut`.
        node: the function or class as parsed from its file.

    Returns:
        The definition as parsed from the text; None if the two differ in more than positions and
        the docstring.
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
    """Return the ``def`` or ``class`` header, without decorators.

    Args:
        text: the definition's source.
        node: the function or class parsed from that text.

    Returns:
        The header up to and including its colon, as written.
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
    type_params: Iterable[ast.expr] = getattr(node, "type_params", ())  # Python 3.12+
    yield from type_params


def _end(node: ast.expr | ast.arg | ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None, "the parser gives every node an end"
    assert node.end_col_offset is not None, "the parser gives every node an end"
    return node.end_lineno, node.end_col_offset


def _split_at(line: str, column: int) -> tuple[str, str]:
    data = line.encode("utf-8")
    return data[:column].decode("utf-8"), data[column:].decode("utf-8")


def _next_to_docstring(lines: Sequence[str], doc: ast.stmt) -> list[str]:
    """Return other code or comments on the lines of a docstring, as one line."""
    last, column = _end(doc)
    before, _ = _split_at(lines[doc.lineno - 1], doc.col_offset)
    _, after = _split_at(lines[last - 1], column)
    line = before + after.lstrip("; \t")
    return [line.rstrip()] if line.strip() else []


def _dedented(lines: list[str], indent: str) -> list[str]:
    """Remove the indentation, except from lines that begin within a string."""
    within = _rows_within_strings(lines) if indent else frozenset()
    return [line if row in within else _without(line, indent) for row, line in enumerate(lines)]


def _without(line: str, indent: str) -> str:
    if not line.strip():
        return ""
    # A comment or a bracketed line may be indented less than its function.
    return line.removeprefix(indent) if line.startswith(indent) else line.lstrip(" \t")


def _rows_within_strings(lines: list[str]) -> frozenset[int]:
    """Return the indices of the lines in an indented block that begin within a string."""
    text = "\n".join(lines)
    if not any(mark in text for mark in LONG_STRING_MARKS):
        return frozenset()
    rows: set[int] = set()
    open_at: list[int] = []  # f-strings are several tokens in Python 3.12+
    try:
        # The added `if` line makes the tokenizer's row 2 our row 0.
        for token in tokenize.generate_tokens(io.StringIO(f"if 1:\n{text}\n").readline):
            kind = tokenize.tok_name[token.type]
            if kind.endswith("STRING_START"):
                open_at.append(token.start[0])
            start = open_at.pop() if kind.endswith("STRING_END") else token.start[0]
            if kind == "STRING" or kind.endswith("STRING_END"):
                rows.update(range(start - 1, token.end[0] - 1))
    except (tokenize.TokenError, SyntaxError):
        return frozenset()  # the result will not parse either, and is refused later
    return frozenset(rows)


class KnownFunctions:
    """Functions to be recognized under other names.

    A function is identified by a fingerprint of its syntax tree without its name, the names that
    it binds (arguments, variables, nested definitions), docstrings, annotations, decorators and
    layout. Short functions and functions that return nothing are ignored, because they match by
    chance.
    """

    def __init__(self) -> None:
        """Start without functions."""
        self._kinds: set[tuple[int, ...]] = set()

    def add(self, text: str) -> set[bytes]:
        """Add the functions in a text, and return their fingerprints."""
        functions = list(_functions([text]))
        self._kinds.update(map(_kind, functions))
        return _fingerprints(functions)

    def find(self, texts: Sequence[str]) -> set[bytes]:
        """Return the fingerprints of functions that may have been added.

        Args:
            texts: texts in order. Code may be in a text, in Markdown fences, or continue from one
                text to the next, as when an answer completes a signature in the prompt.
        """
        if not self._kinds:
            return set()
        return _fingerprints(node for node in _functions(texts) if _kind(node) in self._kinds)


def _fingerprints(functions: Iterable[FunctionNode]) -> set[bytes]:
    written = (list(_written(node, set(_bound(node)))) for node in functions)
    return {
        hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()
        for parts in written
        if len(parts) >= _LEAST_PARTS
    }


def _functions(texts: Sequence[str]) -> Iterator[FunctionNode]:
    """Yield the functions in texts that return or yield."""
    joined = ["\n".join(texts)] if len(texts) > 1 else []
    fenced = [match[1] for text in texts for match in _FENCED.finditer(text)]
    for text in dict.fromkeys([*texts, *fenced, *joined]):
        tree = parse(text) if "def " in text else None
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, FunctionNode) and any(
                isinstance(one, ast.Return | ast.Yield | ast.YieldFrom) for one in ast.walk(node)
            ):
                yield node


def _kind(function: FunctionNode) -> tuple[int, ...]:
    """Count a function's statements by kind, a cheap key that renaming does not change."""
    counts = Counter(map(type, ast.walk(function)))
    return tuple(counts[kind] for kind in _STATEMENTS)


def _bound(function: FunctionNode) -> Iterator[str]:
    """Yield the names that a function binds, including its own."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, DefinitionNode) or (
            isinstance(node, ast.ExceptHandler) and node.name is not None
        ):
            yield str(node.name)


def _written(tree: ast.AST, bound: set[str]) -> Iterator[str]:
    """Serialize a tree as strings; bound names are numbered by first appearance."""
    numbers: dict[str, int] = {}
    left: list[tuple[object, bool]] = [(tree, False)]  # a stack: recursion fails on deep trees
    while left:
        value, is_name = left.pop()
        if isinstance(value, ast.AnnAssign) and value.value is not None:
            value = ast.Assign(targets=[value.target], value=value.value)
        if isinstance(value, ast.AST):
            yield type(value).__name__
            names = _NAMES.get(type(value).__name__)
            fields = [
                (_without_docstring(field), name == names)
                for name, field in ast.iter_fields(value)
                if name not in _LEFT_OUT
            ]
            left += reversed(fields)
        elif isinstance(value, list):
            yield f"{len(value)} of"
            left += [(one, is_name) for one in reversed(value)]
        elif is_name and value in bound:
            yield f"name {numbers.setdefault(str(value), len(numbers))}"
        else:
            yield repr(value)


def _without_docstring(field: object) -> object:
    """Return a body without its docstring; return any other field unchanged."""
    match field:
        case [ast.Expr(value=ast.Constant(value=str())), *rest] if rest:
            return rest
    return field
