"""Checks that code parses, by the language's own grammar."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import TYPE_CHECKING, Final

from mens_exp.corpus.rust_source import first_error, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mens_exp.rows.schema import TrainingPair

__all__ = ["CHECKED", "blocks_of", "parse_problem", "spans_of"]

_FENCED: Final = re.compile(
    r"^ {0,3}(?P<marks>`{3,}|~{3,})[ \t]*(?P<label>[^\s`{,]*)[^\n]*\n"
    r"(?P<code>.*?)^ {0,3}(?P=marks)[`~]*[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_SAME: Final = {"py": "python", "python3": "python", "rs": "rust"}


def parse_problem(pair: TrainingPair) -> str | None:
    """Say where the code of a row's answers does not parse.

    Code is what stands in fences of the row's language, or without a label; an answer without any
    fence is code as a whole. A row in a language that is not `CHECKED`, or in none, is not asked.

    Returns:
        What is wrong, its line in the code first met, or None.

    Raises:
        MissingExtra: the grammar of Rust is asked for and not installed.
    """
    check = CHECKED.get((pair.language or "").casefold())
    if check is None:
        return None
    return next((wrong for code in blocks_of(pair) if (wrong := check(code)) is not None), None)


def blocks_of(pair: TrainingPair) -> Iterator[str]:
    """Yield the code of a row's answers in the language that the row names."""
    language = (pair.language or "").casefold()
    for _, said in pair.exchanges:
        for start, end in spans_of(said, language):
            yield said[start:end]


def spans_of(said: str, language: str) -> list[tuple[int, int]]:
    """Return where the code of an answer begins and ends, in a language that fences may name.

    An answer without any fence is code as a whole.
    """
    fenced = list(_FENCED.finditer(said))
    if not fenced:
        return [(0, len(said))]
    labels = [block["label"].casefold() for block in fenced]
    return [
        block.span("code")
        for block, label in zip(fenced, labels, strict=True)
        if _SAME.get(label, label) in {"", language}
    ]


def _python(code: str) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in a row is no news to our user
        try:
            ast.parse(code)
        except SyntaxError as error:
            return f"line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    return None


def _rust(code: str) -> str | None:
    place = first_error(parse(code.encode("utf-8")))
    return None if place is None else f"line {place[0]}, column {place[1]}"


def _json(code: str) -> str | None:
    try:
        json.loads(code)
    except (ValueError, RecursionError) as error:
        return str(error)
    return None


CHECKED: Final[dict[str, Callable[[str], str | None]]] = {
    "python": _python,
    "rust": _rust,
    "json": _json,
}
