"""Rust sources: parsed with tree-sitter, split into items, and formatted by rustfmt.

The canonical form is rustfmt's default layout for edition 2021, with comments kept. rustfmt opens
the files named by a source's ``mod`` declarations, so it runs in a sandbox. One call formats many
files, because starting it takes as long as formatting twenty.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mens_exp.errors import MissingExtra, SetupError
from mens_exp.sandbox.program import (
    Outcome,
    Program,
    find_rust,
    find_rustfmt,
    least_rust_limits,
    run_all,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tree_sitter import Node, Parser, Tree

    from mens_exp.sandbox.program import Execution, Limits, Rustfmt, Sandbox

EXTRA: Final = "pip install 'mens-exp[corpus]'"
# Nodes in which leading white space is content, not layout.
_VERBATIM: Final = frozenset({"string_literal", "raw_string_literal", "block_comment"})


def parse_rust(data: bytes) -> Tree:
    """Parse Rust; the tree contains error nodes for invalid code.

    Args:
        data: UTF-8 source.

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
    """Return line and column, from 1, of the first syntax error; None if there is none."""
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
    """Return the text of a node."""
    return (node.text or b"").decode("utf-8")


def outer_doc(comment: Node) -> str | None:
    """Return the text of an outer doc comment, ``///`` or ``/** */``, without its marks.

    Returns:
        The text without the one space that usually follows the marks; None if the node is not an
        outer doc comment.
    """
    parts = {child.type: child for child in comment.named_children}
    if "outer_doc_comment_marker" not in parts:
        return None
    said = text_of(parts["doc_comment"]) if "doc_comment" in parts else ""
    if comment.type == "line_comment":
        return said.rstrip("\r\n").removeprefix(" ")
    lines = said.strip().split("\n")
    return "\n".join(line.strip().removeprefix("*").removeprefix(" ") for line in lines)


def cut_rust(data: bytes, nodes: list[Node], end: int | None = None) -> str:
    """Return the dedented text of adjacent nodes; lines that begin within a string are unchanged.

    Args:
        data: the file.
        nodes: adjacent nodes, such as an item's attributes and the item.
        end: the byte to stop before; None stops at the end of the last node.
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
    """Yield the file's rows that begin within a string or block comment of a node."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node.type in _VERBATIM:
            yield from range(node.start_point.row + 1, node.end_point.row + 1)
        else:
            waiting += node.children


EDITION: Final = "2021"
_AT_ONCE: Final = 64  # sources per call
_OUTPUT_KIB: Final = 64  # per source; rows are far shorter
_WORDS: Final = re.compile(r"\w+")
_ABI: Final = re.compile(r'\bextern\s+"C"')  # rustfmt makes the implied ABI explicit
_FAILED: Final = "rustfmt failed"
_MORE: Final = "rustfmt changed more than the layout"
_SCRIPT: Final = 'exec "$0" --edition "$1" --emit stdout --config-path rustfmt.toml ./*.rs'


@dataclass(frozen=True, kw_only=True, slots=True)
class Formatted:
    """A source in canonical form, or unchanged with the reason."""

    text: str
    problem: str | None = None


def rustfmt_version() -> str | None:
    """Return the version of the installed rustfmt; None if it is not installed."""
    try:
        return find_rustfmt(find_rust()).version
    except SetupError:
        return None


class RustFormatter:
    """Formats sources in a sandbox."""

    def __init__(self, sandbox: Sandbox, limits: Limits, workers: int | None = None) -> None:
        """Find rustfmt.

        Args:
            sandbox: the sandbox to run it in.
            limits: limits of one call.
            workers: concurrent calls; None uses one per processor.

        Raises:
            SetupError: rustc or rustfmt is not installed.
        """
        self._tool: Rustfmt = find_rustfmt(find_rust())
        self._sandbox, self._workers = sandbox, workers
        self._limits = replace(least_rust_limits(limits), output_kib=_AT_ONCE * _OUTPUT_KIB)

    @property
    def version(self) -> str:
        """The version of rustfmt."""
        return self._tool.version

    def formatted(self, sources: Sequence[str]) -> list[Formatted]:
        """Format sources, and return them in order.

        Raises:
            SetupError: the sandbox failed.
        """
        batches = [sources[at : at + _AT_ONCE] for at in range(0, len(sources), _AT_ONCE)]
        found = [one for some in self._formatted(batches) for one in some]
        # Retry alone: one source may have made rustfmt fail on the others of its call.
        again = [number for number, one in enumerate(found) if one is None]
        alone = dict(zip(again, self._formatted([[sources[n]] for n in again]), strict=True))
        return [
            one or alone[number][0] or Formatted(text=sources[number], problem=_FAILED)
            for number, one in enumerate(found)
        ]

    def _formatted(self, batches: Sequence[Sequence[str]]) -> Iterator[list[Formatted | None]]:
        """Yield the results of each call; None for a source without a result."""
        # Random file names: a source can neither name a file of its call nor imitate a header.
        words = [secrets.token_hex(16) for _ in batches]
        programs = [self._program(*one) for one in zip(words, batches, strict=True)]
        executions = run_all(self._sandbox, programs, self._limits, self._workers)
        for word, some, execution in zip(words, batches, executions, strict=True):
            yield _read(word, some, execution)

    def _program(self, word: str, sources: Sequence[str]) -> Program:
        files = {f"{word}{number:04d}.rs": source for number, source in enumerate(sources)}
        return Program(
            argv=("/bin/sh", "-c", _SCRIPT, self._tool.tool, EDITION),
            files={**files, "rustfmt.toml": ""},
            visible=(self._tool.sysroot,),
        )


def _read(word: str, sources: Sequence[str], execution: Execution) -> list[Formatted | None]:
    """Split the output, in which a line with the file's path precedes each source."""
    head = re.compile(rf"^[^\n]*/{word}(\d{{4}})\.rs:\n\n", re.MULTILINE)
    heads = list(head.finditer(execution.stdout))
    ends = [*(one.start() for one in heads), len(execution.stdout)][1:]
    texts = {
        int(one[1]): execution.stdout[one.end() : e] for one, e in zip(heads, ends, strict=True)
    }
    is_whole = execution.outcome in {Outcome.ok, Outcome.failed}
    if not is_whole and texts:
        del texts[max(texts)]  # incomplete
    found: list[Formatted | None] = []
    for number, source in enumerate(sources):
        problem = _refusal(execution.stderr, f"{word}{number:04d}.rs")
        if problem is not None:
            found.append(Formatted(text=source, problem=problem))
        elif number in texts and _words(source) == _words(texts[number]):
            found.append(Formatted(text=texts[number]))
        elif number in texts and len(sources) == 1:
            found.append(Formatted(text=source, problem=_MORE))
        elif len(sources) == 1:
            found.append(Formatted(text=source, problem=_failure(execution)))
        else:
            found.append(None)
    return found


def _refusal(said: str, file: str) -> str | None:
    """Return rustfmt's first error in a file, with line and column."""
    found = re.search(
        rf"^error[^\n:]*: ([^\n]*)\n(?:[^\n]*\n)??\s*-->\s[^\n]*/{file}:(\d+):(\d+)",
        said,
        re.MULTILINE,
    )
    if found is None:
        return None
    # A message may contain a path in the sandbox.
    message = found[1] if file[:32] not in found[1] else "a file that it names cannot be read"
    return f"line {found[2]}, column {found[3]}: {message}"


def _failure(execution: Execution) -> str:
    """Describe a failure for which rustfmt reports no position."""
    if "failed to resolve mod" in execution.stderr:
        return "it declares a module that is in another file"
    if execution.outcome in {Outcome.ok, Outcome.failed}:
        return _FAILED
    return f"{_FAILED} ({execution.outcome})"


def _words(source: str) -> Counter[str]:
    """Count words, which formatting preserves unless rustfmt inlines another source's file."""
    return Counter(_WORDS.findall(_ABI.sub("extern", source)))
