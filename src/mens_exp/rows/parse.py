"""Parse one decoded row to a training pair.

A row is accepted in full or refused: a key that would be ignored is an error, because with a
dropped column something other than intended is trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Final

from mens_exp.artifacts.digest import canonical_json
from mens_exp.config.data import RowFormat
from mens_exp.errors import DataError, nearest
from mens_exp.rows.decode import Cell
from mens_exp.rows.preferences import JUDGED, read_judged
from mens_exp.rows.schema import (
    ALIASES,
    KEYS,
    KEYS_OF_OTHER_TOOLS,
    LABEL,
    REJECTED,
    RowProblems,
    TrainingPair,
    accepted_keys,
    format_of,
    json_type,
    shown,
)
from mens_exp.rows.turns import (
    MESSAGES,
    SHAREGPT,
    Conversation,
    decoded,
    read_tools,
    read_turns,
)

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
        judged = (
            read_judged(self._form, values, self._problems) if self._is_judged(values) else None
        )
        conversation = judged.conversation if judged else self._conversation(values)
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
            fields=self._fields(values.get("fields"), judged.fields if judged else {}),
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
            if name in KEYS_OF_OTHER_TOOLS:
                meant, remedy = KEYS_OF_OTHER_TOOLS[name]
                self._meant.update(meant)
            elif owners:
                remedy = f"{name!r} is a key of {' and '.join(owners)} rows; see data.format"
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
        if self._form in JUDGED:
            return nothing  # its problems are known
        if self._form in _TURNS:
            name, keys = _TURNS[self._form]
            tools = read_tools(values.get("tools"), self._problems)
            if self._is_there(values, name):
                turns = decoded(values[name]) if isinstance(values[name], Cell) else values[name]
                return read_turns(turns, keys, self._problems, tools) or nothing
            return nothing
        if self._form is RowFormat.text:
            return Conversation(system=None, exchanges=(("", self._required(values, "text")),))
        prompt = self._required(values, "prompt")
        given = self._optional(values, "input")
        if given is not None and given.strip():
            prompt = f"{prompt}\n\n{given}"
        return Conversation(system=None, exchanges=((prompt, self._required(values, "response")),))

    def _is_judged(self, values: Mapping[str, object]) -> bool:
        """Return whether the row has a judgement and what is judged."""
        if self._form not in JUDGED:
            return False
        needed = ("chosen", REJECTED) if self._form is RowFormat.preference else (LABEL,)
        return sum(self._is_there(values, name) for name in needed) == len(needed)  # reports each

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

    def _fields(
        self, value: object, judged: Mapping[str, str | int]
    ) -> tuple[tuple[str, str | int | float], ...]:
        """Return texts and finite numbers by name, a judgement included; null is no value."""
        if value is None:
            return tuple(judged.items())
        if not isinstance(value, Mapping):
            self._problems.add(
                "'fields' must be an object", f"{json_type(value)} {shown(value)}", "or no fields"
            )
            return ()
        found: list[tuple[str, str | int | float]] = [*judged.items()]
        for name, one in sorted((str(name), one) for name, one in value.items()):
            if name in judged:
                self._problems.add(f"{name!r} stands twice", shown(one), "one of the two")
            label = f"{name!r} of 'fields'"
            if isinstance(one, int | float) and not isinstance(one, bool):
                if math.isfinite(one):
                    found.append((name, one))
                else:
                    self._problems.add(f"{label} is not finite", shown(one))
            elif one is not None and (text := self._problems.text(label, one)) is not None:
                found.append((name, text))
        return tuple(sorted(found))

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
