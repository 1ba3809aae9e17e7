"""Parse the turns of a conversation, including tool calls and their results.

Turns are `messages` as chat models use them, or ShareGPT's. Tool calls, their results and the
available tools have the form that chat templates read
(https://huggingface.co/docs/transformers/chat_extras): arguments are objects, never JSON strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mens_exp.errors import nearest
from mens_exp.rows.schema import TURN_WEIGHT, RowProblems, json_type, shown, strings_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CALL: Final = "function_call"  # LLaMA-Factory's role for a turn that is a call


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnKeys:
    """The spelling of a turn in a format: its two keys, and the role of each speaker."""

    role: str
    content: str
    roles: dict[str, str]


_ROLES: Final = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MESSAGES: Final = TurnKeys(
    role="role",
    content="content",
    roles={**_ROLES, "developer": "system"},  # OpenAI's name for it
)
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
    ``unlearned`` are the indices of exchanges whose answers are context and not learned.
    """

    system: str | None
    exchanges: tuple[tuple[str, str], ...]
    turns: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    unlearned: tuple[int, ...] = ()

    def as_json(self) -> str | None:
        """Return turns and tools as JSON; None if the conversation does not involve tools.

        Keys keep their order, because chat templates write tools and arguments in that order.
        """
        if not self.turns:
            return None
        tools = {"tools": self.tools} if self.tools else {}
        return json.dumps({"messages": self.turns, **tools}, ensure_ascii=False)


def spelling(turns: object, usual: TurnKeys) -> TurnKeys:
    """Return the spelling of turns: the other of the two if the first turn has its role key."""
    other = MESSAGES if usual is SHAREGPT else SHAREGPT
    first = turns[0] if isinstance(turns, list) and turns else None
    is_other = isinstance(first, Mapping) and other.role in first and usual.role not in first
    return other if is_other else usual


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
    unlearned = _unlearned(value, keys, problems)
    with_tools = bool(tools) or any("tool_calls" in turn for turn in rest)
    return Conversation(
        system=system,
        exchanges=tuple(_exchanges(rest)),
        turns=rest if with_tools else [],
        tools=tools or [],
        unlearned=unlearned,
    )


def _unlearned(turns: Sequence[Any], keys: TurnKeys, problems: RowProblems) -> tuple[int, ...]:
    """Return the indices of answers with weight 0, which OpenAI's format excludes from learning."""
    answers = [turn for turn in turns if keys.roles[turn[keys.role]] in {"assistant", _CALL}]
    found = tuple(number for number, turn in enumerate(answers) if turn.get(TURN_WEIGHT) == 0)
    if found and found[-1] == len(answers) - 1:
        problems.add(
            f"the last answer has {TURN_WEIGHT!r} 0",
            shown(answers[-1].get(keys.content)),
            "a row that ends with an answer to learn",
            "end the row before that answer, or drop the row",
        )
    return found


def read_tools(value: object, problems: RowProblems) -> list[dict[str, Any]]:
    """Parse the tools available in a row: a list of functions, or its JSON.

    Args:
        value: the value in the row; None if it has none.
        problems: collects the problems.

    Returns:
        Each as ``{"type": "function", "function": {"name": …}}``.
    """
    tools = decoded(value)
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
                f"tool {number} is not a function",
                shown(tool),
                '{"type": "function", "function": {"name": "…", "parameters": {…}}}',
            )
            continue
        if _is_deep(tool):
            problems.add(f"tool {number} is nested too deeply", shown(tool), _NOT_DEEP)
            continue
        _check_values(tool, f"tool {number}", problems)
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
    if _is_of_another_form(turn, spoken, turn.get(keys.content), name, problems):
        return None
    role = keys.roles.get(spoken) if isinstance(spoken, str) else None
    extra = _EXTRA.get(role or "", ())
    known = (keys.role, keys.content, *extra)
    _check_turn_keys(turn, role, known, name, problems)
    if role is None:
        _add_unknown_role(spoken, keys, name, problems)
    label, said = f"{keys.content!r} of {name}", _text_of(turn.get(keys.content))
    if role == _CALL:
        calls = _calls(decoded(said), label, problems)
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


def _check_weight(value: object, name: str, problems: RowProblems) -> None:
    if value is not None and (isinstance(value, bool) or value not in (0, 1)):
        problems.add(
            f"{name} has another {TURN_WEIGHT!r} than 0 and 1",
            shown(value),
            "0 for an answer that is given and not learned, 1 or none for one that is learned",
        )


def _check_turn_keys(
    turn: Mapping[str, Any],
    role: str | None,
    known: Sequence[str],
    name: str,
    problems: RowProblems,
) -> None:
    for key, value in turn.items():
        if key == TURN_WEIGHT and role == "assistant":
            _check_weight(value, name, problems)
        elif key not in known and value is not None:
            problems.add(
                f"{name} has an unknown key {str(key)!r}",
                shown(value),
                f"only {', '.join(map(repr, known))}: what is left out would not be learned",
            )


def _add_unknown_role(spoken: object, keys: TurnKeys, name: str, problems: RowProblems) -> None:
    close = nearest(spoken, keys.roles) if isinstance(spoken, str) else None
    problems.add(
        f"{name} has no known role",
        f"{keys.role!r}: {shown(spoken)}",
        f"one of {', '.join(keys.roles)}{f'; the nearest is {close}' if close else ''}",
    )


def _is_of_another_form(
    turn: Mapping[str, Any], spoken: object, content: object, name: str, problems: RowProblems
) -> bool:
    """Report a turn of a known but unsupported form as a single problem."""
    if turn.get("function_call") is not None or spoken == "function":
        problems.add(
            f"{name} is in OpenAI's older form of tool calls",
            shown(turn),
            "'tool_calls' of the assistant, and role 'tool' for what the tool answers",
        )
        return True
    kinds = _other_parts(content)
    if kinds:
        problems.add(
            f"{name} holds {', '.join(kinds)}",
            shown(content),
            "text alone: other parts are not trained on",
        )
    return bool(kinds)


def _other_parts(content: object) -> list[str]:
    """Return the types of a content's non-text parts, in the form of OpenAI and others."""
    parts = content if isinstance(content, list) else []
    kinds = [str(part.get("type")) for part in parts if isinstance(part, Mapping)]
    return sorted({kind for kind in kinds if kind.startswith(_MEDIA)})


_MEDIA = ("image", "input_image", "audio", "input_audio", "video", "file")


def _text_of(content: object) -> object:
    """Join the text parts of OpenAI's list form; return any other content unchanged."""
    parts = content if isinstance(content, list) and content else [None]
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        for part in parts
    ]
    if all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    return content


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
        arguments = decoded(given)
        if not _is_name(name) or not isinstance(arguments, Mapping):
            problems.add(
                f"{label} has a call that is none",
                shown(call),
                '{"name": "…", "arguments": {…}}, or that under "function"; arguments may be JSON',
            )
            continue
        if _is_deep(arguments):
            problems.add(f"{label} has a call that is nested too deeply", shown(call), _NOT_DEEP)
            continue
        _check_values([name, arguments], f"a call in {label}", problems)
        _check_call_keys(outer, function, label, problems)
        named = outer.get("id")
        known = {} if named is None else {"id": problems.text(f"'id' of a call in {label}", named)}
        made = {"name": name, "arguments": dict(arguments)}
        found.append({**known, "type": "function", "function": made})
    return found


def _check_call_keys(
    outer: Mapping[str, Any], function: Mapping[str, Any], label: str, problems: RowProblems
) -> None:
    """Report keys of a call that would not be learned."""
    is_bare = outer is function
    known = _OF_CALL | (_OF_FUNCTION if is_bare else {"function"})
    given = [(key, outer[key]) for key in outer if key not in known]
    if not is_bare:
        given += [(key, function[key]) for key in function if key not in _OF_FUNCTION]
    for key, value in given:
        if value is not None:
            problems.add(
                f"a call in {label} has an unknown key {str(key)!r}",
                shown(value),
                "'id', 'type', and 'function' with 'name' and 'arguments'",
            )


_OF_CALL: Final = frozenset({"id", "type", "index"})
_OF_FUNCTION: Final = frozenset({"name", "arguments"})
_MOST_LEVELS: Final = 100  # of nesting in a function; templates and `json` recurse at each level
_NOT_DEEP: Final = f"at most {_MOST_LEVELS} levels"


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            part
            for one in level
            if isinstance(one, Mapping | list)
            for part in (one.values() if isinstance(one, Mapping) else one)
        ]
    return bool(level)


def _check_values(value: object, name: str, problems: RowProblems) -> None:
    """Report strings that UTF-8 cannot encode, and numbers that JSON cannot represent."""
    for text in strings_in(value):
        if problems.text(f"a text of {name}", text) is None:
            return
    if any(isinstance(one, float) and not math.isfinite(one) for one in _scalars(value)):
        problems.add(f"{name} has a number that is not finite", shown(value), "JSON values")


def _scalars(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            yield from _scalars(one)
    else:
        yield value


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def decoded(value: object) -> Any:
    """Decode a JSON string; return any other value, or invalid JSON, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_refuse, object_pairs_hook=_unrepeated)
    except (ValueError, RecursionError):
        return value


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key that occurs twice")  # never shown
    return found


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
