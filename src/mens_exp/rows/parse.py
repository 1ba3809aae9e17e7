"""One decoded row to a training pair.

A row is taken whole or refused: a key that would be ignored is an error, because a dropped
column trains something else than was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mens_exp.artifacts.digest import canonical_json
from mens_exp.artifacts.nearest import nearest
from mens_exp.config.data import RowFormat
from mens_exp.errors import DataError
from mens_exp.rows.formats import ALIASES, FOREIGN_KEYS, KEYS, accepted, format_of
from mens_exp.rows.problems import RowProblems, json_type, shown
from mens_exp.rows.schema import TrainingPair
from mens_exp.rows.turns import MESSAGES, SHAREGPT, Conversation, read_tools, read_turns

__all__ = ["UNKNOWN_KEY", "as_object", "parse_row"]

UNKNOWN_KEY: Final = "unknown key"
RATINGS: Final = range(1, 6)
DIFFICULTIES: Final = range(1, 11)
_TURNS: Final = {
    RowFormat.messages: ("messages", MESSAGES),
    RowFormat.sharegpt: ("conversations", SHAREGPT),
}


def as_object(obj: object, where: str) -> Mapping[str, object]:
    """Return a decoded row as the object that it must be.

    Raises:
        DataError: it is none.
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
    """Read one decoded JSON row.

    Args:
        obj: what the JSON decoder made of the row.
        where: the place to name in messages, as ``file:line``.
        form: how the row is written; `auto` tells from its keys.

    Returns:
        The pair. An Alpaca row's `input` follows its instruction after a blank line; where it is
        blank the instruction stands alone.

    Raises:
        DataError: the row is no object or one thing in it is wrong.
        Problems: several things in it are wrong.
    """
    row = as_object(obj, where)
    if form is RowFormat.auto:
        form = format_of(row) or RowFormat.pair
    return _RowReader(row, where, form).pair()


class _RowReader:
    """Reads the fields of one object and collects what is wrong with them."""

    def __init__(self, row: Mapping[str, object], where: str, form: RowFormat) -> None:
        self._row = row
        self._form = form
        self._problems = RowProblems(where)
        # Names that a misspelt key evidently stands for: not reported as missing too.
        self._meant: set[str] = set()

    def pair(self) -> TrainingPair:
        """Return the pair, or raise everything that is wrong with the row."""
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
            place=self._problems.where,
        )
        self._problems.raise_if_any()
        return pair

    def _check_keys(self) -> None:
        keys = KEYS[self._form]
        aliases = [alias for alias, name in ALIASES.items() if name in keys]
        for name, value in self._row.items():
            if name in keys or name in aliases:
                continue
            expected, remedy = accepted(self._form), None
            owners = [form.value for form in KEYS if ALIASES.get(name, name) in KEYS[form]]
            if owners:
                remedy = f"{name!r} is a key of {' and '.join(owners)} rows; see data.format"
            elif name in FOREIGN_KEYS:
                meant, remedy = FOREIGN_KEYS[name]
                self._meant.update(meant)
            elif near := nearest(name.lower(), [*keys, *aliases]):
                expected += f"; the nearest is {near!r}"
                self._meant.add(ALIASES.get(near, near))
            else:
                remedy = f"drop it, or leave it out with data.columns={self._columns()}"
            self._problems.add(f"{UNKNOWN_KEY} {name!r}", shown(value), expected, remedy)

    def _columns(self) -> str:
        """Return what `data.columns` would be for the keys that the row has of its format."""
        named = {ALIASES.get(key, key): key for key in self._row}
        fields = [name for name in KEYS[self._form] if name in named and name != "provenance"]
        columns = [f"{name}:{named[name]}" for name in fields]
        return f"{{{','.join(columns)}}}"

    def _canonical(self) -> dict[str, object]:
        """Return the values by their own names, aliases resolved."""
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
                return read_turns(values[name], keys, self._problems, tools) or nothing
            return nothing
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
            keys = ", ".join(repr(key) for key in self._row) or "no keys"
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

    def _whole(self, values: Mapping[str, object], name: str, accepts: range) -> int | None:
        value = values.get(name)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and value in accepts:
            return value
        self._problems.add(
            f"{name!r} is out of range" if type(value) is int else f"{name!r} must be an integer",
            f"{json_type(value)} {shown(value)}",
            f"an integer from {accepts[0]} to {accepts[-1]}, or no {name}",
        )
        return None
