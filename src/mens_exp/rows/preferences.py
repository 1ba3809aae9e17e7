"""Parse judged answers: a chosen and a rejected one to the same prompt, or one with a label.

The prompt is a text, a list of turns, or the common prefix of two whole conversations, in the forms
of TRL, LLaMA-Factory and OpenAI (https://huggingface.co/docs/trl/dataset_formats,
https://llamafactory.readthedocs.io/en/latest/getting_started/data_preparation.html,
https://developers.openai.com/api/docs/guides/direct-preference-optimization).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from mens_exp.config.data import RowFormat
from mens_exp.rows.decode import Cell
from mens_exp.rows.schema import LABEL, PARALLEL_CALLS, REJECTED, json_type, shown
from mens_exp.rows.turns import MESSAGES, SHAREGPT, TurnKeys, decoded, read_tools, read_turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.rows.schema import RowProblems
    from mens_exp.rows.turns import Conversation

JUDGED: Final = frozenset({RowFormat.preference, RowFormat.unpaired})
_PROMPTS: Final = ("prompt", "messages", "conversations")
_OF_INPUT: Final = ("messages", "tools", PARALLEL_CALLS)
_ANSWERS: Final = ("completion", "response")  # of a row with a label
_LABELS: Final = {"true": 1, "false": 0, "1": 1, "0": 0}  # spellings in CSV files
_ANSWER: Final = "a text, a turn of the assistant, or a conversation that ends with one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The conversation that ends with the chosen, or the only, answer; and the further fields."""

    conversation: Conversation
    fields: dict[str, str | int]


def read_judged(
    form: RowFormat, values: Mapping[str, object], problems: RowProblems
) -> Judged | None:
    """Parse the conversation and the judgement of a row.

    Args:
        form: the row's format.
        values: the row's values by canonical name.
        problems: collects the problems.

    Returns:
        None if there was a problem.
    """
    return _Reader(values, problems).read(form)


def read_answered(values: Mapping[str, object], problems: RowProblems) -> Conversation | None:
    """Parse a prompt and its response, each a text or a list of turns.

    Args:
        values: the row's values by canonical name.
        problems: collects the problems.

    Returns:
        The conversation that ends with the response; None if there was a problem.
    """
    return _Reader(values, problems).answered()


class _Reader:
    """Reader of one judged row."""

    def __init__(self, values: Mapping[str, object], problems: RowProblems) -> None:
        self._values = {name: _opened(value) for name, value in values.items()}
        self._problems = problems
        if isinstance(self._values.get("input"), Mapping):
            self._spread_input()
        lists = [value for value in self._values.values() if isinstance(value, list)]
        turns = [*(turn for one in lists for turn in one), *self._values.values()]
        is_sharegpt = any(isinstance(turn, Mapping) and SHAREGPT.role in turn for turn in turns)
        self._keys: TurnKeys = SHAREGPT if is_sharegpt else MESSAGES
        self._tools = read_tools(self._values.get("tools"), problems)

    def _spread_input(self) -> None:
        """Move the keys of OpenAI's `input` object (prompt and tools) to the top level."""
        given = self._values.pop("input")
        assert isinstance(given, Mapping), "asked before"
        for name, value in given.items():
            if name not in _OF_INPUT:
                self._problems.add(
                    f"unknown key {name!r} in 'input'", shown(value), ", ".join(_OF_INPUT)
                )
            elif self._values.setdefault(name, value) is not value:
                self._problems.add(
                    f"{name!r} occurs twice",
                    "inside and outside 'input'",
                    "one of them",
                )

    def read(self, form: RowFormat) -> Judged | None:
        """Return the row's conversation and its further fields."""
        before = self._before()
        if before is None:
            return None
        return self._pair(before) if form is RowFormat.preference else self._labelled(before)

    def answered(self) -> Conversation | None:
        """Return the prompt with the row's only answer; answers in the prompt are not learned.

        Of several answers in the completion, those of weight 0 are not learned either.
        """
        before = self._before()
        found = None if before is None else self._conversation(before, "response")
        if before is None or found is None:
            return None
        asked = [self._role(turn) for turn in before]
        given = sum(role not in {"system", "user", "tool"} for role in asked)
        return replace(found, unlearned=tuple(sorted({*range(given), *found.unlearned})))

    def _pair(self, before: list[Any]) -> Judged | None:
        chosen = self._conversation(before, "chosen")
        rejected = None if chosen is None else self._conversation(before, REJECTED)
        if chosen is None or rejected is None:
            return None
        answers = chosen.exchanges[-1][1], rejected.exchanges[-1][1]
        if _asked(chosen) != _asked(rejected):
            self._problems.add(
                "'chosen' and 'rejected' do not answer the same prompt",
                f"{shown(chosen.exchanges[-1][0])} and {shown(rejected.exchanges[-1][0])}",
                "two conversations that differ in their last answer alone",
            )
        elif rejected.turns and "tool_calls" in rejected.turns[-1]:
            self._problems.add("'rejected' calls a tool", shown(answers[1]), "a text")
        elif answers[0].strip() == answers[1].strip():
            self._problems.add(
                "'chosen' and 'rejected' are the same answer",
                shown(answers[0]),
                "two answers of which one is better",
                "drop the row",
            )
        return Judged(conversation=chosen, fields={REJECTED: answers[1]})

    def _labelled(self, before: list[Any]) -> Judged | None:
        named = [name for name in _ANSWERS if name in self._values]
        if len(named) > 1:
            self._twice("answer", named)
        found = self._conversation(before, named[0] if named else None)
        label = self._label()
        if found is None or label is None:
            return None
        return Judged(conversation=found, fields={LABEL: label})

    def _label(self) -> int | None:
        value = self._values.get(LABEL)
        if isinstance(value, Cell):
            value = _LABELS.get(value.strip().lower(), value)
        if isinstance(value, int) and value in {0, 1}:
            return int(value)
        self._problems.add(
            f"{LABEL!r} must be true or false",
            f"{json_type(value)} {shown(value)}",
            "true for an answer that is wanted, false for one that is not",
        )
        return None

    def _before(self) -> list[Any] | None:
        """Return the turns of the prompt; an empty list if the answers are whole conversations."""
        named = [name for name in _PROMPTS if self._values.get(name) is not None]
        if len(named) > 1:
            self._twice("prompt", named)
        if not named:
            return []
        value = self._values[named[0]]
        if isinstance(value, list):
            return list(value)
        text = self._problems.filled(repr(named[0]), value)
        given = self._values.get("input")
        further = None if given is None else self._problems.text("'input'", given)
        if further is not None and further.strip():
            text = f"{text}\n\n{further}"
        return [self._turn("user", text)] if text else None

    def _twice(self, what: str, named: Sequence[str]) -> None:
        self._problems.add(
            f"the {what} occurs twice", " and ".join(map(repr, named)), "one of them"
        )

    def _turn(self, role: str, text: str) -> dict[str, str]:
        return {self._keys.role: role, self._keys.content: text}

    def _conversation(self, before: list[Any], name: str | None) -> Conversation | None:
        """Return the conversation that ends with an answer; None means that the prompt has it."""
        if name is None:
            return read_turns(before, self._keys, self._problems, self._tools)
        answer = self._answer(name)
        turns = None if answer is None else self._whole(before, answer, name)
        if turns is None:
            return None
        return read_turns(turns, self._keys, self._problems.within(name), self._tools)

    def _answer(self, name: str) -> list[Any] | None:
        """Return the turns of an answer."""
        value = self._values.get(name)
        if isinstance(value, str):
            text = self._problems.filled(repr(name), value)
            return [self._turn("assistant", text)] if text else None
        turns = [value] if isinstance(value, Mapping) else value
        if not isinstance(turns, list) or not turns:
            found = f"{json_type(value)} {shown(value)}"
            self._problems.add(f"{name!r} is not an answer", found, _ANSWER)
            return None
        return turns

    def _whole(self, before: list[Any], answer: list[Any], name: str) -> list[Any] | None:
        """Return prompt and answer; an answer that begins with the prompt already has both."""
        if self._role(answer[0]) in {"assistant", None}:  # read_turns reports a missing role
            if before:
                return [*before, *answer]
            self._problems.add(
                f"{name!r} has no prompt",
                shown(answer[0]),
                "a 'prompt', 'messages' or 'conversations', or whole conversations",
            )
            return None
        (systems, asked), (own, rest) = self._by_system(before), self._by_system(answer)
        begins, prompt = self._said(rest), self._said(asked)
        if begins[: len(prompt)] == prompt:
            if not own:
                return [*systems, *answer]
            if not systems or self._said(systems) == self._said(own):
                return answer
            self._problems.add(
                f"{name!r} has another system prompt than the prompt has",
                shown(self._said(own)[0]),
                shown(self._said(systems)[0]),
            )
            return None
        self._problems.add(
            f"{name!r} is a conversation that does not begin with the prompt",
            shown(begins[0] if begins else answer[0]),
            shown(prompt[0]),
        )
        return None

    def _role(self, turn: object) -> str | None:
        spoken = turn.get(self._keys.role) if isinstance(turn, Mapping) else None
        return self._keys.roles.get(spoken) if isinstance(spoken, str) else None

    def _by_system(self, turns: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the system prompts, and the other turns."""
        systems = [turn for turn in turns if self._role(turn) == "system"]
        return systems, [turn for turn in turns if self._role(turn) != "system"]

    def _said(self, turns: list[Any]) -> list[object]:
        content = self._keys.content
        return [turn.get(content) if isinstance(turn, Mapping) else turn for turn in turns]


def _asked(found: Conversation) -> tuple[object, ...]:
    """Return everything before the last answer."""
    return found.system, found.exchanges[:-1], found.exchanges[-1][0]


def _opened(value: object) -> object:
    """Decode turns that a CSV file stores as JSON."""
    if not isinstance(value, Cell):
        return value
    found = decoded(value)
    return found if isinstance(found, list | dict) else value
