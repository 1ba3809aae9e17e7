"""Extract the graded code from a completion: outside reasoning, and in any accepted style.

A suite receives only the text outside reasoning (`Answer`); the record keeps the whole completion.
The last complete Markdown block counts; an unclosed block is used only if no complete one exists. A
completion may continue the prompt, with or without its indentation, or contain the whole function.
Fences, prose around the code, helpers above the function, and prints, examples and a main block
below it are all accepted. Program errors are never repaired: only prose outside the code, and
statements below the function that define nothing, are removed.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

GRADING: Final = 5
"""Version of grading, recorded in every scorecard and included in the graded digest of every suite.

1: grades the first block, or the whole completion; 2: the first block that defines the function, in
any style, without leading reasoning; 3: the last complete one, without any reasoning; 4: Python
tests run in a separate process from the answer, which returns only values; 5: so do Rust tests, and
a Rust answer keeps its macros and all code below an import with braces.
"""

_NAMES: Final = "think|thinking|thought|reasoning"
# The prompt may have opened the tag. A quoted tag is part of a program.
_OPENED_BEFORE: Final = re.compile(
    rf"\A(?:(?!<(?:{_NAMES})>).)*?</(?:{_NAMES})>(?![\"'])\n*", re.DOTALL
)
_FENCE: Final = r"^[ \t]*```+[ \t]*(?P<language>[^\s`]*)[^\n`]*$"
_FENCE_OPENING: Final = re.compile(_FENCE)
_FENCE_OR_TAG: Final = re.compile(rf"{_FENCE}|(?<![^\s>])<(?P<tag>{_NAMES})>", re.MULTILINE)


class Place(StrEnum):
    """The place in an answer where its code was found."""

    LAST_BLOCK = "last block"  # the last complete block that is eligible
    OPEN_BLOCK = "open block"  # the answer was cut inside it, and no complete block is eligible
    COMPLETION = "completion"  # there is no block


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The content of a Markdown fence; ``is_closed`` is false if the completion ended inside it."""

    language: str
    text: str
    is_closed: bool


def outside_reasoning(completion: str) -> str:
    """Return a completion without its reasoning, in ``<think>`` and similar tags.

    Reasoning that the prompt opened ends at the first closing tag. Unclosed reasoning extends to
    the end of the completion. A tag inside a Markdown block is part of the block.
    """
    said = _OPENED_BEFORE.sub("", completion, count=1)
    kept, start, at, in_block = "", 0, 0, False
    while (found := _FENCE_OR_TAG.search(said, at)) is not None:
        at = found.end()
        if found["tag"] is None:
            in_block = not in_block or bool(found["language"])
        elif not in_block:
            before = said[start : found.start()]
            if before.strip():
                kept += before if before.endswith("\n") else f"{before}\n"
            closing = f"</{found['tag']}>"
            end = said.find(closing, at)
            start = at = len(said) if end < 0 else end + len(closing)
            while said[start : start + 1] == "\n":
                start += 1
    return kept + said[start:]


def blocks_in(text: str) -> list[Block]:
    """Return the Markdown blocks of a text, in order.

    A fence with a language always opens a block, so a preceding fence without a partner closed a
    block that the prompt had opened.
    """
    found: list[Block] = []
    inside: list[str] | None = None
    language = ""
    for line in text.split("\n"):
        fence = _FENCE_OPENING.match(line)
        if fence is None:
            if inside is not None:
                inside.append(line)
            continue
        is_closed = inside is not None and not fence["language"]
        if inside is not None:
            code = "".join(f"{one}\n" for one in inside)
            found.append(Block(language=language, text=code, is_closed=is_closed))
        inside, language = (None, "") if is_closed else ([], fence["language"].lower())
    if inside is not None:
        found.append(Block(language=language, text="\n".join(inside), is_closed=False))
    return found


def last_with(blocks: list[Block], pattern: str) -> Block | None:
    """Return the last closed block in which a pattern is found, or the first open one."""
    having = [one for one in blocks if re.search(pattern, one.text, re.MULTILINE)]
    closed = [one for one in having if one.is_closed]
    return next(iter([*reversed(closed), *having]), None)


def code_of(text: str, pattern: str = "") -> str:
    """Return the code of an answer: its last complete block, or the whole text without any.

    Args:
        text: the answer.
        pattern: prefer blocks that match this pattern.
    """
    return code_and_place(text, pattern)[0]


def code_and_place(text: str, pattern: str = "") -> tuple[str, Place]:
    """Return the code of an answer as `code_of` does, and its place in the answer."""
    blocks = blocks_in(text)
    block = last_with(blocks, pattern) or last_with(blocks, "")
    if block is not None:
        place = Place.LAST_BLOCK if block.is_closed else Place.OPEN_BLOCK
        return textwrap.dedent(block.text), place
    before, fence, rest = text.partition("```")
    if not fence:
        return textwrap.dedent(before), Place.COMPLETION
    inside, closing, _ = rest.partition("```")  # within a line
    return textwrap.dedent(inside), Place.LAST_BLOCK if closing else Place.OPEN_BLOCK


_INDENT: Final = "    "
ANNOTATIONS: Final = "from __future__ import annotations\n"
"""First line of a program whose answer has this import, which must come first."""

_FENCE_LINE: Final = re.compile(r"^[ \t]*```.*$", re.MULTILINE)
_PYTHON: Final = frozenset({"", "py", "python", "python3"})
_CODE_LINE: Final = re.compile(r"(?:async\s+def|def|class|import|from)\s|@|\w+\s*=[^=]")
_FUTURE: Final = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_CLASS: Final = "Solution"
_SOLUTION: Final = re.compile(rf"^class\s+{_CLASS}\b", re.MULTILINE)
_CALLED: Final = "\n\n{name} = Solution().{name}\n"
_MOST_STARTS: Final = 30  # tried starts above the function; endlessly repetitive text has more
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS: Final = (*_FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom)


class Style(StrEnum):
    """The style in which a completion was read."""

    CONTINUATION = "continuation"  # the body of the prompt's function
    WHOLE = "whole"  # the function, with its signature
    SOLUTION = "class Solution"  # a method of that name, of a class constructed without arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """A program, or the reason why a completion is not one."""

    source: str
    style: Style | None
    error: str | None = None
    parses: bool = True  # false if no reading is valid Python


def assemble(completion: str, *, entry_point: str, prompt: str = "") -> Assembled:
    """Read a completion in every accepted style, and return the first reading that is a program.

    Args:
        completion: what the model wrote.
        entry_point: the requested function or class.
        prompt: code that ends in that function's signature and docstring; empty if the task is
            stated only in words.

    Returns:
        The program, with the prompt's imports and helpers; or, if no reading is a program, the
        completion appended to the prompt and the resulting error.
    """
    text, futures = _FUTURE.subn("", completion.replace("\r\n", "\n"))
    context = above(prompt, entry_point)
    for code in _texts(text, entry_point):
        for style, program in _readings(code, prompt, context, entry_point):
            tree = _tree(program)
            name = _CLASS if style is Style.SOLUTION else entry_point
            if tree is not None and _defines(tree, name):
                source = _without_use(program, tree, name)
                source += _CALLED.format(name=entry_point) * (style is Style.SOLUTION)
                return Assembled(source=ANNOTATIONS * bool(futures) + source, style=style)
    if not text.strip():
        return Assembled(source=prompt, style=None, error="the completion is empty")
    plain = prompt + next(_texts(text, entry_point))
    error = _error(plain)
    if error is not None:
        return Assembled(source=plain, style=None, error=error, parses=False)
    missing = f"no function {entry_point} is defined"
    return Assembled(source=plain, style=None, error=missing)


def _texts(completion: str, entry_point: str) -> Iterator[str]:
    """Yield candidate code: the last block that defines the function, or else any part."""
    blocks = [block for block in blocks_in(completion) if block.language in _PYTHON]
    flush = [textwrap.dedent(block.text) for block in blocks]
    giving = [place for place, text in enumerate(flush) if _gives(text, entry_point)]
    closed = [place for place in giving if blocks[place].is_closed]
    for asked in [*closed[-1:], *([] if closed else giving[:1])]:
        helpers = [
            text if place < asked and entry_point not in text else _definitions(text)
            for place, text in enumerate(flush)
            if not _tells(text, entry_point) and _tree(text) is not None
        ]
        yield "\n".join([*helpers, flush[asked]])
        yield flush[asked]
    if closed:
        return  # the model's final answer counts even if it is not a valid program
    fences = list(_FENCE_LINE.finditer(completion))
    above = completion[: fences[0].start()] if fences else ""
    # A block that is not a program by itself may be the function's body; prefer the last of these.
    bodies = [block.text for block, text in zip(blocks, flush, strict=True) if _tree(text) is None]
    texts = [*reversed(bodies), *(block.text for block in blocks)]
    if len(fences) % 2:  # the unpaired fence closes a block opened by the prompt or its template
        texts = [above, *texts]
    yield from (text for text in [*texts, above, completion] if text.strip())


def _gives(text: str, entry_point: str) -> bool:
    """Return whether a block is meant to define the function, even if it does not parse."""
    name = re.escape(entry_point)
    indent = r"[ \t]*" if _SOLUTION.search(text) else ""
    pattern = rf"^(?:{indent}(?:async\s+)?def|class)\s+{name}\b"
    is_told = re.search(pattern, text, re.MULTILINE) is not None
    return is_told or _defines(_tree(text), entry_point)


def _definitions(text: str) -> str:
    lines = text.split("\n")
    found = [node for node in ast.parse(text).body if isinstance(node, _DEFINITIONS)]
    return "\n".join(lines[number - 1] for node in found for number in _lines(node))


def _tells(text: str, entry_point: str) -> bool:
    name = re.escape(entry_point)
    return re.search(rf"\b(?:(?:def|class)\s+{name}\b|{name}\s*=[^=])", text) is not None


def _readings(
    text: str, prompt: str, context: str, entry_point: str
) -> Iterator[tuple[Style, str]]:
    """Yield programs, the most literal reading first."""
    flush = textwrap.dedent(text)
    yield from _wholes(flush, context, entry_point)
    indented = text.lstrip("\n")[:1].isspace()
    if prompt and indented:
        yield from _continuations(prompt, text)
    for whole in _without_prose(flush, entry_point):
        yield from _wholes(whole, context, entry_point)
    if prompt and not indented:
        yield from _continuations(prompt, textwrap.indent(flush, _INDENT))
        yield from _continuations(prompt, _INDENT + text.lstrip())


def _wholes(text: str, context: str, entry_point: str) -> Iterator[tuple[Style, str]]:
    tree = _tree(text)
    if _defines(tree, entry_point):
        yield Style.WHOLE, f"{context}{text}"
    elif any(_is_solution(node, entry_point) for node in (tree.body if tree else [])):
        yield Style.SOLUTION, f"{context}{text}"


def _is_solution(node: ast.stmt, entry_point: str) -> bool:
    return (
        isinstance(node, ast.ClassDef)
        and node.name == _CLASS
        and any(isinstance(one, _FUNCTIONS) and one.name == entry_point for one in node.body)
    )


def _continuations(prompt: str, text: str) -> Iterator[tuple[Style, str]]:
    program = _longest(prompt if prompt.endswith("\n") else f"{prompt}\n", text)
    if program is not None:
        yield Style.CONTINUATION, program


def _without_prose(text: str, entry_point: str) -> Iterator[str]:
    """Yield programs from an unindented line of code on that include the function's definition."""
    lines = text.split("\n")
    starts = [number for number, line in enumerate(lines) if _CODE_LINE.match(line)]
    own = [n for n in starts if _tells(lines[n], entry_point) or _SOLUTION.match(lines[n])]
    for last in dict.fromkeys([*own[-1:], *own[:1]]):
        above = [place for place in starts if place < last]
        for place in (*above[:_MOST_STARTS], last):
            program = _longest("", "\n".join(lines[place:]))
            if program is not None and program.count("\n") >= last - place:
                yield program


def _longest(start: str, text: str) -> str | None:
    """Return the longest program of ``start`` and a text, cut before an unindented line if needed.

    A cut must be at or above the syntax error, since a cut below it would leave the error in place.
    """
    lines = text.split("\n")
    end = len(lines)
    while any(line.strip() for line in lines[:end]):
        program = start + "\n".join(lines[:end])
        found = _parsed(program)
        if isinstance(found, ast.Module):
            return program
        if not isinstance(found, SyntaxError) or found.lineno is None:
            return None
        at = min(found.lineno - 1 - start.count("\n"), end - 1)
        end = next((place for place in range(at, 0, -1) if lines[place][:1].strip()), 0)
    return None


def _tree(source: str) -> ast.Module | None:
    found = _parsed(source)
    return found if isinstance(found, ast.Module) else None


def _error(source: str) -> str | None:
    """Return the reason why a text is not a Python program, or None if it is."""
    found = _parsed(source)
    return None if isinstance(found, ast.Module) else f"{type(found).__name__}: {found}"


def _parsed(source: str) -> ast.Module | Exception:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # generated code may contain invalid escapes
            tree = ast.parse(source)
            compile(tree, "<completion>", "exec", dont_inherit=True)  # finds a misplaced return
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return error
    return tree


def _defines(tree: ast.Module | None, name: str) -> bool:
    return tree is not None and any(name in _bound(node) for node in tree.body)


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines or assigns."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _without_use(source: str, tree: ast.Module, entry_point: str) -> str:
    """Blank code below the function that only uses it: prints, examples, a main block."""
    at = max(place for place, node in enumerate(tree.body) if entry_point in _bound(node))
    kept = [
        node
        for place, node in enumerate(tree.body)
        if (place <= at and not _is_main(node)) or isinstance(node, _DEFINITIONS)
    ]
    read = _read_program(kept)
    for node in reversed(tree.body[at + 1 :]):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and _bound(node) & read:
            kept.append(node)
            read |= _read_program([node])
    lines = source.split("\n")
    keep = {number for node in kept for number in _lines(node)}
    drop = {number for node in tree.body if node not in kept for number in _lines(node)} - keep
    return "\n".join("" if number in drop else line for number, line in enumerate(lines, 1))


def _read_program(nodes: list[ast.stmt]) -> set[str]:
    return {
        one.id
        for node in nodes
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
    }


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(node.test)
    )


def _lines(node: ast.stmt) -> range:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return range(first, (node.end_lineno or node.lineno) + 1)


def above(prompt: str, entry_point: str) -> str:
    """Return the part of the prompt above the function: imports and helpers."""
    tree = _tree(f"{prompt.rstrip()}\n{_INDENT}pass\n")
    for node in tree.body if tree else []:
        if isinstance(node, _FUNCTIONS) and node.name == entry_point:
            lines = prompt.split("\n")[: _lines(node).start - 1]
            return "\n".join([*lines, ""])
    return ""
