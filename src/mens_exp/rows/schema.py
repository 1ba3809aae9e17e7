"""The schema of one training row: a conversation that ends with an answer to learn.

Most rows are one prompt and one response; a row of several turns has the earlier ones as its
history, so that whoever asks for the prompt and the response gets the last exchange.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from mens_exp.artifacts import digest

__all__ = ["TrainingPair", "to_json"]


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
