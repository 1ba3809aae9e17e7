"""A list of turns to exchanges: `messages` as chat models have them, ShareGPT's conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.nearest import nearest
from mens_exp.rows.problems import json_type, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.rows.problems import RowProblems

__all__ = ["MESSAGES", "SHAREGPT", "Conversation", "TurnKeys", "read_turns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnKeys:
    """How a format spells a turn: its two keys, and which speaker is which role."""

    role: str
    content: str
    roles: dict[str, str]


_ROLES: Final = {"system": "system", "user": "user", "assistant": "assistant"}
MESSAGES: Final = TurnKeys(role="role", content="content", roles=_ROLES)
SHAREGPT: Final = TurnKeys(
    role="from", content="value", roles={**_ROLES, "human": "user", "gpt": "assistant"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What a list of turns holds: a system prompt where it begins with one, and exchanges."""

    system: str | None
    exchanges: tuple[tuple[str, str], ...]


def read_turns(value: object, keys: TurnKeys, problems: RowProblems) -> Conversation | None:
    """Read a list of turns.

    Args:
        value: what the row has.
        keys: how the format spells a turn.
        problems: where to keep what is wrong.

    Returns:
        The conversation, or None where something was wrong: a turn that is no turn, a role out
        of order, an empty text, or an end without an answer.
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
    if len(known) < len(turns) or not _in_order([role for role, _ in known], problems):
        return None
    system = known[0][1] if known[0][0] == "system" else None
    texts = [text for role, text in known if role != "system"]
    return Conversation(system=system, exchanges=tuple(zip(texts[::2], texts[1::2], strict=True)))


def _turn(
    turn: object, number: int, keys: TurnKeys, problems: RowProblems
) -> tuple[str, str] | None:
    """Return role and text of one turn."""
    name = f"turn {number}"
    if not isinstance(turn, Mapping):
        problems.add(f"{name} must be an object", f"{json_type(turn)} {shown(turn)}")
        return None
    for key, value in turn.items():
        if key not in {keys.role, keys.content} and value is not None:
            problems.add(
                f"{name} has an unknown key {str(key)!r}",
                shown(value),
                f"only {keys.role!r} and {keys.content!r}: what is left out would not be learned",
            )
    spoken = turn.get(keys.role)
    role = keys.roles.get(spoken) if isinstance(spoken, str) else None
    if role is None:
        close = nearest(spoken, keys.roles) if isinstance(spoken, str) else None
        problems.add(
            f"{name} has no known role",
            f"{keys.role!r}: {shown(spoken)}",
            f"one of {', '.join(keys.roles)}{f'; the nearest is {close}' if close else ''}",
        )
    label = f"{keys.content!r} of {name}"
    if role == "system":  # an empty one asks for an empty one
        text = problems.text(label, turn.get(keys.content)) or ""
    else:
        text = problems.filled(label, turn.get(keys.content))
    return None if role is None else (role, text)


def _in_order(roles: Sequence[str], problems: RowProblems) -> bool:
    """Tell whether user and assistant take turns, a system prompt before them, an answer last."""
    first = 1 if roles[0] == "system" else 0
    for number, role in enumerate(roles[first:], start=first + 1):
        due = "user" if (number - first) % 2 else "assistant"
        if role == due:
            continue
        before = "first" if number == first + 1 else f"after {roles[number - 2]}"
        problems.add(
            f"turn {number} is out of order",
            f"{role} {before}",
            f"{due}: user and assistant take turns, a system turn may only stand before them",
            "join turns of one speaker"
            if number > first + 1 and role == roles[number - 2]
            else None,
        )
        return False
    if roles[-1] != "assistant":
        problems.add(
            "the conversation ends without an answer",
            f"{roles[-1]} last",
            "an assistant's turn last: nothing else is learned",
            "drop the turn, or the row",
        )
        return False
    return True
