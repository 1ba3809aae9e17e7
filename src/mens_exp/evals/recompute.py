"""Recompute a scorecard's figures from its lines, and grade its answers statically again.

Hashes show that a file is unchanged, but anyone who edits a file can also update its hash. This
module checks internal consistency instead: figures against the lines that they aggregate, the
fields of a line against each other, and the answer's text against its static analysis. Nothing is
executed, so verdicts that need execution are taken as recorded.
"""

from __future__ import annotations

import itertools
import math
import platform
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mens_exp.artifacts.record import check_type
from mens_exp.artifacts.scorecard import ItemEvent, event_of_today
from mens_exp.config.suite import SUITES
from mens_exp.errors import DataError
from mens_exp.evals.attempts import declaration, graded_digest
from mens_exp.evals.completion_styles import GRADING
from mens_exp.evals.kpis import summarise
from mens_exp.evals.suite import Answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from mens_exp.artifacts.scorecard import Scorecard
    from mens_exp.evals.suite import Item, Judgement, Suite

NOT_EXECUTED: Final = "verdicts of answers that were executed were not executed again"
EARLIER: Final = "answers that were repaired are not in the record, so that only the last was read"
_ROUNDING: Final = 1e-9
_FIELDS: Final = tuple(ItemEvent.__annotations__)
_MOST_PROBLEMS: Final = 20
_MOST_CHARACTERS: Final = 80  # shown of a value in a message
# Field of a line -> field of the judgement from reading the last answer.
_READ: Final = {
    "parses": "compiles",
    "canonical_pass": "canonical",
    "strictness": "strict",
    "placeholder_marker_hits": "placeholder_hits",
    "trivial_placeholder_output": "trivial",
    "richness": "richness",
    "anti_stub_pass": "anti_stub",
}
# Likewise, if the suite executes nothing or nothing was executed.
_JUDGED: Final = {
    "task_success": "success",
    "semantic_task_success": "semantic",
    "outcome": "outcome",
}

Line = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Recomputed:
    """Result of the check.

    Attributes:
        problems: values that do not agree.
        unverifiable: values that could not be computed or read again, each with its reason.
    """

    problems: list[DataError] = field(default_factory=list)
    unverifiable: list[str] = field(default_factory=list)


def graded_as_today(scorecard: Scorecard) -> bool:
    """Return whether answers were graded by the current version of grading."""
    return bool(scorecard.generation.get("grading") == GRADING)


def recomputed(
    scorecard: Scorecard,
    lines: Sequence[Line],
    suite: Suite | str,
    *,
    scorecard_path: Path,
    events_path: Path,
    python: str | None,
) -> Recomputed:
    """Compare a scorecard with its lines, and the lines with their answers.

    Args:
        scorecard: the scorecard.
        lines: lines of its events.jsonl.
        suite: the evaluated suite, or the reason why it is not available.
        scorecard_path: path of the scorecard, for messages.
        events_path: path of events.jsonl, for messages.
        python: Python version of the run, which may accept different syntax than this one.
    """
    found = Recomputed()
    is_today = graded_as_today(scorecard)
    if is_today:  # releases that record the grading version write complete lines
        found.problems += itertools.islice(_malformed(lines, events_path), _MOST_PROBLEMS)
        if found.problems:
            return found
    _conditions(scorecard, lines, scorecard_path, events_path, found)
    if is_today and not found.problems:
        found.problems += _contradictions(scorecard, lines, str(events_path))
    if not is_today:
        version = scorecard.generation.get("grading")
        said = "no version of grading is recorded" if version is None else f"version {version}"
        found.unverifiable.append(
            _unverifiable(scorecard, f"{said}, and this program grades by version {GRADING}")
        )
    elif isinstance(suite, str):
        found.unverifiable.append(_unverifiable(scorecard, suite))
    else:
        if graded_digest(suite) == scorecard.suite_digest:
            found.problems += _misdeclared(scorecard, lines, f"{scorecard_path}: declared")
        _answers(scorecard, lines, suite, str(events_path), found, _reader(python))
    if any((line.get("attempts") or 1) > 1 for line in lines):
        found.unverifiable.append(EARLIER)
    if scorecard.sandbox is not None:
        found.unverifiable.append(NOT_EXECUTED)
    return found


def _unverifiable(scorecard: Scorecard, why: str) -> str:
    """Describe why the answers and the suite's declarations of KPIs were not read again."""
    own = ", ".join(sorted(scorecard.declared))
    taken = f"; unit and direction of {own} are taken as recorded" if own else ""
    return f"answers were not read again: {why}{taken}"


def _misdeclared(scorecard: Scorecard, lines: Sequence[Line], where: str) -> Iterator[DataError]:
    """Yield the suite's own KPIs whose declarations differ from those of its imported class.

    Notes are not compared, because they may have been reworded since.
    """
    own = {name for line in lines for name in line.get("values") or {}}
    for name in sorted(own | scorecard.declared.keys()):
        again = declaration(name) if name in own else {}
        stated = scorecard.declared.get(name, {})
        if any(stated.get(key) != again.get(key) for key in ("unit", "direction")):
            yield DataError(
                "contradicts what the suite's class declares",
                where=f"{where}.{name}",
                found=_declared(stated),
                expected=_declared(again),
                remedy="restore the scorecard, or run it again",
            )


def _declared(about: Mapping[str, str]) -> str:
    if not about:
        return "nothing"
    return f"direction {about.get('direction')}, unit {about.get('unit')}"


def _malformed(lines: Sequence[Line], path: Path) -> Iterator[DataError]:
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            yield from check_type(event_of_today(line, where), ItemEvent, where)
        except DataError as error:  # the line has a newer version
            yield error


def _conditions(
    scorecard: Scorecard,
    lines: Sequence[Line],
    scorecard_path: Path,
    events_path: Path,
    found: Recomputed,
) -> None:
    """Compare every condition's figures with its lines."""
    for name in dict.fromkeys(str(line.get("condition")) for line in lines):
        if name not in scorecard.conditions:
            where, what = str(scorecard_path), f"the scorecard does not have {name}"
            found.problems.append(DataError(what, where=where, expected="every condition's KPIs"))
    for name, stated in scorecard.conditions.items():
        mine = [line for line in lines if str(line.get("condition")) == name]
        missing = list(_counts(scorecard, mine, f"{events_path}: {name}"))
        found.problems += missing
        if not missing:
            _figures(scorecard, mine, stated, f"{scorecard_path}: conditions.{name}", found)


def _samples(scorecard: Scorecard, lines: Sequence[Line]) -> int:
    """Return the number of samples per item; counted if the scorecard (version 1) lacks it."""
    stated = scorecard.generation.get("samples")
    return stated if isinstance(stated, int) else len({line.get("sample", 0) for line in lines})


def _counts(scorecard: Scorecard, lines: Sequence[Line], where: str) -> Iterator[DataError]:
    """Require each sample of every item exactly once, as dropping failures would improve shares."""
    answered = Counter((line["item_id"], line.get("sample", 0)) for line in lines)
    of_item = Counter(str(name) for name, _ in answered)
    samples = _samples(scorecard, lines)
    numbers = {number for _, number in answered}
    is_whole = len(of_item) == scorecard.items and set(of_item.values()) <= {samples}
    if not is_whole or max(answered.values(), default=1) > 1 or numbers - set(range(samples)):
        once = "once" if samples == 1 else f"{samples} times"
        yield DataError(
            "an item's answers are missing or duplicated",
            where=where,
            found=f"{len(lines)} lines of {len(of_item)} items",
            expected=f"{scorecard.items} items, each answered {once}",
        )


def _figures(
    scorecard: Scorecard,
    lines: Sequence[Line],
    stated: Mapping[str, float | int | None],
    where: str,
    found: Recomputed,
) -> None:
    """Recompute a condition's figures; lines with the current grading must have every field."""
    is_strict = graded_as_today(scorecard)
    usual = {"group": "", "sample": 0, "finished": False, "unknown": {}}
    whole: Any = [{**dict.fromkeys(_FIELDS), **usual, **line} for line in lines]
    retries = scorecard.generation.get("max_retries")
    computed, _ = summarise(
        whole,
        items=max(1, scorecard.items),
        samples=max(1, _samples(scorecard, lines)),
        max_retries=retries if isinstance(retries, int) else 0,
    )
    lacking, spec = [], SUITES.known(scorecard.suite)
    for name, value in stated.items():
        again = computed.get(name)
        is_other = "/" in name and (spec is None or spec.figures)
        if value is not None and again is None and (is_other or not is_strict):
            lacking.append(name)
        elif not _alike(value, again):
            found.problems.append(
                DataError(
                    "does not follow from its items",
                    where=f"{where}.{name}",
                    found=value,
                    expected=f"{again}, from {scorecard.items} items",
                    remedy="restore the scorecard, or run it again",
                )
            )
    if lacking:
        found.unverifiable.append(
            f"no line has what {', '.join(sorted(lacking))} sums up, so that it cannot be "
            "computed again"
        )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, bool | int | float) and isinstance(other, bool | int | float):
        return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return bool(one == other)


def _contradictions(scorecard: Scorecard, lines: Sequence[Line], where: str) -> Iterator[DataError]:
    """Yield the fields that the rest of their line contradicts, each once per condition."""
    retries = scorecard.generation.get("max_retries")
    seen: dict[tuple[str, str], list[tuple[Line, Any]]] = {}
    for line in lines:
        for name, expected in _implied(line, retries if isinstance(retries, int) else 0):
            if not _alike(line[name], expected):
                seen.setdefault((line["condition"], name), []).append((line, expected))
    yield from _described(seen, where, "contradicts the rest of its line", "the rest of the line")


def _implied(line: Line, max_retries: int) -> Iterator[tuple[str, Any]]:
    """Yield the values of a line's fields that follow from its other fields, as in `attempts`.

    Attempts end with the first valid one, so the verdict is that of the last.
    """
    attempts, success, parses = line["attempts"], line["task_success"], line["parses"]
    is_valid = bool(parses if success is None else success)
    yield "attempts", min(max(1, attempts), max_retries + 1)
    yield "repair_depth", attempts - 1 if is_valid else None
    if not is_valid:
        yield "time_to_first_valid_ms", None
    if attempts == 1:
        yield "task_success", line["pass_1"]
        yield "compile_pass_1", parses
        yield "compile_pass_n", parses
        yield "pass_1", success
        yield "repair_stalled", False
    elif line["pass_1"] is not None:
        yield "pass_1", False  # otherwise there would have been no repair
    elif line["compile_pass_1"] is not None:
        yield "compile_pass_1", False
    if parses and line["compile_pass_n"] is not None:
        yield "compile_pass_n", True
    if line["outcome"] is not None:
        yield "outcome", "passed" if success else _other_than_passed(line["outcome"])
    stub = (line["trivial_placeholder_output"], line["placeholder_marker_hits"])
    if line["semantic_task_success"] and (not success or line["anti_stub_pass"] is False):
        yield "semantic_task_success", False
    if None not in (*stub, line["anti_stub_pass"]):
        yield "anti_stub_pass", not stub[0] and stub[1] == 0


def _other_than_passed(outcome: str) -> str:
    return "any but passed" if outcome == "passed" else outcome


def _answers(
    scorecard: Scorecard,
    lines: Sequence[Line],
    suite: Suite,
    where: str,
    found: Recomputed,
    reader: str,
) -> None:
    """Let the suite read every answer again, without executing anything."""
    found_digest = graded_digest(suite)
    if found_digest != scorecard.suite_digest:
        spec = SUITES.known(suite.name)
        if spec is not None and spec.from_rows:
            found.problems.append(
                DataError(
                    "the items do not match the suite's digest",
                    where=where,
                    found=found_digest,
                    expected=scorecard.suite_digest,
                    remedy="restore the lines, or run it again",
                )
            )
        else:
            what = f"suite={suite.name}, read from where the run had it, is another one now"
            found.unverifiable.append(_unverifiable(scorecard, what))
        return
    items = {item.id: item for item in suite.items}
    seen: dict[tuple[str, str], list[tuple[Line, Any]]] = {}
    for line in lines:
        for name, expected in _asked(line, items.get(line["item_id"])):
            seen.setdefault((line["condition"], name), []).append((line, expected))
    if seen:
        found.problems += _described(seen, where, "is not what the suite asks", "the suite")
        return
    answers = [Answer(item=items[line["item_id"]], text=line["completion"]) for line in lines]
    is_executed = suite.needs_sandbox and scorecard.sandbox is not None
    for line, judgement in zip(lines, suite.judge(answers, None), strict=True):
        for name, expected in _judged(judgement, is_executed=is_executed, line=line):
            if not _alike(line.get(name), expected):
                seen.setdefault((line["condition"], name), []).append((line, expected))
    found.problems += _described(seen, where, "is not what its answer says", reader)


def _reader(python: str | None) -> str:
    """Name the reader of answers in messages, since Python versions accept different syntax."""
    ours = platform.python_version()
    if python is None or python.split(".")[:2] == ours.split(".")[:2]:
        return "the answer"
    return f"the answer as Python {ours} reads it; the run had Python {python}: compare with that"


def _asked(line: Line, item: Item | None) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a line that differ from the suite's item, with the expected values."""
    if item is None:
        yield "item_id", "an item of the suite"
        return
    for name, expected in (("prompt", item.prompt), ("reference", item.reference)):
        if line[name] != expected:
            yield name, expected


def _judged(judgement: Judgement, *, is_executed: bool, line: Line) -> Iterator[tuple[str, Any]]:
    """Yield the values of a line's fields that follow from reading the answer."""
    for name, source in _READ.items():
        value = getattr(judgement, source)
        if value is not None or not is_executed:
            yield name, value
    if not is_executed:
        yield from ((name, getattr(judgement, source)) for name, source in _JUDGED.items())
        if judgement.values or "values" in line:
            yield "values", dict(judgement.values)
    elif judgement.errors and line["task_success"]:
        yield "task_success", False  # an invalid program is never executed


def _described(
    seen: Mapping[tuple[str, str], Sequence[tuple[Line, Any]]], where: str, what: str, by: str
) -> Iterator[DataError]:
    """Yield one problem for each field of a condition, showing the first affected line."""
    for (condition, name), some in seen.items():
        line, expected = some[0]
        more = f", and {len(some) - 1} more" if len(some) > 1 else ""
        yield DataError(
            what,
            where=f"{where}: {name}",
            found=f"{_short(line.get(name))} for item {line['item_id']} of {condition}{more}",
            expected=f"{_short(expected)}, by {by}",
            remedy="restore the lines, or run it again",
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
