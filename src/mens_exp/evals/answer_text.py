"""The part of a completion that is graded: outside reasoning, and of its Markdown blocks the last.

A suite is given what stands outside reasoning and nothing else (`Answer`); the record keeps the
whole completion. A block that was cut before it closed gives way to the last one that closed.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = [
    "GRADING",
    "Block",
    "Place",
    "blocks_in",
    "code_and_place",
    "code_of",
    "last_with",
    "outside_reasoning",
]

GRADING: Final = 5
"""Version of grading, which every scorecard records and every suite's digest contains.

1: the first block, or everything; 2: the first block that defines the function, in any style, less
the reasoning that a completion begins with; 3: the last complete one, less all reasoning; 4: tests
of Python run in another process than the answer, which gives values alone; 5: so do those of Rust,
and an answer in Rust keeps its macros and all that stands below an import in braces.
"""

_NAMES: Final = "think|thinking|thought|reasoning"
# A prompt may have opened the tag. A tag between quotes is part of a program.
_OPENED_BEFORE: Final = re.compile(
    rf"\A(?:(?!<(?:{_NAMES})>).)*?</(?:{_NAMES})>(?![\"'])\n*", re.DOTALL
)
_FENCE: Final = r"^[ \t]*```+[ \t]*(?P<language>[^\s`]*)[^\n`]*$"
_FENCE_LINE: Final = re.compile(_FENCE)
_FENCE_OR_TAG: Final = re.compile(rf"{_FENCE}|(?<![^\s>])<(?P<tag>{_NAMES})>", re.MULTILINE)


class Place(StrEnum):
    """The place in an answer where its code was found."""

    LAST_BLOCK = "last block"  # that closed, of those that count
    OPEN_BLOCK = "open block"  # the answer was cut within it, and no other counts
    COMPLETION = "completion"  # there is no block


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The inside of a Markdown fence; ``is_closed`` is false where the completion ended in it."""

    language: str
    text: str
    is_closed: bool


def outside_reasoning(completion: str) -> str:
    """Return a completion without its reasoning: ``<think>`` and its like, up to the closing tag.

    Reasoning that the prompt opened ends at the first closing tag; one that never closes takes the
    rest of the completion. A tag inside a Markdown block is part of the block.
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
    """Return the Markdown blocks of a text, in their order.

    A fence that names a language opens a block: the fence before it, if it is still open, closed
    what the prompt had opened.
    """
    found: list[Block] = []
    inside: list[str] | None = None
    language = ""
    for line in text.split("\n"):
        fence = _FENCE_LINE.match(line)
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
        pattern: found in the block that counts, where one has it.
    """
    return code_and_place(text, pattern)[0]


def code_and_place(text: str, pattern: str = "") -> tuple[str, Place]:
    """Return the code of an answer as `code_of` does, and where it was found."""
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
