"""suite=jsonl: answers checked against the user's rows.

An expected answer is a text, texts, a pattern, a schema, or the argument of a user-defined
function; answers are never executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, get_type_hints

from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.record import check_keys, parse_json, read_bytes
from mens_exp.artifacts.record import check_type as type_problems
from mens_exp.config.suite import JsonlCheck
from mens_exp.errors import DataError, Problems
from mens_exp.evals.answer_checks import Check, check_named
from mens_exp.evals.suite import Item, Judgement, SelfTest, Suite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.suite import JsonlSuite
    from mens_exp.evals.suite import Answer, Runner

_NO_CODE: Final = "suite=jsonl judges texts, not code"
_OF_CODE: Final = (
    *("canonical", "strict", "placeholder_hits", "trivial", "richness", "anti_stub", "outcome"),
)
_MOST_PROBLEMS: Final = 20


class Row(TypedDict, total=False):
    """One line: `prompt`, or `messages` that end with a user turn, and the expected value.

    Attributes:
        id: a unique name; by default the number of the line.
        prompt: the prompt.
        system: the system turn for `prompt`.
        messages: the turns before the answer, instead of both.
        expected: text, texts (contains), a pattern (regex), a schema (json_schema), or any value
            that the function accepts.
        reference: an answer that must be judged right, for the self-test.
        check: the check of this row, instead of `suite.check`.
        group: the part of the suite that the row belongs to.
    """

    id: str
    prompt: str
    system: str
    messages: list[dict[str, str]]
    expected: Any
    reference: str
    check: JsonlCheck
    group: str


def jsonl_suite(config: JsonlSuite) -> Jsonl:
    """Read the rows.

    Raises:
        DataError: the file cannot be read, or a row is invalid (``file:line``).
        Problems: several rows are invalid.
        ConfigError: the function does not exist.
        MissingExtra: the library for schemas is not installed.
    """
    assert config.path is not None, "validation has asked for it"
    path = Path(config.path).expanduser()
    rows = _rows(path)
    checks: dict[str, Check] = {}
    kinds = {name: JsonlCheck(row.get("check", config.check)) for name, row in rows.items()}
    of_kind = {kind: check_named(kind, config.function) for kind in set(kinds.values())}
    for name, kind in kinds.items():
        checks[name] = of_kind[kind]
        problem = checks[name].refuses(rows[name].get("expected"))
        if problem is not None:
            raise DataError(problem, where=f"{path}: row {name}: expected")
    return Jsonl(
        rows=rows,
        checks=checks,
        content={
            "rows": {name: [dict(row), kinds[name].value] for name, row in rows.items()},
            "function": _function_digest(config.function),
            "max_new_tokens": config.max_new_tokens,
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Jsonl(Suite):
    """The suite over the user's rows, keyed by name."""

    rows: dict[str, Row]
    checks: dict[str, Check]
    content: dict[str, Any]
    name: str = "jsonl"

    @classmethod
    def opened(cls, settings: JsonlSuite, *, calls_functions: bool) -> Jsonl:
        """Read the rows."""
        del calls_functions  # checked by the configuration rules
        return jsonl_suite(settings)

    @property
    def items(self) -> list[Item]:
        """An item for each row."""
        return [
            Item(
                id=name,
                messages=_messages(row),
                reference=row.get("reference") or self.checks[name].reference(row.get("expected")),
                group=row.get("group", ""),
            )
            for name, row in self.rows.items()
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of the rows, their checks, the function's file and the maximum answer length."""
        return digest(self.content)

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Judge each answer by its row's check.

        Raises:
            DataError: the user's function fails, or returns no verdict.
        """
        del runner
        return [self._judged(one) for one in answers]

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Judge every existing reference, and an empty answer to every row."""
        del runner
        items = self.items
        known = [item for item in items if item.reference]
        wrong = [item.id for item in known if self._error(item, item.reference) is not None]
        stubs = [item.id for item in items if self._error(item, "") is None]
        return SelfTest(
            references={"whole": len(known)},
            failed={"whole": wrong},
            stubs=len(items),
            stubs_passed=stubs,
        )

    def _judged(self, answer: Answer) -> Judgement:
        error = self._error(answer.item, answer.text)
        check = self.checks[answer.item.id]
        return Judgement(
            compiles=check.parses(answer.text),
            success=error is None,
            semantic=error is None,
            errors=() if error is None else (error,),
            unknown=dict.fromkeys((*_OF_CODE, "compiles"), _NO_CODE),
        )

    def _error(self, item: Item, text: str) -> str | None:
        expected = self.rows[item.id].get("expected")
        return self.checks[item.id].error(item.prompt, expected, text)


def _rows(path: Path) -> dict[str, Row]:
    """Return the rows by name, in the file's order."""
    problems: list[DataError] = []
    rows: dict[str, Row] = {}
    for number, line in enumerate(read_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = parse_json(line, where)
        except DataError as error:
            problems.append(error)
            continue
        found = _row_problems(row, where)
        name = row.get("id", str(number)) if isinstance(row, dict) else ""
        if not found and name in rows:
            found = [DataError("this id already exists", where=f"{where}: id", found=name)]
        problems += found
        if not found:
            rows[name] = row
        if len(problems) >= _MOST_PROBLEMS:
            break
    Problems.raise_if(problems)
    if not rows:
        raise DataError("contains no rows", where=str(path), expected="one JSON object a line")
    return rows


def _row_problems(row: Any, where: str) -> list[DataError]:
    found = check_keys(row, get_type_hints(Row), {"expected"}, where)
    if found:
        return found
    if ("prompt" in row) == ("messages" in row):
        return [
            DataError(
                "needs exactly one prompt",
                where=where,
                found=", ".join(sorted(row)),
                expected="one of prompt and messages",
            )
        ]
    turns = row.get("messages")
    if turns is not None:
        return _turn_problems(turns, where, has_system="system" in row)
    return type_problems(row["prompt"], str, where)


def _turn_problems(turns: list[dict[str, str]], where: str, *, has_system: bool) -> list[DataError]:
    roles = "".join(turn.get("role", "?")[:1] for turn in turns)
    plain = all(turn.keys() == {"role", "content"} for turn in turns)
    known = {turn.get("role") for turn in turns} <= {"system", "user", "assistant"}
    if plain and known and not has_system and re.fullmatch(r"s?(ua)*u", roles):
        return []
    return [
        DataError(
            "the turns are not in order",
            where=f"{where}: messages",
            found=", ".join(str(turn.get("role")) for turn in turns) or "none",
            expected="role and content each; a system turn first or none, then user and "
            "assistant in turns, the user's last; no separate system",
        )
    ]


def _messages(row: Row) -> tuple[dict[str, str], ...]:
    if "messages" in row:
        return tuple(row["messages"])
    system = [{"role": "system", "content": row["system"]}] if "system" in row else []
    return (*system, {"role": "user", "content": row["prompt"]})


def _function_digest(function: str | None) -> str | None:
    if function is None:
        return None
    file, _, name = function.rpartition(":")
    return f"{sha256_file(Path(file).expanduser())}:{name}"
