"""The schema of one training row, its possible formats, and the problems found in it.

A row is a conversation that ends with an answer to train on. Most rows have one prompt and one
response. A row with several turns has the earlier ones as its history, so that its prompt and
response are always those of the last exchange. A plain text is a response without a prompt.
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
    from collections.abc import Collection, Iterator, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPair:
    """One prompt and the response to train on.

    Attributes:
        prompt: the user's text; not blank, except that a plain text has the empty string, and so
            may a row whose last answer follows the result of a tool.
        response: the assistant's answer, or the plain text; not blank.
        rating: quality, 1 (worst) to 5 (best); None if not rated.
        category: a free tag that filters can use.
        language: language of the answer, such as a programming language; filters can use it.
        system: the system prompt; None keeps the chat template's default, while an empty string
            requests an empty one.
        group: identifier of rows that must stay on one side of a split, such as a source file; an
            empty string if the source has none.
        difficulty: from 1, a beginner's single line, to 10; None if unknown.
        history: the exchanges before the prompt, oldest first, each the user's text and the
            assistant's answer.
        conversation: for a row with tools, its messages and tools as JSON, in the form and order
            that chat templates expect; None for other rows. The exchanges are then its texts: tool
            results are part of the user's text, and calls are JSON in the answers.
        provenance: for a row written by a model, the model, the task and the sampling of the
            answer, as a JSON object string; None if unknown.
        unlearned: indices of the exchanges whose answers are context and not learned.
        fields: further texts and numbers by name, sorted, which an objective reads, such as a
            rejected answer or a weight.
        place: its location, as ``file:line``; not part of the row's content.
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
    unlearned: tuple[int, ...] = ()
    fields: tuple[tuple[str, str | int | float], ...] = ()
    place: str = field(default="", compare=False, repr=False)

    @property
    def id(self) -> str:
        """16 hex digits of the SHA-256 of the trained content: the texts, and further fields.

        Labels (rating, category, language, group, difficulty, provenance) are excluded, so that
        relabeling a corpus keeps the identity of its items.
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
        if self.unlearned:
            content["unlearned"] = list(self.unlearned)
        if self.fields:
            content["fields"] = dict(self.fields)
        return digest.digest(content)[:16]

    @property
    def name(self) -> str:
        """The name of the row in messages: its id, and its location if known."""
        return f"row {self.id} ({self.place})" if self.place else f"row {self.id}"

    @property
    def is_text(self) -> bool:
        """Whether the row is a plain text, which no chat template renders."""
        return not self.prompt and self.conversation is None

    @property
    def exchanges(self) -> tuple[tuple[str, str], ...]:
        """All exchanges, including the last one."""
        return (*self.history, (self.prompt, self.response))


def further_texts(pair: TrainingPair) -> list[tuple[str, str]]:
    """Return the texts that training reads besides the exchanges, each with what it is.

    They are the system prompt, a rejected answer, and all strings of tools and of the arguments of
    calls, which the exchanges hold as JSON only.
    """
    found = [] if pair.system is None else [("system", pair.system)]
    found += [(name, str(value)) for name, value in pair.fields if name == REJECTED]
    if pair.conversation is not None:
        held = json.loads(pair.conversation)
        found += [("tools", text) for text in strings_in(held.get("tools"))]
        calls = [call for turn in held["messages"] for call in turn.get("tool_calls", ())]
        given = [call["function"]["arguments"] for call in calls]
        found += [("arguments", text) for text in strings_in(given)]
    return found


def strings_in(value: object) -> Iterator[str]:
    """Yield every string in a JSON value, keys included, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield str(name)
            yield from strings_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings_in(one)


def to_json(pair: TrainingPair) -> dict[str, Any]:
    """Return the row as a JSON object; fields at their default are omitted.

    Args:
        pair: the row.

    Returns:
        An object that `parse_row` parses to an equal pair: `prompt` and `response`, `text` for a
        plain text, or `messages` if there are several exchanges or tools.
    """
    optional = {
        "rating": pair.rating,
        "category": pair.category,
        "language": pair.language,
        "system": pair.system,
        "group": pair.group or None,
        "difficulty": pair.difficulty,
        "fields": dict(pair.fields) or None,
        "provenance": None if pair.provenance is None else json.loads(pair.provenance),
    }
    labels = {name: value for name, value in optional.items() if value is not None}
    if pair.conversation is not None:
        held = _in_any_order(pair.conversation)
        return {**held, "messages": _weighed(held["messages"], pair.unlearned), **labels}
    if pair.is_text:
        return {"text": pair.response, **labels}
    if not pair.history:
        return {"prompt": pair.prompt, "response": pair.response, **labels}
    turns = [
        {"role": role, "content": content}
        for exchange in pair.exchanges
        for role, content in zip(("user", "assistant"), exchange, strict=True)
    ]
    return {"messages": _weighed(turns, pair.unlearned), **labels}


def _weighed(turns: list[dict[str, Any]], unlearned: Sequence[int]) -> list[dict[str, Any]]:
    """Return the turns; answers that are not learned have OpenAI's weight 0."""
    places = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    without = {places[number] for number in unlearned}
    return [
        {**turn, TURN_WEIGHT: 0} if place in without else turn for place, turn in enumerate(turns)
    ]


def _in_any_order(conversation: str) -> dict[str, Any]:
    """Return messages and tools, with order-sensitive values as JSON strings."""
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
    """Collects the problems of a row, so that all of them are reported at once."""

    def __init__(self, where: str) -> None:
        """Collect problems for the row at ``where``, as ``file:line``."""
        self.where = where
        self._problems: list[DataError] = []
        self._part = ""

    def within(self, name: str) -> RowProblems:
        """Return the same collection for the part of the row under a key, which it names."""
        part = RowProblems(self.where)
        part._problems, part._part = self._problems, f"in {name!r}, "
        return part

    def add(
        self, what: str, found: str, expected: str | None = None, remedy: str | None = None
    ) -> None:
        """Add one problem."""
        self._problems.append(
            DataError(
                self._part + what, where=self.where, found=found, expected=expected, remedy=remedy
            )
        )

    def raise_if_any(self) -> None:
        """Raise the collected problems, if there are any.

        Raises:
            DataError: one problem.
            Problems: several.
        """
        Problems.raise_if(self._problems)

    def text(self, name: str, value: object) -> str | None:
        """Return a string, or add the problem that the value is not one.

        Args:
            name: name of the value in messages, quoted if it is a key.
            value: the value in the row.
        """
        if not isinstance(value, str):
            self.add(f"{name} must be a string", f"{json_type(value)} {shown(value)}")
            return None
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            # JSON can contain half a surrogate pair, which no tokenizer or file can represent.
            self.add(
                f"{name} holds half a surrogate pair at character {error.start}",
                shown(value[error.start]),
                "text that UTF-8 can encode",
            )
            return None
        return value

    def filled(self, name: str, value: object) -> str:
        """Return a string that is not blank; an empty one means that a problem was added."""
        text = self.text(name, value)
        if text is not None and not text.strip():
            self.add(f"{name} is empty", shown(text), "some text")
        return text or ""


def shown(value: object) -> str:
    """Format a value for a message, shortened and with printable characters only."""
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except RecursionError:  # nested so deeply that json could only just parse it
        return "…"
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def json_type(value: object) -> str:
    """Return the JSON name of a type, for users who wrote JSON rather than Python."""
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


TURN_WEIGHT: Final = "weight"  # OpenAI's: 0 for an answer that is context and not learned
REJECTED: Final = "rejected"  # further field of a preference pair
REWARD: Final = "reward"  # further field of a row with a sampled and graded answer
LABEL: Final = "label"  # further field of a row with a desirable (1) or undesirable (0) answer
PARALLEL_CALLS: Final = "parallel_tool_calls"  # OpenAI's: whether a turn may call several tools
ALIASES: Final = {
    "instruction": "prompt",
    "output": "response",
    "completion": "response",  # TRL's
    "turns": "messages",
    "kto_tag": LABEL,  # LLaMA-Factory's
    "preferred_output": "chosen",  # OpenAI's
    "non_preferred_output": REJECTED,
}
_LABELS: Final = (
    *("rating", "category", "language", "system", "group", "difficulty"),
    *("fields", "provenance"),
)
_PROMPTS: Final = ("prompt", "input", "messages", "conversations")
KEYS: Final[dict[RowFormat, tuple[str, ...]]] = {
    RowFormat.pair: ("prompt", "response", "tools", *_LABELS),
    RowFormat.alpaca: ("prompt", "input", "response", *_LABELS),
    RowFormat.messages: ("messages", "tools", PARALLEL_CALLS, *_LABELS),
    RowFormat.sharegpt: ("conversations", "tools", *_LABELS),
    RowFormat.text: ("text", *(name for name in _LABELS if name != "system")),
    RowFormat.preference: (*_PROMPTS, "chosen", REJECTED, "tools", *_LABELS),
    RowFormat.unpaired: (*_PROMPTS, "completion", "response", LABEL, "tools", *_LABELS),
}
_PAIR_KEYS: Final = frozenset({"prompt", "response", "instruction", "output"})

# Keys of other common formats that a spelling suggestion could not explain: the equivalent name, if
# any, and a note to print before the advice on renaming.
KEYS_OF_OTHER_TOOLS: Final[dict[str, tuple[str | None, str]]] = {
    "chosen": (
        "response",
        "a preference row has 'rejected' too; to train on the preferred answer alone, ",
    ),
    "function_call": (
        None,
        "this is an older form of tool calls: write 'messages' whose turns have 'tool_calls'",
    ),
    "images": (None, "a row is text: images are not trained on, and a text model cannot see them"),
    "question": ("prompt", ""),
    "answer": ("response", ""),
}


def format_of(keys: Collection[object]) -> RowFormat | None:
    """Infer a row's format from its keys.

    Args:
        keys: the row's keys.

    Returns:
        The format; None if no key determines it. A row with instruction and output but no `input`
        is a pair, because Alpaca's form for it is the same.
    """
    told = (
        (RowFormat.preference, REJECTED in keys or "non_preferred_output" in keys),
        (RowFormat.unpaired, "kto_tag" in keys or {"completion", LABEL} <= set(keys)),
        (RowFormat.messages, "messages" in keys or "turns" in keys),
        (RowFormat.sharegpt, "conversations" in keys),
        (RowFormat.alpaca, "input" in keys),
        (RowFormat.pair, bool(_PAIR_KEYS & set(keys))),
        (RowFormat.text, "text" in keys),
    )
    return next((form for form, is_told in told if is_told), None)


def joint_format(first: RowFormat, other: RowFormat) -> RowFormat | None:
    """Return the format of a file with rows of both; None if they are incompatible."""
    if first is other:
        return first
    return RowFormat.alpaca if {first, other} == {RowFormat.pair, RowFormat.alpaca} else None


def accepted_keys(form: RowFormat) -> str:
    """List the keys that a row of a format may have."""
    aliases = {name: alias for alias, name in reversed(ALIASES.items())}
    names = [
        f"{name!r} (alias {aliases[name]!r})" if name in aliases else repr(name)
        for name in KEYS[form]
    ]
    return f"only the keys {', '.join(names[:-1])} and {names[-1]}"
