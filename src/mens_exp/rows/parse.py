"""Parse one decoded row to a training pair.

A row is accepted in full or refused: a key that would be ignored is an error, because a dropped
column would change what is trained.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from itertools import islice
from typing import Final

from mens_exp.artifacts.digest import canonical_json
from mens_exp.config.data import NEEDED_FIELDS, RowFormat
from mens_exp.errors import DataError, nearest
from mens_exp.rows.decode import Cell
from mens_exp.rows.preferences import JUDGED, read_answered, read_judged
from mens_exp.rows.schema import (
    ALIASES,
    KEYS,
    KEYS_OF_OTHER_TOOLS,
    LABEL,
    PARALLEL_CALLS,
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
    TurnKeys,
    decoded,
    read_tools,
    read_turns,
    spelling,
)

# Keys that `data.columns` does not map to a single column.
_WHOLE: Final = ("fields", "provenance", PARALLEL_CALLS)
_LISTED_KEYS: Final = 50  # of a row; a damaged row may have a million
_SLIP: Final = 0.6  # similarity of a misspelled key; at 0.5, 'frage' matches 'rating'
_LIKE: Final = 0.75  # likewise, of a column to a name in _LIKELY; at 0.6, 'username' matches 'user'
_NO_TEXT: Final = ("null", "true", "false", "nan", "inf")  # values that Hydra does not read as text
# Common names of columns with a prompt, and with a response.
_LIKELY: Final[dict[str, tuple[str, ...]]] = {
    "prompt": ("prompt", "instruction", "query", "user", "human", "problem"),
    "response": ("response", "output", "reply", "assistant", "solution"),
}
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
    known = format_of(row) if form is RowFormat.auto else form
    if known is None:
        raise _of_no_format(row, where)
    return _RowReader(row, where, known).pair()


def _of_no_format(row: Mapping[str, object], where: str) -> DataError:
    likely = likely_columns(row)
    return DataError(
        "the row's keys match no known format",
        where=where,
        found=columns_of(row),
        expected="'prompt' and 'response', 'messages', 'conversations' or 'text'",
        remedy=renaming(likely)
        if likely
        else 'write each row as {"prompt": "…", "response": "…"} or {"text": "…"}',
    )


def columns_of(row: Mapping[str, object]) -> str:
    """List a row's columns for a message; only the first ones if there are very many."""
    if not row:
        return "no columns"
    more = len(row) - _LISTED_KEYS
    first = ", ".join(map(repr, islice(row, _LISTED_KEYS)))
    return f"{first} and {more} more" if more > 0 else first


def renaming(columns: Mapping[str, str]) -> str:
    """Describe how to map columns to fields, by renaming them or with `data.columns`."""
    new = [
        f"{column!r} to {name!r}"
        for name, column in columns.items()
        if ALIASES.get(column, column) != name
    ]
    return f"rename {' and '.join(new)}, or add {as_columns(columns)}"


def as_columns(columns: Mapping[str, str]) -> str:
    """Return the override that names columns, quoted for a shell."""
    named = {name: _value(column) for name, column in columns.items()}
    if len(named) == 1:
        ((name, value),) = named.items()
        return shlex.quote(f"data.columns.{name}={value}")
    return shlex.quote(f"data.columns={{{','.join(map(':'.join, named.items()))}}}")


def _value(column: str) -> str:
    """Format a column's name as a value in Hydra's grammar."""
    if re.fullmatch(r"[A-Za-z_][\w-]*", column, re.ASCII) and column.lower() not in _NO_TEXT:
        return column
    return '"' + re.sub(r'(\\*)("|$)', _escaped, column) + '"'


def _escaped(before_quote: re.Match[str]) -> str:
    r"""Escape a quote; backslashes are doubled only before a quote."""
    slashes, quote = before_quote.groups()
    return 2 * slashes + (f"\\{quote}" if quote else "")


def likely_columns(row: Mapping[str, object]) -> dict[str, str]:
    """Guess from a row's names and values the columns that a model can learn from.

    Args:
        row: a row whose keys do not determine a format.

    Returns:
        The column of each field, enough of them for one format; empty if no column has texts.
    """
    some = dict(islice(row.items(), _LISTED_KEYS))
    for column, value in some.items():
        for name, keys in _TURNS.values():
            if _are_turns(value, keys):
                return {name: column}
    free = [column for column, value in some.items() if isinstance(value, str) and value.strip()]
    found: dict[str, str] = {}
    for name in _LIKELY:
        for column in [one for one in free if _is_likely(one, name)][:1]:
            found[name] = column
            free.remove(column)
    # Prefer texts with a space, since identifiers are texts too but rarely have one.
    free = [column for column in free if " " in str(some[column]).strip()] or free
    missing = [name for name in _LIKELY if name not in found]
    if len(free) < len(missing):
        return {"text": [*found.values(), *free][0]} if found or free else {}
    found |= zip(missing, free, strict=False)
    return {name: found[name] for name in _LIKELY}


def _is_finite(number: float) -> bool:
    """Return whether a number is finite as a float; an integer may be too large for one."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _are_turns(value: object, keys: TurnKeys) -> bool:
    turns = decoded(value) if isinstance(value, Cell) else value
    return (
        isinstance(turns, list)
        and bool(turns)
        and all(isinstance(one, Mapping) and keys.role in one for one in turns)
    )


def _is_likely(column: str, field: str) -> bool:
    name = column.casefold()
    meant, _ = KEYS_OF_OTHER_TOOLS.get(name, (None, ""))
    return field == meant if meant else nearest(name, _LIKELY[field], cutoff=_LIKE) is not None


class _RowReader:
    """Reader of the fields of one object that collects their problems."""

    def __init__(self, row: Mapping[str, object], where: str, form: RowFormat) -> None:
        self._row = row
        self._form = form
        self._problems = RowProblems(where)
        # Names that misspelled keys evidently mean, and that are not reported as missing.
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
            unlearned=conversation.unlearned,
            fields=self._fields(values.get("fields"), judged.fields if judged else {}),
            place=self._problems.where,
        )
        self._problems.raise_if_any()
        return pair

    def _check_keys(self) -> None:
        keys = KEYS[self._form]
        aliases = [alias for alias, name in ALIASES.items() if name in keys]
        words = sorted({*keys, *aliases} - {"fields"})  # rare, and similar to "id" and "file"
        unknown = [name for name in self._row if name not in keys and name not in aliases]
        near = {name: nearest(name.lower(), words, cutoff=_SLIP) for name in unknown[:_LISTED_KEYS]}
        for name, close in near.items():
            expected, remedy = accepted_keys(self._form), None
            owners = [form.value for form in KEYS if ALIASES.get(name, name) in KEYS[form]]
            meant, note = KEYS_OF_OTHER_TOOLS.get(name, (None, ""))
            if meant in keys:
                self._meant.add(meant)
                remedy = note + renaming(self._columns({meant: name}) or {meant: name})
            elif note:
                remedy = note
            elif owners:
                columns = self._columns({})
                remedy = f"{name!r} is a key of {' and '.join(owners)} rows; " + (
                    f"leave it out: add {as_columns(columns)}" if columns else "see data.format"
                )
            elif close:
                expected += f"; the nearest is {close!r}"
                self._meant.add(ALIASES.get(close, close))
            else:
                columns = self._columns({})
                remedy = "drop it" + (
                    f", or leave it out: add {as_columns(columns)}" if columns else ""
                )
            self._problems.add(f"unknown key {name!r}", shown(self._row[name]), expected, remedy)
        if len(unknown) > _LISTED_KEYS:
            more = f"{len(unknown) - _LISTED_KEYS} more"
            self._problems.add("unknown keys", more, accepted_keys(self._form))

    def _columns(self, meant: Mapping[str, str]) -> dict[str, str]:
        """Return the columns of the row's fields, ``meant`` included; empty if some are missing."""
        named = {**{self._name(key): key for key in self._row}, **meant}
        for key, (field, _) in KEYS_OF_OTHER_TOOLS.items():
            if field is not None and key in self._row:
                named.setdefault(field, key)
        fields = [name for name in KEYS[self._form] if name in named and name not in _WHOLE]
        complete = set(NEEDED_FIELDS[self._form]) <= set(fields)
        return {name: named[name] for name in fields} if complete else {}

    def _name(self, key: str) -> str:
        """Return the canonical name of a key in rows of this format."""
        return key if key in KEYS[self._form] else ALIASES.get(key, key)

    def _canonical(self) -> dict[str, object]:
        """Return the values by canonical name, with aliases resolved."""
        keys = KEYS[self._form]
        values = {name: self._row[name] for name in keys if name in self._row}
        for alias, name in ALIASES.items():
            if alias not in self._row or alias in keys or name not in keys:
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
            return nothing  # its problems are already reported
        if self._form in _TURNS:
            name, keys = _TURNS[self._form]
            tools = read_tools(values.get("tools"), self._problems)
            if self._is_there(values, name):
                turns = decoded(values[name]) if isinstance(values[name], Cell) else values[name]
                found = read_turns(turns, spelling(turns, keys), self._problems, tools) or nothing
                self._check_parallel(values.get(PARALLEL_CALLS), found)
                return found
            return nothing
        if self._form is RowFormat.text:
            return Conversation(system=None, exchanges=(("", self._required(values, "text")),))
        if self._form is RowFormat.pair and self._has_turns(values):
            there = [self._is_there(values, name) for name in NEEDED_FIELDS[self._form]]
            return (read_answered(values, self._problems) if all(there) else None) or nothing
        prompt = self._required(values, "prompt")
        given = self._optional(values, "input")
        if given is not None and given.strip():
            prompt = f"{prompt}\n\n{given}"
        return Conversation(system=None, exchanges=((prompt, self._required(values, "response")),))

    def _has_turns(self, values: Mapping[str, object]) -> bool:
        """Return whether a row is in TRL's conversational form, or has tools."""
        parts = [values.get(name) for name in NEEDED_FIELDS[RowFormat.pair]]
        spelled = (_are_turns(part, keys) for part in parts for keys in (MESSAGES, SHAREGPT))
        return values.get("tools") is not None or any(spelled)

    def _check_parallel(self, value: object, conversation: Conversation) -> None:
        """Check the calls against the row's value, which is not passed to chat templates."""
        may = decoded(value.lower()) if isinstance(value, Cell) else value
        if may is not None and not isinstance(may, bool):
            self._problems.add(
                f"{PARALLEL_CALLS!r} must be true or false", f"{json_type(value)} {shown(value)}"
            )
        most = max((len(turn.get("tool_calls", ())) for turn in conversation.turns), default=0)
        if may is False and most > 1:
            self._problems.add(
                f"a turn calls several tools, and {PARALLEL_CALLS!r} is false",
                f"{most} calls",
                "one call in each turn",
                f"drop {PARALLEL_CALLS!r}, or give each call a separate turn and result",
            )

    def _is_judged(self, values: Mapping[str, object]) -> bool:
        """Return whether the row has the keys of a judgement; report missing ones."""
        if self._form not in JUDGED:
            return False
        needed = ("chosen", REJECTED) if self._form is RowFormat.preference else (LABEL,)
        return sum(self._is_there(values, name) for name in needed) == len(needed)  # check all

    def _system(self, values: Mapping[str, object], conversation: Conversation) -> str | None:
        beside = self._optional(values, "system")
        if beside is not None and conversation.system is not None:
            self._problems.add(
                "the system prompt occurs twice",
                f"{shown(beside)} and {shown(conversation.system)}",
                "a 'system' key or a system turn",
            )
        return conversation.system if beside is None else beside

    def _is_there(self, values: Mapping[str, object], name: str) -> bool:
        if name in values:
            return True
        if name not in self._meant:
            alias = next((alias for alias, meant in ALIASES.items() if meant == name), None)
            expected = repr(name) if alias is None else f"{name!r} (alias {alias!r})"
            self._problems.add(f"the row has no {name!r}", columns_of(self._row), expected)
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
        """Return texts and finite numbers by name, including a judgement; nulls are omitted."""
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
                self._problems.add(f"{name!r} occurs twice", shown(one), "one of the two")
            label = f"{name!r} of 'fields'"
            if isinstance(one, int | float) and not isinstance(one, bool):
                if _is_finite(one):
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
