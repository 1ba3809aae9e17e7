"""Parse one decoded row, including turns and tool calls, to a training pair.

A row is accepted in full or refused: a key that would be ignored is an error, because with a
dropped column something other than intended is trained. Turns are `messages` as chat models use
them, or ShareGPT's. Tool calls, their results and the available tools have the form that chat
templates read (https://huggingface.co/docs/transformers/chat_extras): arguments are objects, never
JSON strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from mens_exp.artifacts.digest import canonical_json
from mens_exp.config.data import RowFormat
from mens_exp.errors import DataError, nearest
from mens_exp.rows.decode import Cell
from mens_exp.rows.schema import (
    ALIASES,
    KEYS,
    KEYS_OF_OTHER_TOOLS,
    RowProblems,
    TrainingPair,
    accepted_keys,
    format_of,
    json_type,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_CALL: Final = "function_call"  # LLaMA-Factory's role for a turn that is a call


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnKeys:
    """The spelling of a turn in a format: its two keys, and the role of each speaker."""

    role: str
    content: str
    roles: dict[str, str]


_ROLES: Final = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MESSAGES: Final = TurnKeys(role="role", content="content", roles=_ROLES)
SHAREGPT: Final = TurnKeys(
    role="from",
    content="value",
    roles={**_ROLES, "human": "user", "gpt": "assistant", _CALL: _CALL, "observation": "tool"},
)
# Keys of a turn in addition to role and content, by role.
_EXTRA: Final = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The system prompt if there is one, the exchanges of texts, and all turns.

    ``turns`` is empty unless the conversation involves tools, and excludes the system prompt.
    """

    system: str | None
    exchanges: tuple[tuple[str, str], ...]
    turns: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> str | None:
        """Return turns and tools as JSON; None if the conversation does not involve tools.

        Keys keep their order, because chat templates write tools and arguments in that order.
        """
        if not self.turns:
            return None
        tools = {"tools": self.tools} if self.tools else {}
        return json.dumps({"messages": self.turns, **tools}, ensure_ascii=False)


def read_turns(
    value: object,
    keys: TurnKeys,
    problems: RowProblems,
    tools: list[dict[str, Any]] | None = None,
) -> Conversation | None:
    """Parse a list of turns.

    Args:
        value: the value in the row.
        keys: the format's spelling of a turn.
        problems: collects the problems.
        tools: the row's available tools, as returned by `read_tools`.

    Returns:
        The conversation; None if there was a problem: an invalid turn, a role out of order, an
        empty text, or no answer at the end.
    """
    if not isinstance(value, list) or not value:
        problems.add(
            "the turns must be a list that is not empty",
            f"{json_type(value)} {shown(value)}",
            f'turns like {{"{keys.role}": "…", "{keys.content}": "…"}}',
        )
        return None
    turns = [_turn(turn, number, keys, problems) for number, turn in enumerate(value, start=1)]
    known = [turn for turn in turns if turn is not None]
    if len(known) < len(turns) or not _in_order(known, problems):
        return None
    system = known[0]["content"] if known[0]["role"] == "system" else None
    rest = known if system is None else known[1:]
    with_tools = bool(tools) or any("tool_calls" in turn for turn in rest)
    return Conversation(
        system=system,
        exchanges=tuple(_exchanges(rest)),
        turns=rest if with_tools else [],
        tools=tools or [],
    )


def read_tools(value: object, problems: RowProblems) -> list[dict[str, Any]]:
    """Parse the tools available in a row: a list of functions, or its JSON.

    Args:
        value: the value in the row; None if it has none.
        problems: collects the problems.

    Returns:
        Each as ``{"type": "function", "function": {"name": …}}``.
    """
    tools = _decoded(value)
    if tools is None or tools == "":
        return []
    if not isinstance(tools, list):
        problems.add("'tools' must be a list", f"{json_type(tools)} {shown(value)}")
        return []
    found = []
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not _is_name(function.get("name")):
            problems.add(
                f"tool {number} is no function",
                shown(tool),
                '{"type": "function", "function": {"name": "…", "parameters": {…}}}',
            )
            continue
        wrapped = function is not tool
        found.append(dict(tool) if wrapped else {"type": "function", "function": dict(tool)})
    return found


def _turn(
    turn: object, number: int, keys: TurnKeys, problems: RowProblems
) -> dict[str, Any] | None:
    """Return one turn in the form that chat templates accept."""
    name = f"turn {number}"
    if not isinstance(turn, Mapping):
        problems.add(f"{name} must be an object", f"{json_type(turn)} {shown(turn)}")
        return None
    spoken = turn.get(keys.role)
    role = keys.roles.get(spoken) if isinstance(spoken, str) else None
    extra = _EXTRA.get(role or "", ())
    for key, value in turn.items():
        if key not in {keys.role, keys.content, *extra} and value is not None:
            problems.add(
                f"{name} has an unknown key {str(key)!r}",
                shown(value),
                f"only {', '.join(map(repr, (keys.role, keys.content, *extra)))}: what is left out "
                "would not be learned",
            )
    if role is None:
        close = nearest(spoken, keys.roles) if isinstance(spoken, str) else None
        problems.add(
            f"{name} has no known role",
            f"{keys.role!r}: {shown(spoken)}",
            f"one of {', '.join(keys.roles)}{f'; the nearest is {close}' if close else ''}",
        )
    label, said = f"{keys.content!r} of {name}", turn.get(keys.content)
    if role == _CALL:
        calls = _calls(_decoded(said), label, problems)
        return {"role": "assistant", "content": "", "tool_calls": calls}
    if role == "assistant" and turn.get("tool_calls"):
        text = "" if said is None else problems.text(label, said) or ""
        calls = _calls(turn["tool_calls"], f"'tool_calls' of {name}", problems)
        return {"role": "assistant", "content": text, "tool_calls": calls}
    if role in {"system", "tool"}:  # these may be empty
        text = problems.text(label, said) or ""
    else:
        text = problems.filled(label, said)
    given = {key: turn[key] for key in extra if key != "tool_calls" and turn.get(key) is not None}
    for key, value in given.items():
        problems.text(f"{key!r} of {name}", value)
    return None if role is None else {"role": role, "content": text, **given}


def _calls(value: object, label: str, problems: RowProblems) -> list[dict[str, Any]]:
    """Return tool calls, each with its arguments as an object."""
    found: list[dict[str, Any]] = []
    for call in value if isinstance(value, list) else [value]:
        outer = call if isinstance(call, Mapping) else {}
        function = outer.get("function", outer)
        name, given = (
            map(function.get, ("name", "arguments"))
            if isinstance(function, Mapping)
            else (None, None)
        )
        arguments = _decoded(given)
        if not _is_name(name) or not isinstance(arguments, Mapping):
            problems.add(
                f"{label} has a call that is none",
                shown(call),
                '{"name": "…", "arguments": {…}}, or that under "function"; arguments may be JSON',
            )
            continue
        known = {"id": outer["id"]} if isinstance(outer.get("id"), str) else {}
        made = {"name": name, "arguments": dict(arguments)}
        found.append({**known, "type": "function", "function": made})
    return found


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _decoded(value: object) -> Any:
    """Decode a JSON string; return any other value, or invalid JSON, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_refuse)
    except ValueError:
        return value


def _refuse(constant: str) -> Any:
    raise ValueError(constant)  # NaN and Infinity are not JSON


def _exchanges(turns: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of all text given to the assistant since its last answer, and its answer."""
    found, told = [], []
    for turn in turns:
        if turn["role"] != "assistant":
            told.append(turn["content"])
            continue
        calls = [
            json.dumps(one["function"], ensure_ascii=False) for one in turn.get("tool_calls", ())
        ]
        answer = "\n".join([turn["content"], *calls] if turn["content"] else calls)
        found.append(("\n".join(told), answer))
        told = []
    return found


_AFTER: Final = {"user": ("assistant",), "tool": ("tool", "assistant"), "assistant": ("user",)}


def _in_order(turns: Sequence[Mapping[str, Any]], problems: RowProblems) -> bool:
    """Return whether user and assistant alternate, tools answer calls, and an answer is last."""
    roles = [turn["role"] for turn in turns]
    first = 1 if roles[0] == "system" else 0
    due: tuple[str, ...] = ("user",)
    ids: set[str] = set()
    for number, turn in enumerate(turns[first:], start=first + 1):
        role, calls = turn["role"], turn.get("tool_calls", ())
        if role not in due:
            before = "first" if number == first + 1 else f"after {roles[number - 2]}"
            problems.add(
                f"turn {number} is out of order",
                f"{role} {before}",
                f"{' or '.join(due)}: user and assistant take turns, tools answer an assistant's "
                "calls, a system turn may only stand before them",
                "join turns of one speaker"
                if number > first + 1 and role == roles[number - 2]
                else None,
            )
            return False
        named = turn.get("tool_call_id")
        if named is not None and named not in ids:
            problems.add(
                f"turn {number} answers no call of the turns before it",
                f"'tool_call_id': {shown(turn['tool_call_id'])}",
                ", ".join(sorted(ids)) or "calls with an 'id'",
            )
            return False
        due = ("tool",) if calls else _AFTER[role]
        ids = {call["id"] for call in calls if "id" in call} if calls else ids
    if roles[-1] != "assistant":
        problems.add(
            "the conversation ends without an answer",
            f"{roles[-1]} last",
            "an assistant's turn last: nothing else is learned",
            "drop the turn, or the row",
        )
        return False
    return True


UNKNOWN_KEY: Final = "unknown key"
_WHOLE: Final = ("fields", "provenance")  # keys that `data.columns` maps to no single column
_LISTED_KEYS: Final = 50  # of a row; a damaged one may have a million
RATINGS: Final = range(1, 6)
DIFFICULTIES: Final = range(1, 11)
_TURNS: Final = {
    RowFormat.messages: ("messages", MESSAGES),
    RowFormat.sharegpt: ("conversations", SHAREGPT),
}


def as_object(obj: object, where: str) -> Mapping[str, object]:
    """Return a decoded row, checked to be an object.

    Raises:
        DataError: it is not an object.
    """
    if not isinstance(obj, Mapping):
        raise DataError(
            "a row must be a JSON object",
            where=where,
            found=f"{json_type(obj)} {shown(obj)}",
            expected='an object like {"prompt": "…", "response": "…"}',
        )
    return {str(key): value for key, value in obj.items()}


def parse_row(obj: object, where: str, form: RowFormat = RowFormat.auto) -> TrainingPair:
    """Parse one decoded JSON row.

    Args:
        obj: the decoded row.
        where: the location for messages, as ``file:line``.
        form: the row's format; `auto` infers it from the keys.

    Returns:
        The pair. An Alpaca row's `input` follows its instruction after a blank line; if it is
        blank, the instruction is used alone. A plain text is the response to an empty prompt.

    Raises:
        DataError: the row is not an object, or has one problem.
        Problems: it has several problems.
    """
    row = as_object(obj, where)
    if form is RowFormat.auto:
        form = format_of(row) or RowFormat.pair
    return _RowReader(row, where, form).pair()


class _RowReader:
    """Reader of the fields of one object that collects their problems."""

    def __init__(self, row: Mapping[str, object], where: str, form: RowFormat) -> None:
        self._row = row
        self._form = form
        self._problems = RowProblems(where)
        # Names that a misspelled key evidently stands for: not reported as missing as well.
        self._meant: set[str] = set()

    def pair(self) -> TrainingPair:
        """Return the pair, or raise all problems of the row."""
        self._check_keys()
        values = self._canonical()
        conversation = self._conversation(values)
        pair = TrainingPair(
            prompt=conversation.exchanges[-1][0],
            response=conversation.exchanges[-1][1],
            rating=self._whole(values, "rating", RATINGS),
            category=self._optional(values, "category"),
            language=self._optional(values, "language"),
            system=self._system(values, conversation),
            group=self._optional(values, "group") or "",
            difficulty=self._whole(values, "difficulty", DIFFICULTIES),
            history=conversation.exchanges[:-1],
            conversation=conversation.as_json(),
            provenance=self._object(values, "provenance"),
            fields=self._fields(values.get("fields")),
            place=self._problems.where,
        )
        self._problems.raise_if_any()
        return pair

    def _check_keys(self) -> None:
        keys = KEYS[self._form]
        aliases = [alias for alias, name in ALIASES.items() if name in keys]
        words = {*keys, *aliases} - {"fields"}  # which is rare, and near to "id" and "file"
        unknown = [name for name in self._row if name not in keys and name not in aliases]
        for name in unknown[:_LISTED_KEYS]:
            value = self._row[name]
            expected, remedy = accepted_keys(self._form), None
            owners = [form.value for form in KEYS if ALIASES.get(name, name) in KEYS[form]]
            if owners:
                remedy = f"{name!r} is a key of {' and '.join(owners)} rows; see data.format"
            elif name in KEYS_OF_OTHER_TOOLS:
                meant, remedy = KEYS_OF_OTHER_TOOLS[name]
                self._meant.update(meant)
            elif near := nearest(name.lower(), sorted(words)):
                expected += f"; the nearest is {near!r}"
                self._meant.add(ALIASES.get(near, near))
            else:
                remedy = f"drop it, or leave it out with data.columns={self._columns()}"
            self._problems.add(f"{UNKNOWN_KEY} {name!r}", shown(value), expected, remedy)
        if len(unknown) > _LISTED_KEYS:
            more = f"{len(unknown) - _LISTED_KEYS} more"
            self._problems.add("unknown keys", more, accepted_keys(self._form))

    def _columns(self) -> str:
        """Return the value of `data.columns` that would map the row's keys to its format."""
        named = {ALIASES.get(key, key): key for key in self._row}
        fields = [name for name in KEYS[self._form] if name in named and name not in _WHOLE]
        columns = [f"{name}:{named[name]}" for name in fields]
        return f"{{{','.join(columns)}}}"

    def _canonical(self) -> dict[str, object]:
        """Return the values by canonical name, with aliases resolved."""
        keys = KEYS[self._form]
        values = {name: self._row[name] for name in keys if name in self._row}
        for alias, name in ALIASES.items():
            if alias not in self._row or name not in keys:
                continue
            value = self._row[alias]
            if name in values and values[name] != value:
                self._problems.add(
                    f"{name!r} and its alias {alias!r} differ",
                    f"{shown(values[name])} and {shown(value)}",
                    "one of the two keys, or the same value under both",
                )
            values.setdefault(name, value)
        return values

    def _conversation(self, values: Mapping[str, object]) -> Conversation:
        nothing = Conversation(system=None, exchanges=(("", ""),))
        if self._form in _TURNS:
            name, keys = _TURNS[self._form]
            tools = read_tools(values.get("tools"), self._problems)
            if self._is_there(values, name):
                turns = _decoded(values[name]) if isinstance(values[name], Cell) else values[name]
                return read_turns(turns, keys, self._problems, tools) or nothing
            return nothing
        if self._form is RowFormat.text:
            return Conversation(system=None, exchanges=(("", self._required(values, "text")),))
        prompt = self._required(values, "prompt")
        given = self._optional(values, "input")
        if given is not None and given.strip():
            prompt = f"{prompt}\n\n{given}"
        return Conversation(system=None, exchanges=((prompt, self._required(values, "response")),))

    def _system(self, values: Mapping[str, object], conversation: Conversation) -> str | None:
        beside = self._optional(values, "system")
        if beside is not None and conversation.system is not None:
            self._problems.add(
                "the system prompt stands twice",
                f"{shown(beside)} and {shown(conversation.system)}",
                "a 'system' key or a system turn",
            )
        return conversation.system if beside is None else beside

    def _is_there(self, values: Mapping[str, object], name: str) -> bool:
        if name in values:
            return True
        if name not in self._meant:
            alias = next((alias for alias, meant in ALIASES.items() if meant == name), None)
            keys = ", ".join(map(repr, islice(self._row, _LISTED_KEYS))) or "no keys"
            expected = repr(name) if alias is None else f"{name!r} (alias {alias!r})"
            self._problems.add(f"the row has no {name!r}", keys, expected)
        return False

    def _required(self, values: Mapping[str, object], name: str) -> str:
        return (
            self._problems.filled(repr(name), values[name]) if self._is_there(values, name) else ""
        )

    def _optional(self, values: Mapping[str, object], name: str) -> str | None:
        value = values.get(name)
        return None if value is None else self._problems.text(repr(name), value)

    def _object(self, values: Mapping[str, object], name: str) -> str | None:
        value = values.get(name)
        if value is None or isinstance(value, Mapping):
            return None if value is None else canonical_json(value).decode("utf-8")
        self._problems.add(
            f"{name!r} must be an object", f"{json_type(value)} {shown(value)}", f"or no {name}"
        )
        return None

    def _fields(self, value: object) -> tuple[tuple[str, str | int | float], ...]:
        """Return texts and finite numbers by name; null is no value."""
        if value is None:
            return ()
        if not isinstance(value, Mapping):
            self._problems.add(
                "'fields' must be an object", f"{json_type(value)} {shown(value)}", "or no fields"
            )
            return ()
        found: list[tuple[str, str | int | float]] = []
        for name, one in sorted((str(name), one) for name, one in value.items()):
            label = f"{name!r} of 'fields'"
            if isinstance(one, int | float) and not isinstance(one, bool):
                if math.isfinite(one):
                    found.append((name, one))
                else:
                    self._problems.add(f"{label} is not finite", shown(one))
            elif one is not None and (text := self._problems.text(label, one)) is not None:
                found.append((name, text))
        return tuple(found)

    def _whole(self, values: Mapping[str, object], name: str, accepts: range) -> int | None:
        value = values.get(name)
        if value is None:
            return None
        if isinstance(value, Cell) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value in accepts:
            return value
        self._problems.add(
            f"{name!r} is out of range" if type(value) is int else f"{name!r} must be an integer",
            f"{json_type(value)} {shown(value)}",
            f"an integer from {accepts[0]} to {accepts[-1]}, or no {name}",
        )
        return None
