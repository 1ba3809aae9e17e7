"""Problems of one row, collected while its fields are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mens_exp.errors import DataError, Problems

__all__ = ["RowProblems", "json_type", "shown"]

SHOWN_CHARS: Final = 60


class RowProblems:
    """Collects what is wrong with a row, so that all of it is told at once."""

    def __init__(self, where: str) -> None:
        """Collect for the row at ``where``, as ``file:line``."""
        self.where = where
        self._problems: list[DataError] = []

    def add(
        self, what: str, found: str, expected: str | None = None, remedy: str | None = None
    ) -> None:
        """Keep one problem."""
        self._problems.append(
            DataError(what, where=self.where, found=found, expected=expected, remedy=remedy)
        )

    def raise_if_any(self) -> None:
        """Raise what was kept, if anything was.

        Raises:
            DataError: one problem.
            Problems: several.
        """
        Problems.raise_if(self._problems)

    def text(self, name: str, value: object) -> str | None:
        """Return a text, or keep why the value is none.

        Args:
            name: how messages call the value, quoted where it is a key.
            value: what the row has.
        """
        if not isinstance(value, str):
            self.add(f"{name} must be a string", f"{json_type(value)} {shown(value)}")
            return None
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            # JSON can spell half a surrogate pair; no tokenizer or file can hold it.
            self.add(
                f"{name} holds half a surrogate pair at character {error.start}",
                shown(value[error.start]),
                "text that UTF-8 can encode",
            )
            return None
        return value

    def filled(self, name: str, value: object) -> str:
        """Return a text that is not blank; an empty one stands for what was kept as wrong."""
        text = self.text(name, value)
        if text is not None and not text.strip():
            self.add(f"{name} is empty", shown(text), "some text")
        return text or ""


def shown(value: object) -> str:
    """Write a value for a message, shortened and in characters that can be printed."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def json_type(value: object) -> str:
    """Name the type as JSON does, for readers who wrote JSON, not Python."""
    for kind, name in (
        (type(None), "null"),
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object" if isinstance(value, Mapping) else type(value).__name__
