"""The formats of rows: the keys that each has, and telling which one a row is written in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mens_exp.config.data import RowFormat

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["ALIASES", "FOREIGN_KEYS", "KEYS", "accepted", "format_of", "joined"]

ALIASES: Final = {"instruction": "prompt", "output": "response", "turns": "messages"}
_LABELS: Final = (
    *("rating", "category", "language", "system", "group", "difficulty"),
    "provenance",
)
KEYS: Final[dict[RowFormat, tuple[str, ...]]] = {
    RowFormat.pair: ("prompt", "response", *_LABELS),
    RowFormat.alpaca: ("prompt", "input", "response", *_LABELS),
    RowFormat.messages: ("messages", "tools", *_LABELS),
    RowFormat.sharegpt: ("conversations", "tools", *_LABELS),
}
_PAIR_KEYS: Final = frozenset({"prompt", "response", "instruction", "output"})

# Keys of other common formats, which no spelling suggestion could explain: the names
# that they stand for, and what to do.
FOREIGN_KEYS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "text": (
        ("prompt", "response"),
        "split the text into 'prompt' and 'response': plain text says not what to supervise",
    ),
    "completion": (("response",), "rename it to 'response', or say data.columns.response=…"),
    "question": (("prompt",), "rename it to 'prompt', or say data.columns.prompt=…"),
    "answer": (("response",), "rename it to 'response', or say data.columns.response=…"),
}


def format_of(keys: Collection[object]) -> RowFormat | None:
    """Tell how a row is written from its keys.

    Args:
        keys: the row's keys.

    Returns:
        The format; None where no key tells. A row of instruction and output without an `input`
        is a pair: Alpaca's form for it is the same.
    """
    if "messages" in keys or "turns" in keys:
        return RowFormat.messages
    if "conversations" in keys:
        return RowFormat.sharegpt
    if "input" in keys:
        return RowFormat.alpaca
    return RowFormat.pair if _PAIR_KEYS & set(keys) else None


def joined(first: RowFormat, other: RowFormat) -> RowFormat | None:
    """Return the format of a file that has rows of both, or None where it can have none."""
    if first is other:
        return first
    return RowFormat.alpaca if {first, other} == {RowFormat.pair, RowFormat.alpaca} else None


def accepted(form: RowFormat) -> str:
    """Say which keys a row of a format may have."""
    aliases = {name: alias for alias, name in ALIASES.items()}
    names = [
        f"{name!r} (alias {aliases[name]!r})" if name in aliases else repr(name)
        for name in KEYS[form]
    ]
    return f"only the keys {', '.join(names[:-1])} and {names[-1]}"
