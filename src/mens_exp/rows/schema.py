"""The schema of one training row, the formats it may be written in, and the problems found in it.

A row is a conversation that ends with an answer to learn. Most rows are one prompt and one
response; a row of several turns has the earlier ones as its history, so that whoever asks for the
prompt and the response gets the last exchange.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mens_exp.artifacts import digest
from mens_exp.config.data import RowFormat
from mens_exp.errors import DataError, Problems

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPair:
    """One prompt and the response to learn.

    Attributes:
        prompt: what the user asks; not blank.
        response: what the assistant answers; not blank.
        rating: quality, 1 (worst) to 5 (best); None where nobody rated it.
        category: a free tag that filters may look at.
        language: what the answer is written in, a programming language say; filters look at it.
        system: the system prompt; None leaves the chat template's own in force, while
            an empty string asks for an empty one.
        group: what must not be on two sides of a split, a source file say; an empty
            string where the source names none.
        difficulty: from 1, one line of a beginner's, to 10; None where nobody told.
        history: the exchanges before the prompt, oldest first, each what the user said and what
            the assistant answered.
        conversation: for a row with tools, its messages and tools as JSON, in the form and order
            that chat templates take; None for every other row. The exchanges are then its texts:
            what tools returned is said to the assistant, and calls are JSON in its answers.
        provenance: for a row that a model wrote, the model, the task and how the answer was drawn,
            an object as JSON text; None where nobody told.
        place: where it was read, as ``file:line``; no part of what the row is.
    """

    prompt: str
    response: str
    rating: int | None = None
    category: str | None = None
    language: str | None = None
    system: str | None = None
    group: str = ""
    difficulty: int | None = None
    history: tuple[tuple[str, str], ...] = ()
    conversation: str | None = None
    provenance: str | None = None
    place: str = field(default="", compare=False, repr=False)

    @property
    def id(self) -> str:
        """16 hex digits of the SHA-256 of what is trained on: system, history, prompt, response.

        Labels (rating, category, language, group, difficulty, provenance) do not enter, so that
        relabelling a corpus keeps the identity of its items.
        """
        content: dict[str, Any] = {
            "prompt": self.prompt,
            "response": self.response,
            "system": self.system,
        }
        if self.history:
            content["history"] = [list(exchange) for exchange in self.history]
        if self.conversation is not None:
            content["conversation"] = self.conversation
        return digest.digest(content)[:16]

    @property
    def name(self) -> str:
        """The name of the row in messages: its id, and its place where it has one."""
        return f"row {self.id} ({self.place})" if self.place else f"row {self.id}"

    @property
    def exchanges(self) -> tuple[tuple[str, str], ...]:
        """All exchanges, the last one included."""
        return (*self.history, (self.prompt, self.response))


def to_json(pair: TrainingPair) -> dict[str, Any]:
    """Return the row as a JSON object; a field at its default is left out.

    Args:
        pair: the row.

    Returns:
        An object that `parse_row` reads back as an equal pair: `prompt` and `response`, or
        `messages` where there are several exchanges or tools.
    """
    optional = {
        "rating": pair.rating,
        "category": pair.category,
        "language": pair.language,
        "system": pair.system,
        "group": pair.group or None,
        "difficulty": pair.difficulty,
        "provenance": None if pair.provenance is None else json.loads(pair.provenance),
    }
    labels = {name: value for name, value in optional.items() if value is not None}
    if pair.conversation is not None:
        return {**_in_any_order(pair.conversation), **labels}
    if not pair.history:
        return {"prompt": pair.prompt, "response": pair.response, **labels}
    turns = [
        {"role": role, "content": content}
        for exchange in pair.exchanges
        for role, content in zip(("user", "assistant"), exchange, strict=True)
    ]
    return {"messages": turns, **labels}


def _in_any_order(conversation: str) -> dict[str, Any]:
    """Return messages and tools, what templates write in the order of its keys as JSON texts."""
    held: dict[str, Any] = json.loads(conversation)
    for message in held["messages"]:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    if "tools" in held:
        held["tools"] = json.dumps(held["tools"], ensure_ascii=False)
    return held


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
KEYS_OF_OTHER_TOOLS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
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


def joint_format(first: RowFormat, other: RowFormat) -> RowFormat | None:
    """Return the format of a file that has rows of both, or None where it can have none."""
    if first is other:
        return first
    return RowFormat.alpaca if {first, other} == {RowFormat.pair, RowFormat.alpaca} else None


def accepted_keys(form: RowFormat) -> str:
    """Say which keys a row of a format may have."""
    aliases = {name: alias for alias, name in ALIASES.items()}
    names = [
        f"{name!r} (alias {aliases[name]!r})" if name in aliases else repr(name)
        for name in KEYS[form]
    ]
    return f"only the keys {', '.join(names[:-1])} and {names[-1]}"
