"""Training pairs from the fenced blocks of code of one Markdown file.

The prompt is what leads to a block: the heading that it stands under, and the paragraph before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mens_exp.corpus.functions import MAX_RESPONSE_CHARS, MIN_BODY_LINES
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

__all__ = ["pairs_of"]

# CommonMark: up to three blanks, three or more marks, then the info string; one of backticks
# holds none.
_FENCE: Final = re.compile(r"(?P<indent> {0,3})(?P<marks>`{3,}(?=[^`]*$)|~{3,})[ \t]*(?P<info>.*)$")
_HEADING: Final = re.compile(r" {0,3}#{1,6}[ \t]+(?P<text>.*?)(?:[ \t]+#+)?[ \t]*$")
_LANGUAGE: Final = re.compile(r"[\w+#-]+")
_SAME: Final = {"py": "python", "python3": "python", "rs": "rust", "sh": "bash", "js": "javascript"}


@dataclass(slots=True)
class _Block:
    """A fenced block with what led to it."""

    heading: str
    paragraph: str
    info: str
    lines: list[str] = field(default_factory=list)


def pairs_of(text: str, *, group: str, category: str, dropped: Counter[str]) -> list[TrainingPair]:
    """Make a pair of every fenced block whose language is named and that something leads to.

    Args:
        text: the file, line ends made newlines.
        group: the group of every pair.
        category: the category of every pair.
        dropped: counts, by reason, what was not taken; added to.

    Returns:
        The pairs, in the order of the file; each one's language is the block's, in lower case.
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
    """Return the language of an info string, ``python`` of ``py title=x`` or ``{.python}``."""
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
            is_open = False  # two blocks in a row are both led to by what stands before them
        elif title is not None:
            heading, paragraph, is_open = title["text"].strip(), [], False
        elif line.strip():
            paragraph = [*paragraph, line.strip()] if is_open else [line.strip()]
            is_open = True
        else:
            is_open = False


def _read(block: _Block, fence: re.Match[str], lines: Iterator[str]) -> bool:
    """Read a block's lines up to its closing fence; tell whether there is one."""
    end = re.compile(rf" {{0,3}}{re.escape(fence['marks'][0])}{{{len(fence['marks'])},}}[ \t]*$")
    indent = len(fence["indent"])
    for line in lines:
        if end.match(line):
            return True
        blanks = len(line) - len(line.lstrip(" "))
        block.lines.append(line[min(indent, blanks) :])
    return False
