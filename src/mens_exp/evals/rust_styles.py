"""From what a model wrote to the Rust program that it meant, without a main function of its own.

A completion may go on where the prompt's function begins, or give the function whole, alone, in
Markdown fences or between sentences. Braces are matched; whether it compiles is for the compiler.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from mens_exp.evals.answer_text import blocks_in, last_with
from mens_exp.evals.completion_styles import Style

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["assemble_rust", "head_of", "style_of_rust", "without_comments"]

_FENCE_LINE: Final = re.compile(r"^[ \t]*```.*$", re.MULTILINE)
_RUST: Final = frozenset({"", "rs", "rust"})
# What braces do not count in, and braces. A lifetime has no closing quote and is passed over.
_TOKEN: Final = re.compile(
    r"""//[^\n]*|/\*.*?\*/|r(?P<hashes>\#*)".*?"(?P=hashes)|"(?:\\.|[^"\\])*"|'(?:\\[^\n]+?|[^\\'\n])'"""
    r"|[{}()\[\]]|;",
    re.DOTALL,
)
_BRACES: Final = {"{": 1, "}": -1}
_BRACKETS: Final = {**_BRACES, "(": 1, ")": -1, "[": 1, "]": -1}
# The last two are a macro's definition and its call.
_ITEM: Final = re.compile(
    r"(?:\s|//[^\n]*\n|/\*.*?\*/|\#!?\[[^\]\n]*\])*+"
    r"(?:"
    r"(?:pub(?:\([^)]*\))?\s+)?(?:unsafe\s+|async\s+|const\s+|extern\s+(?:\"\w*\"\s+)?)*"
    r"(?:fn|struct|enum|union|impl|trait|mod|(?P<value>use|type|static|const|crate))\b"
    r"(?:\s+(?:r\#)?(?P<name>\w+))?"
    r"|(?:unsafe\s+)?extern\s+(?:\"\w*\"\s*)?(?=\{)"
    r"|macro_rules!\s*\w+"
    r"|\w+(?:::\w+)*!(?=[({\[]|[ ]\{)"
    r")",
    re.DOTALL,
)


def assemble_rust(completion: str, *, prompt: str, entry_point: str) -> str:
    """Return the items of a program in which a completion defines the function.

    Args:
        completion: what the model wrote.
        prompt: code that ends in the function's signature and its opening brace.
        entry_point: the function's name.
    """
    text = _code(completion.replace("\r\n", "\n"), entry_point)
    if _definition(entry_point).search(text):
        begin = next((at.start() for at in _item_starts(text)), 0)
        above = prompt[: head_of(prompt, entry_point)]
        return f"{above}{_items(text[begin:])}"
    end = _closing(text, depth=1)
    if end is None:  # the generation was stopped at the brace
        return f"{prompt}{text}\n}}\n"
    return f"{prompt}{text[: end + 1]}\n{_items(text[end + 1 :])}"


def style_of_rust(completion: str, *, entry_point: str) -> Style:
    """Return how `assemble_rust` reads a completion: the whole function, or its continuation."""
    text = _code(completion.replace("\r\n", "\n"), entry_point)
    return Style.WHOLE if _definition(entry_point).search(text) else Style.CONTINUATION


def without_comments(text: str) -> str:
    """Return Rust less its comments, those of documentation too."""
    return _TOKEN.sub(lambda one: "" if one[0].startswith(("//", "/*")) else one[0], text)


def _code(completion: str, entry_point: str) -> str:
    """Return the last complete block that gives the function, the first one, or everything."""
    blocks = [block for block in blocks_in(completion) if block.language in _RUST]
    defining = last_with(blocks, _definition(entry_point).pattern)
    fences = list(_FENCE_LINE.finditer(completion))
    if not fences:
        return completion
    if len(fences) % 2 and defining is None:  # it closes what the prompt or its template opened
        return completion[: fences[0].start()] or completion
    bodies = [block for block in blocks if _closing(block.text, depth=1) is not None]
    chosen = defining or last_with(bodies, "") or next(iter(blocks), None)
    return completion if chosen is None else chosen.text


def _definition(name: str) -> re.Pattern[str]:
    return re.compile(rf"\bfn\s+{re.escape(name)}\b")


def head_of(prompt: str, entry_point: str) -> int:
    """Return where the prompt's function begins, its comments and attributes included."""
    found = list(_definition(entry_point).finditer(prompt))
    lines = prompt[: found[-1].start()].split("\n")[:-1] if found else []
    while lines and lines[-1].lstrip().startswith(("//", "#[")):
        lines.pop()
    return sum(len(line) + 1 for line in lines)


def _item_starts(text: str) -> Iterator[re.Match[str]]:
    """Yield the lines at the margin that begin an item."""
    for line in re.finditer(r"^[ \t]*(?=\S)", text, re.MULTILINE):
        found = _ITEM.match(text, line.start())
        if found is not None:
            yield found


def _items(text: str) -> str:
    """Return the items that a text begins with, but no main function."""
    kept, at = [], 0
    while (found := _ITEM.match(text, at)) is not None:
        end = _end_of_item(text, found.end(), {";"} if found["value"] else {"}", ";"})
        if found["name"] != "main":
            kept.append(text[at:end])
        at = end
    return "".join(kept) + "\n"


def _end_of_item(text: str, start: int, ends: set[str]) -> int:
    """Return the end of an item: behind the first of some tokens that is outside any bracket."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += _BRACKETS.get(token[0], 0)
        if depth <= 0 and token[0] in ends:
            return token.end()
    return len(text)


def _closing(text: str, *, depth: int) -> int | None:
    """Return where the brace stands that closes ``depth`` open ones."""
    for token in _TOKEN.finditer(text):
        depth += _BRACES.get(token[0], 0)
        if depth == 0:
            return token.start()
    return None
