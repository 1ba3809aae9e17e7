"""The schema of one training row.

A row is a prompt and the response to learn, with the aliases and optional fields
that the mens trainer's rows have. A row is taken whole or refused: a key that would
be ignored is an error, because a dropped column trains something else than was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mens_exp.artifacts import digest
from mens_exp.artifacts.nearest import nearest
from mens_exp.errors import DataError, Problems

__all__ = ["TrainingPair", "parse_row", "to_json"]

ALIASES: Final = {"instruction": "prompt", "output": "response"}
KEYS: Final = ("prompt", "response", "rating", "category", "system", "group")
ACCEPTED: Final = (
    "only the keys 'prompt' (alias 'instruction'), 'response' (alias 'output'), "
    "'rating', 'category', 'system' and 'group'"
)
RATINGS: Final = range(1, 6)
SHOWN_CHARS: Final = 60

_CHAT: Final = (
    ("prompt", "response"),
    "write the user's turn as 'prompt' and the assistant's as 'response'",
)
# Keys of other common formats, which no spelling suggestion could explain: the names
# that they stand for, and what to do.
FOREIGN_KEYS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "text": (
        ("prompt", "response"),
        "split the text into 'prompt' and 'response': plain text says not what to supervise",
    ),
    "input": ((), "append the input to 'prompt': dropped, the row would mean something else"),
    "completion": (("response",), "rename it to 'response'"),
    "question": (("prompt",), "rename it to 'prompt'"),
    "answer": (("response",), "rename it to 'response'"),
    "messages": _CHAT,
    "turns": _CHAT,
    "conversations": _CHAT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPair:
    """One prompt and the response to learn.

    Attributes:
        prompt: what the user asks; not blank.
        response: what the assistant answers; not blank.
        rating: quality, 1 (worst) to 5 (best); None where nobody rated it.
        category: a free tag that filters may look at.
        system: the system prompt; None leaves the chat template's own in force, while
            an empty string asks for an empty one.
        group: what must not be on two sides of a split, a source file say; an empty
            string where the source names none.
    """

    prompt: str
    response: str
    rating: int | None = None
    category: str | None = None
    system: str | None = None
    group: str = ""

    @property
    def id(self) -> str:
        """16 hex digits of the SHA-256 of what is trained on: system, prompt, response.

        Labels (rating, category, group) do not enter, so that relabelling a corpus
        keeps the identity of its items.
        """
        content = {"prompt": self.prompt, "response": self.response, "system": self.system}
        return digest.digest(content)[:16]


def to_json(pair: TrainingPair) -> dict[str, str | int]:
    """Return the row as a JSON object; a field at its default is left out.

    Args:
        pair: the row.

    Returns:
        An object that `parse_row` reads back as an equal pair.
    """
    row: dict[str, str | int] = {"prompt": pair.prompt, "response": pair.response}
    optional = {
        "rating": pair.rating,
        "category": pair.category,
        "system": pair.system,
        "group": pair.group or None,
    }
    return row | {name: value for name, value in optional.items() if value is not None}


def parse_row(obj: object, where: str) -> TrainingPair:
    """Read one decoded JSON row.

    Args:
        obj: what the JSON decoder made of the row.
        where: the place to name in messages, as ``file:line``.

    Returns:
        The pair.

    Raises:
        DataError: the row is no object or one thing in it is wrong.
        Problems: several things in it are wrong.
    """
    if not isinstance(obj, Mapping):
        raise DataError(
            "a row must be a JSON object",
            where=where,
            found=f"{_json_type(obj)} {_shown(obj)}",
            expected='an object like {"prompt": "…", "response": "…"}',
        )
    return _RowReader(obj, where).pair()


class _RowReader:
    """Reads the fields of one object and collects what is wrong with them."""

    def __init__(self, row: Mapping[object, object], where: str) -> None:
        self._row = row
        self._where = where
        self._problems: list[DataError] = []
        # Names that a misspelt key evidently stands for: not reported as missing too.
        self._meant: set[str] = set()

    def pair(self) -> TrainingPair:
        """Return the pair, or raise everything that is wrong with the row."""
        self._check_keys()
        values = self._canonical()
        pair = TrainingPair(
            prompt=self._required(values, "prompt"),
            response=self._required(values, "response"),
            rating=self._rating(values.get("rating")),
            category=self._optional(values, "category"),
            system=self._optional(values, "system"),
            group=self._optional(values, "group") or "",
        )
        Problems.raise_if(self._problems)
        return pair

    def _problem(
        self, what: str, found: str, expected: str | None = None, remedy: str | None = None
    ) -> None:
        self._problems.append(
            DataError(what, where=self._where, found=found, expected=expected, remedy=remedy)
        )

    def _check_keys(self) -> None:
        for key, value in self._row.items():
            name = str(key)
            if name in KEYS or name in ALIASES:
                continue
            expected, remedy = ACCEPTED, None
            if name in FOREIGN_KEYS:
                meant, remedy = FOREIGN_KEYS[name]
                self._meant.update(meant)
            elif near := nearest(name.lower(), [*KEYS, *ALIASES]):
                expected += f"; the nearest is {near!r}"
                self._meant.add(ALIASES.get(near, near))
            self._problem(f"unknown key {name!r}", _shown(value), expected, remedy)

    def _canonical(self) -> dict[str, object]:
        """Return the values by their own names, aliases resolved."""
        values = {name: self._row[name] for name in KEYS if name in self._row}
        for alias, name in ALIASES.items():
            if alias not in self._row:
                continue
            value = self._row[alias]
            if name in values and values[name] != value:
                self._problem(
                    f"{name!r} and its alias {alias!r} differ",
                    f"{_shown(values[name])} and {_shown(value)}",
                    "one of the two keys, or the same value under both",
                )
            values.setdefault(name, value)
        return values

    def _required(self, values: Mapping[str, object], name: str) -> str:
        if name in values:
            text = self._text(name, values[name])
            if text is not None and not text.strip():
                self._problem(f"{name!r} is empty", _shown(text), "some text")
            return text or ""
        if name not in self._meant:
            alias = next(alias for alias, meant in ALIASES.items() if meant == name)
            keys = ", ".join(repr(str(key)) for key in self._row) or "no keys"
            self._problem(f"the row has no {name!r}", keys, f"{name!r} (alias {alias!r})")
        return ""

    def _optional(self, values: Mapping[str, object], name: str) -> str | None:
        value = values.get(name)
        return None if value is None else self._text(name, value)

    def _text(self, name: str, value: object) -> str | None:
        if not isinstance(value, str):
            self._problem(f"{name!r} must be a string", f"{_json_type(value)} {_shown(value)}")
            return None
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            # JSON can spell half a surrogate pair; no tokenizer or file can hold it.
            self._problem(
                f"{name!r} holds half a surrogate pair at character {error.start}",
                _shown(value[error.start]),
                "text that UTF-8 can encode",
            )
            return None
        return value

    def _rating(self, value: object) -> int | None:
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and value in RATINGS:
            return value
        self._problem(
            "'rating' is out of range" if type(value) is int else "'rating' must be an integer",
            f"{_json_type(value)} {_shown(value)}",
            f"an integer from {RATINGS[0]} to {RATINGS[-1]}, or no rating",
        )
        return None


def _shown(value: object) -> str:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def _json_type(value: object) -> str:
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
