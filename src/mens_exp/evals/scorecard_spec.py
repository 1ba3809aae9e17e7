"""Suites that execute nothing: suite=scorecard_spec and suite=heldout_syntax.

scorecard_spec (REFERENCE section 10) is a JSON file of tasks, and of conditions with their own
models: mode ``http_generate`` queries an OpenAI-compatible server, ``fixture_file`` reads existing
answers. A task is solved by code that parses and contains every expected text; semantically, if it
also contains the semantic texts and is not a stub. heldout_syntax checks whether the last complete
block with a function, in the answer to a held-out prompt, parses as Python.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.record import check_type, parse_json, read_bytes
from mens_exp.errors import DataError, Problems
from mens_exp.evals.answer_quality import judge_by_reading, parsed
from mens_exp.evals.completion_styles import code_and_place
from mens_exp.evals.engines import Completion, Generation, ServerEngine
from mens_exp.evals.suite import Item, Suite
from mens_exp.rows.answers import messages_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mens_exp.config.evaluation import EvalConfig
    from mens_exp.config.suite import HeldoutSyntaxSuite, ScorecardSpecSuite
    from mens_exp.evals.engines import Engine, Request
    from mens_exp.evals.suite import Answer, Judgement, Runner, SelfTest
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.load import Tokenizer

SCHEMA_VERSION: Final = 1
MOST_RETRIES: Final = 8  # REFERENCE section 10


class Mode(StrEnum):
    """The source of a condition's answers."""

    HTTP_GENERATE = "http_generate"
    FIXTURE_FILE = "fixture_file"


class SpecBackend(StrEnum):
    """The backend that trained a condition's model."""

    BASE = "base"
    QLORA = "qlora"
    BURN = "burn"
    PROXY = "proxy"
    LORA = "lora"
    OTHER = "other"


class Language(StrEnum):
    """The language of a task's answer."""

    PYTHON = "python"
    TEXT = "text"


class _NeededOfCondition(TypedDict):
    id: str
    label: str
    mode: Mode
    backend: SpecBackend
    model_id: str


class SpecCondition(_NeededOfCondition, total=False):
    """One model; `base_url` is the server's, `fixture` a file next to the specification."""

    adapter_revision: str | None
    base_url: str
    fixture: str


class _NeededOfTask(TypedDict):
    id: str
    prompt: str
    expected_contains: list[str]


class SpecTask(_NeededOfTask, total=False):
    """One task; its reference, if any, is used by the self-test."""

    semantic_expected_contains: list[str]
    language: Language
    reference: str


class Spec(TypedDict):
    """The whole file."""

    schema_version: int
    prompt_pack_version: str
    max_retries: int
    conditions: list[SpecCondition]
    tasks: list[SpecTask]


def read_spec(path: Path) -> Spec:
    """Read a specification strictly.

    Raises:
        DataError: it cannot be read, or violates one rule.
        Problems: it violates several.
    """
    spec: Spec = parse_json(read_bytes(path), str(path))
    Problems.raise_if(check_type(spec, Spec, str(path)))
    Problems.raise_if(_problems(spec, str(path)))
    return spec


def _problems(spec: Spec, where: str) -> list[DataError]:
    found = []
    if spec["schema_version"] != SCHEMA_VERSION:
        version = spec["schema_version"]
        found.append(_wrong(f"{where}: schema_version", version, str(SCHEMA_VERSION)))
    if not 0 <= spec["max_retries"] <= MOST_RETRIES:
        retries = spec["max_retries"]
        found.append(_wrong(f"{where}: max_retries", retries, f"0 to {MOST_RETRIES}"))
    for part in ("conditions", "tasks"):
        names = [one["id"] for one in spec[part]]
        if not names or "" in names or len(set(names)) < len(names):
            found.append(_wrong(f"{where}: {part}", names, "ids, each once, none of them empty"))
    prompts = [task["prompt"] for task in spec["tasks"]]
    if len(set(prompts)) < len(prompts):
        found.append(_wrong(f"{where}: tasks", "a prompt twice", "prompts, each once"))
    found += [one for i, c in enumerate(spec["conditions"]) for one in _of_condition(c, i, where)]
    for number, task in enumerate(spec["tasks"]):
        texts = [*task["expected_contains"], *task.get("semantic_expected_contains", [])]
        if not task["prompt"].strip() or not texts or not all(texts):
            place = f"{where}: tasks[{number}]"
            found.append(_wrong(place, task["id"], "a prompt, and texts that are not empty"))
    return found


def _of_condition(condition: SpecCondition, number: int, where: str) -> list[DataError]:
    """Check that a condition has exactly the fields of its mode."""
    needed, other = "base_url", "fixture"
    if condition["mode"] == Mode.FIXTURE_FILE:
        needed, other = other, needed
    if needed in condition and other not in condition:
        return []
    told = ", ".join(sorted(condition.keys() & {needed, other})) or "neither"
    expected = f"{needed} alone with mode {condition['mode']}"
    return [_wrong(f"{where}: conditions[{number}]", told, expected)]


def _wrong(where: str, found: object, expected: str) -> DataError:
    return DataError("wrong value", where=where, found=found, expected=expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecSuite(Suite):
    """The tasks of a specification."""

    spec: Spec
    directory: Path | None = None  # the directory that paths of fixtures are relative to
    name: str = "scorecard_spec"

    @classmethod
    def opened(cls, settings: ScorecardSpecSuite, *, calls_functions: bool) -> SpecSuite:
        """Read the specification."""
        del calls_functions  # the suite calls none
        assert settings.path is not None, "validation has asked for it"
        path = Path(settings.path).expanduser()
        return cls(spec=read_spec(path), directory=path.parent)

    @property
    def items(self) -> list[Item]:
        """An item for each task."""
        return [
            Item(
                id=task["id"],
                messages=({"role": "user", "content": task["prompt"]},),
                reference=task.get("reference", ""),
            )
            for task in self.spec["tasks"]
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of the tasks, the retries and the version of the prompts, but not the models."""
        return digest({name: value for name, value in self.spec.items() if name != "conditions"})

    @property
    def retries(self) -> int:
        """Maximum number of repairs of an answer, from the specification."""
        return self.spec["max_retries"]

    @property
    def conditions(self) -> list[dict[str, Any]]:
        """The conditions of the specification."""
        return [dict(condition) for condition in self.spec["conditions"]]

    def engines(self, settings: ScorecardSpecSuite, sampling: EvalConfig) -> dict[str, Engine]:
        """Return a server or the existing answers for each condition.

        Raises:
            DataError: a fixture is invalid.
        """
        return {one["id"]: self._engine(one, settings, sampling) for one in self.spec["conditions"]}

    def _engine(
        self, condition: SpecCondition, settings: ScorecardSpecSuite, sampling: EvalConfig
    ) -> Engine:
        if condition["mode"] == Mode.FIXTURE_FILE:
            assert self.directory is not None, "it was read from a file"
            return FixtureEngine(self.directory / condition["fixture"], self.spec["tasks"])
        return ServerEngine(
            base_url=condition["base_url"],
            model=condition["model_id"],
            generation=Generation(
                max_new_tokens=settings.max_new_tokens,
                batch_size=settings.batch_size,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
            ),
            api_key_env=sampling.api_key_env,
        )

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Read each answer and search for its task's expected texts."""
        del runner
        tasks = {task["id"]: task for task in self.spec["tasks"]}
        return [_judged(tasks[one.item.id], one.text) for one in answers]

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Judge the references, and an empty answer to every task."""
        from mens_exp.evals.suite import Answer, SelfTest

        known = [item for item in self.items if item.reference]
        styles = {"whole": "{}", "fenced": "```\n{}\n```"}
        failed = {}
        for style, text in styles.items():
            answers = [Answer(item=i, text=text.replace("{}", i.reference)) for i in known]
            judged = self.judge(answers, runner)
            failed[style] = [i.id for i, one in zip(known, judged, strict=True) if not one.success]
        empty = self.judge([Answer(item=item, text="") for item in self.items], runner)
        return SelfTest(
            references=dict.fromkeys(styles, len(known)),
            failed=failed,
            stubs=len(self.items),
            stubs_passed=[i.id for i, one in zip(self.items, empty, strict=True) if one.success],
        )


def _judged(task: SpecTask, text: str) -> Judgement:
    is_python = task.get("language", Language.PYTHON) == Language.PYTHON
    code, place = code_and_place(text)
    tree = parsed(code)
    compiles = (not isinstance(tree, str) and bool(tree.body)) if is_python else None
    judgement = judge_by_reading(text, code, is_python=is_python)
    errors = [tree] if is_python and isinstance(tree, str) else []
    lacks = sum(one not in code for one in task["expected_contains"])
    if lacks:
        errors.append(f"it lacks {lacks} of {len(task['expected_contains'])} expected texts")
    semantic = task.get("semantic_expected_contains", [])
    success = bool(code.strip()) and compiles is not False and not lacks
    unknown = {"outcome": "suite=scorecard_spec runs nothing"}
    if not is_python:
        unknown |= dict.fromkeys(("compiles", "canonical"), "the answer is text, not code")
    return replace(
        judgement,
        compiles=compiles,
        success=success,
        semantic=success and all(one in code for one in semantic) and judgement.anti_stub,
        errors=tuple(errors) or (() if success else ("there is no answer",)),
        style=place.value,
        unknown=unknown,
    )


class FixtureEngine:
    """Existing answers from a file: task -> its answers, one for each attempt."""

    def __init__(self, path: Path, tasks: Sequence[SpecTask]) -> None:
        """Read the file.

        Raises:
            DataError: it cannot be read, or lacks a task.
        """
        found: Any = parse_json(read_bytes(path), str(path))
        Problems.raise_if(check_type(found, dict[str, list[str]], str(path)))
        absent = [task["id"] for task in tasks if not found.get(task["id"])]
        if absent:
            raise DataError(
                "lacks answers",
                where=str(path),
                found=", ".join(absent[:5]),
                expected="one or more for each task",
            )
        self._answers = {task["prompt"]: found[task["id"]] for task in tasks}

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the answer of each attempt; there is none after the last one in the file."""
        return [self._one(one) for one in requests]

    def _one(self, request: Request) -> Completion:
        turns = [turn["content"] for turn in request.messages if turn["role"] == "user"]
        answers = self._answers[turns[0]]
        is_there = len(turns) <= len(answers)
        return Completion(
            text=answers[len(turns) - 1] if is_there else "",
            tokens_in=None,
            tokens_out=None,
            is_finished=is_there,
            latency_ms=None,
            problem=None if is_there else "the fixture has no further answer",
        )


_NOTHING_RUN = "suite=heldout_syntax runs nothing"


def choose_items(
    heldout: Sequence[TrainingPair],
    tokenizer: Tokenizer,
    suite: HeldoutSyntaxSuite,
    *,
    max_positions: int,
) -> list[Item]:
    """Choose the suite's items: the first by content hash whose reference fits the limit.

    The choice depends only on the rows and the tokenizer, never on the run's seed. Plain texts have
    no prompt and are excluded.
    """
    ids = {number: pair.id for number, pair in enumerate(heldout) if not pair.is_text}
    order = sorted(ids, key=ids.__getitem__)
    items: list[Item] = []
    for start in range(0, len(order), suite.items):
        if len(items) >= suite.items:
            break
        rows = [heldout[number] for number in order[start : start + suite.items]]
        answers = tokenizer.encode_all([tokenizer.guard(pair.response) for pair in rows])
        prompts = tokenizer.encode_prompts([messages_of(pair) for pair in rows])
        items += [
            Item(id=pair.id, messages=tuple(messages_of(pair)), reference=pair.response)
            for pair, answer, prompt in zip(rows, answers, prompts, strict=True)
            if len(answer) < suite.max_new_tokens
            and len(prompt) + suite.max_new_tokens <= max_positions
        ]
    return items[: suite.items]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldoutSyntax(Suite):
    """The suite over chosen items."""

    items: list[Item]
    max_new_tokens: int
    name: str = "heldout_syntax"

    @classmethod
    def of_rows(
        cls,
        settings: HeldoutSyntaxSuite,
        heldout: Sequence[TrainingPair],
        tokenizer: Tokenizer,
        *,
        max_positions: int,
    ) -> HeldoutSyntax | str:
        """Choose the held-out rows to evaluate on."""
        if not heldout:
            return "no row is held out; see data.heldout_frac"
        if all(pair.is_text for pair in heldout):
            return "the held-out rows are plain texts, which ask nothing; take suite=none"
        items = choose_items(heldout, tokenizer, settings, max_positions=max_positions)
        if not items:
            return f"no held-out answer is under suite.max_new_tokens={settings.max_new_tokens}"
        return cls(items=items, max_new_tokens=settings.max_new_tokens)

    @classmethod
    def of_lines(
        cls, lines: Sequence[Mapping[str, Any]], generation: Mapping[str, Any]
    ) -> HeldoutSyntax:
        """Rebuild the suite from the items of event lines, which its digest covers completely."""
        first: dict[str, Item] = {}
        for line in lines:
            name = str(line.get("item_id"))
            messages = ({"role": "user", "content": str(line.get("prompt"))},)
            reference = str(line.get("reference"))
            first.setdefault(name, Item(id=name, messages=messages, reference=reference))
        limit: Any = generation.get("max_new_tokens")  # part of the digest
        return cls(items=list(first.values()), max_new_tokens=limit)

    @property
    def digest(self) -> str:
        """SHA-256 of the items and the maximum answer length."""
        frozen = [{"id": i.id, "prompt": i.prompt, "reference": i.reference} for i in self.items]
        return digest({"items": frozen, "max_new_tokens": self.max_new_tokens})

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Parse each answer."""
        del runner
        return [_judge(one.text) for one in answers]


def _judge(completion: str) -> Judgement:
    code, place = code_and_place(completion, r"\bdef\s")
    error = syntax_error(code)
    return replace(
        judge_by_reading(completion, code),
        compiles=error is None,
        errors=() if error is None else (error,),
        style=place.value,
        unknown=dict.fromkeys(("success", "semantic", "outcome"), _NOTHING_RUN),
    )


def syntax_error(code: str) -> str | None:
    """Return the reason why code does not count as parsed, or None."""
    tree = parsed(code)
    if isinstance(tree, str):
        return tree
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    if not any(isinstance(node, functions) for node in ast.walk(tree)):
        return "no function is defined"
    return None
