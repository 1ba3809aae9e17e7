"""suite=rust: Rust functions in MultiPL-E's form, compiled by rustc and graded by their tests.

The prompt ends with an opening brace; the tests close it and contain the main function. A
completion may continue the prompt's function or contain the whole function, also in Markdown fences
or within prose. Braces are matched here; everything else is left to the compiler.
`rust_grading.py` runs answer and tests in separate processes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mens_exp.artifacts.digest import digest
from mens_exp.corpus.rust import RustFormatter
from mens_exp.errors import DataError
from mens_exp.evals.answer_quality import NO_SANDBOX, judge_by_reading
from mens_exp.evals.completion_styles import (
    Style,
    blocks_in,
    code_of,
    last_with,
    outside_reasoning,
)
from mens_exp.evals.grading import Verdict
from mens_exp.evals.rust_grading import (
    LINTS,
    Lintable,
    Linted,
    RustJob,
    grade_rust,
    lint_rust,
    probe_problem,
)
from mens_exp.evals.rust_values import signatures
from mens_exp.evals.suite import Item, SelfTest, Suite, tasks_in
from mens_exp.sandbox.program import (
    Toolchain,
    call_all,
    find_clippy,
    find_rust,
    find_rustfmt,
    least_rust_limits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.config.suite import RustSuite
    from mens_exp.evals.rust_values import Signature
    from mens_exp.evals.suite import Answer, Judgement, Runner
    from mens_exp.sandbox.program import Clippy, Execution, Limits, Sandbox

_FENCE_LINE: Final = re.compile(r"^[ \t]*```.*$", re.MULTILINE)
_RUST: Final = frozenset({"", "rs", "rust"})
# Comments and literals, in which brackets do not count, and brackets. Lifetimes do not match.
_TOKEN: Final = re.compile(
    r"""//[^\n]*|/\*.*?\*/|r(?P<hashes>\#*)".*?"(?P=hashes)|"(?:\\.|[^"\\])*"|'(?:\\[^\n]+?|[^\\'\n])'"""
    r"|[{}()\[\]]|;",
    re.DOTALL,
)
_BRACES: Final = {"{": 1, "}": -1}
_BRACKETS: Final = {**_BRACES, "(": 1, ")": -1, "[": 1, "]": -1}
# The last two alternatives are a macro's definition and its call.
_ITEM: Final = re.compile(
    r"(?:\s|//[^\n]*\n|/\*.*?\*/|\#!?\[[^\]\n]*\])*+"
    r"(?:"
    r"(?:pub(?:\([^)]*\))?\s+)?(?:unsafe\s+|async\s+|const\s+|extern\s+(?:\"\w*\"\s+)?)*"
    r"(?:fn|struct|enum|union|impl|trait|mod|(?P<value>use|type|static|const|crate))\b"
    r"(?:\s+(?:r\#)?(?P<name>\w+))?"
    r"|(?:unsafe\s+)?extern\s+(?:\"\w*\"\s*)?(?=\{)"
    r"|macro_rules!\s*\w+"
    r"|\w+(?:::\w+)*!(?=[({\[]|[ ]\{)"
    r")",
    re.DOTALL,
)


def assemble_rust(completion: str, *, prompt: str, entry_point: str) -> str:
    """Return the items of a program in which a completion defines the function.

    Args:
        completion: what the model wrote.
        prompt: code that ends in the function's signature and its opening brace.
        entry_point: the function's name.
    """
    text = _code(completion.replace("\r\n", "\n"), entry_point)
    if _definition(entry_point).search(text):
        begin = next((at.start() for at in _item_starts(text)), 0)
        above = prompt[: head_of(prompt, entry_point)]
        return f"{above}{_items(text[begin:])}"
    end = _closing(text, depth=1)
    if end is None:  # generation stopped at the closing brace
        return f"{prompt}{text}\n}}\n"
    return f"{prompt}{text[: end + 1]}\n{_items(text[end + 1 :])}"


def style_of_rust(completion: str, *, entry_point: str) -> Style:
    """Return the style in which `assemble_rust` reads a completion: whole or continuation."""
    text = _code(completion.replace("\r\n", "\n"), entry_point)
    return Style.WHOLE if _definition(entry_point).search(text) else Style.CONTINUATION


def without_comments(text: str) -> str:
    """Return Rust source without comments, including doc comments."""
    return _TOKEN.sub(lambda one: "" if one[0].startswith(("//", "/*")) else one[0], text)


def _code(completion: str, entry_point: str) -> str:
    """Return the block that defines or continues the function, the first block, or everything."""
    blocks = [block for block in blocks_in(completion) if block.language in _RUST]
    defining = last_with(blocks, _definition(entry_point).pattern)
    fences = list(_FENCE_LINE.finditer(completion))
    if not fences:
        return completion
    if len(fences) % 2 and defining is None:  # it closes a block opened by the prompt's template
        return completion[: fences[0].start()] or completion
    bodies = [block for block in blocks if _closing(block.text, depth=1) is not None]
    chosen = defining or last_with(bodies, "") or next(iter(blocks), None)
    return completion if chosen is None else chosen.text


def _definition(name: str) -> re.Pattern[str]:
    return re.compile(rf"\bfn\s+{re.escape(name)}\b")


def head_of(prompt: str, entry_point: str) -> int:
    """Return the offset of the prompt's function, including its comments and attributes."""
    found = list(_definition(entry_point).finditer(prompt))
    lines = prompt[: found[-1].start()].split("\n")[:-1] if found else []
    while lines and lines[-1].lstrip().startswith(("//", "#[")):
        lines.pop()
    return sum(len(line) + 1 for line in lines)


def _item_starts(text: str) -> Iterator[re.Match[str]]:
    """Yield the lines on which an item starts."""
    for line in re.finditer(r"^[ \t]*(?=\S)", text, re.MULTILINE):
        found = _ITEM.match(text, line.start())
        if found is not None:
            yield found


def _items(text: str) -> str:
    """Return the leading items of a text, without a main function."""
    kept, at = [], 0
    while (found := _ITEM.match(text, at)) is not None:
        end = _end_of_item(text, found.end(), {";"} if found["value"] else {"}", ";"})
        if found["name"] != "main":
            kept.append(text[at:end])
        at = end
    return "".join(kept) + "\n"


def _end_of_item(text: str, start: int, ends: set[str]) -> int:
    """Return the end of an item: after the first of the given tokens outside all brackets."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += _BRACKETS.get(token[0], 0)
        if depth <= 0 and token[0] in ends:
            return token.end()
    return len(text)


def _closing(text: str, *, depth: int) -> int | None:
    """Return the offset of the brace that closes the outermost of ``depth`` open ones."""
    for token in _TOKEN.finditer(text):
        depth += _BRACES.get(token[0], 0)
        if depth == 0:
            return token.start()
    return None


_FIELDS: Final = {"name": str, "prompt": str, "tests": str, "stop_tokens": list}
_FUNCTION: Final = re.compile(r"\bfn\s+(\w+)")
_MAIN: Final = re.compile(r"\bfn\s+main\s*\(\s*\)\s*\{")


@dataclass(frozen=True, kw_only=True, slots=True)
class RustTask:
    """A function to write, and the tests that it must pass."""

    id: str
    prompt: str
    entry_point: str
    tests: str  # from the main function on
    stop_tokens: tuple[str, ...]

    @property
    def signature(self) -> Signature | None:
        """The function's types; None if one is not a plain value, and grading is *trusting*."""
        found = signatures(self.prompt, self.entry_point)
        return found[-1] if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RustChecked:
    """The verdict on one completion, with its evidence."""

    task: str
    verdict: Verdict
    detail: str | None  # the compiler's or the panic's message
    source: str  # the answer's items
    execution: Execution  # of the answer's process
    linted: Linted | None = None  # None without a linter, or if it does not compile


def read_rust_tasks(path: Path) -> list[RustTask]:
    """Read tasks in MultiPL-E's form, one JSON object per line, gzipped or not.

    Raises:
        DataError: the file cannot be read, or a line is not such a task (``file:line``).
        Problems: several lines are not.
    """
    return tasks_in(path, _task)


def _task(row: Any, where: str) -> RustTask:
    for name, kind in _FIELDS.items():
        if not isinstance(row, dict) or not isinstance(row.get(name), kind):
            raise DataError(
                "not a task of MultiPL-E", where=where, expected=", ".join(_FIELDS), found=row
            )
    names = _FUNCTION.findall(row["prompt"])
    tests = row["tests"].lstrip()
    if not names or not tests.startswith("}") or _MAIN.search(tests) is None:
        raise DataError(
            "a task's tests do not continue where its prompt ends",
            where=where,
            found=tests[:40],
            expected="a prompt that ends within a function, tests that close it and have a main",
        )
    return RustTask(
        id=row["name"],
        prompt=row["prompt"],
        entry_point=names[-1],
        tests=tests[1:],
        stop_tokens=tuple(map(str, row["stop_tokens"])),
    )


def check_rust(  # the arguments of Python's `check_all`, plus the compiler
    sandbox: Sandbox,
    toolchain: Toolchain,
    tasks: Sequence[RustTask],
    completions: Sequence[str],
    limits: Limits,
    workers: int | None = None,
    clippy: Clippy | None = None,
) -> list[RustChecked]:
    """Judge one completion of each task, several at once, in order.

    Args:
        sandbox: the sandbox in which programs are compiled, linted and run.
        toolchain: the compiler.
        tasks: the tasks, one for each completion.
        completions: the model's completions.
        limits: limits of each program.
        workers: number of programs to run at once; None means one per processor.
        clippy: lints programs that compile; None lints nothing. It does not affect the verdict.

    Raises:
        SetupError: the sandbox failed.
    """
    solutions = [
        assemble_rust(text, prompt=task.prompt, entry_point=task.entry_point)
        for task, text in zip(tasks, completions, strict=True)
    ]
    jobs = list(map(_job, tasks, solutions))
    grade = partial(grade_rust, sandbox, toolchain, limits)
    graded = call_all([partial(grade, job) for job in jobs], workers)
    chosen = [n for n, one in enumerate(graded) if one.verdict is not Verdict.COMPILE_ERROR]
    linted: dict[int, Linted] = {}
    if clippy is not None:
        lintable = [_lintable(tasks[n], jobs[n]) for n in chosen]
        found = lint_rust(sandbox, clippy, lintable, limits, workers)
        linted = dict(zip(chosen, found, strict=True))
    return [
        RustChecked(
            task=task.id,
            verdict=graded[n].verdict,
            detail=graded[n].detail,
            source=jobs[n].items,
            execution=graded[n].execution,
            linted=linted.get(n),
        )
        for n, task in enumerate(tasks)
    ]


def _job(task: RustTask, items: str) -> RustJob:
    main = _MAIN.search(task.tests)
    assert main is not None, "a task without a main function is refused when it is read"
    begin, end = main.end(), task.tests.rindex("}")
    return RustJob(
        items=items,
        above=task.prompt[: head_of(task.prompt, task.entry_point)],
        tests=(task.tests[:begin], task.tests[begin:end], task.tests[end:]),
        signature=task.signature,
    )


def _lintable(task: RustTask, job: RustJob) -> Lintable:
    lines = job.items.count("\n") + (not job.items.endswith("\n"))
    source = "".join([job.items, *job.tests])
    return Lintable(source=source, answer_lines=lines, prompt=task.prompt)


_COMPLETE: Final = (
    "Complete this Rust function. Answer with the code of the whole function only.\n\n"
    "```rust\n{prompt}\n```"
)
_STUB: Final = "    unimplemented!()\n"
_MOST_CHARACTERS: Final = 1000  # of the compiler's message in a repair prompt


def rust_suite(config: RustSuite) -> RustProgramSuite:
    """Read the tasks, and find the compiler and, if requested, Clippy.

    Raises:
        DataError: the file cannot be read, or a line is not a task.
        Problems: several lines are not.
        SetupError: there is no compiler, or no Clippy.
    """
    assert config.path is not None, "validation has asked for it"
    tasks = read_rust_tasks(Path(config.path).expanduser())[: config.items]
    toolchain = find_rust()
    return RustProgramSuite(
        tasks={task.id: task for task in tasks},
        toolchain=toolchain,
        max_new_tokens=config.max_new_tokens,
        clippy=find_clippy(toolchain) if config.clippy else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RustProgramSuite(Suite):
    """The suite over tasks, by name; it has no references."""

    tasks: dict[str, RustTask]
    toolchain: Toolchain
    max_new_tokens: int
    clippy: Clippy | None = None
    name: str = "rust"
    needs_sandbox: bool = True

    @classmethod
    def opened(cls, settings: RustSuite, *, calls_functions: bool) -> RustProgramSuite:
        """Read the tasks, and find the compiler."""
        del calls_functions  # the suite calls none
        return rust_suite(settings)

    @property
    def items(self) -> list[Item]:
        """An item for each task."""
        return [
            Item(
                id=name,
                messages=({"role": "user", "content": _asked(task)},),
            )
            for name, task in self.tasks.items()
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of the tasks, their prompts, the maximum completion length, and the lints."""
        tasks = [[asdict(task), _asked(task)] for task in self.tasks.values()]
        content = {"tasks": tasks, "max_new_tokens": self.max_new_tokens}
        if self.clippy is not None:
            content["lints"] = [self.clippy.version, *LINTS]
        return digest(content)

    @property
    def tools(self) -> dict[str, str]:
        """Versions of the compiler and linter, for the scorecard."""
        found = {"rustc": self.toolchain.version}
        return found if self.clippy is None else {**found, "clippy": self.clippy.version}

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Compile each answer and run its task's tests; without a runner, neither."""
        if runner is None:
            return [self._judgement(self.tasks[one.item.id], one.text, None) for one in answers]
        tasks = [self.tasks[one.item.id] for one in answers]
        texts = [one.text for one in answers]
        checked = self._checked(tasks, texts, runner)
        return [self._judgement(*one) for one in zip(tasks, texts, checked, strict=True)]

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Compile and run a stub of every task: each must compile and fail.

        Clippy must report the known findings of a probe program.
        """
        if runner is None:
            return None
        tasks = list(self.tasks.values())
        stubs = self._checked(tasks, [_STUB] * len(tasks), runner)
        # Without references, the only possible check is that the task's own part compiles.
        broken = [one.task for one in stubs if one.verdict is Verdict.COMPILE_ERROR]
        references, failed = {"prompt and tests": len(tasks)}, {"prompt and tests": broken}
        if self.clippy is not None:
            limits = least_rust_limits(runner.limits)
            wrong = probe_problem(runner.sandbox, self.clippy, limits)
            references["lints"], failed["lints"] = 1, [wrong] if wrong else []
        return SelfTest(
            references=references,
            failed=failed,
            stubs=len(tasks),
            stubs_passed=[one.task for one in stubs if one.verdict is Verdict.PASSED],
        )

    def check_keeping(self) -> None:
        """Find rustfmt, which detects equal answers."""
        find_rustfmt(self.toolchain)

    def canonical(self, events: Sequence[ItemEvent], runner: Runner | None) -> list[str]:
        """Return answers as formatted by rustfmt, without comments."""
        assert runner is not None, "without one nothing passes"
        formatter = RustFormatter(runner.sandbox, runner.limits, runner.workers)
        tasks = [self.tasks[event["item_id"]] for event in events]
        texts = [outside_reasoning(event["completion"]) for event in events]
        programs = [
            assemble_rust(text, prompt=task.prompt, entry_point=task.entry_point)
            for task, text in zip(tasks, texts, strict=True)
        ]
        # A continuation includes the prompt's documentation, which a complete function may omit.
        bare = list(map(without_comments, programs))
        return [one.text for one in formatter.formatted(bare)]

    def _checked(
        self, tasks: Sequence[RustTask], texts: Sequence[str], runner: Runner
    ) -> list[RustChecked]:
        limits = least_rust_limits(runner.limits)
        return check_rust(
            *(runner.sandbox, self.toolchain, tasks, texts, limits, runner.workers),
            clippy=self.clippy,
        )

    def _judgement(self, task: RustTask, text: str, checked: RustChecked | None) -> Judgement:
        judgement = _judgement(task, text, checked)
        if self.clippy is None:
            return judgement
        if checked is None:
            why = dict.fromkeys(("lint_clean", "lints"), NO_SANDBOX)
            return replace(judgement, unknown={**judgement.unknown, **why})
        if checked.linted is None:
            unknown = {**judgement.unknown, "lints": "it does not compile"}
            return replace(judgement, lint_clean=False, unknown=unknown)
        found = checked.linted
        return replace(judgement, lints=found.lints, lint_clean=found.is_clean)


def _asked(task: RustTask) -> str:
    return _COMPLETE.format(prompt=task.prompt.rstrip())


def _judgement(task: RustTask, text: str, checked: RustChecked | None) -> Judgement:
    judgement = judge_by_reading(text, code_of(text, r"\bfn\s"), is_python=False)
    unknown = {"canonical": "the layout of Rust is not judged"}
    if checked is None:
        unknown |= dict.fromkeys(("compiles", "success", "semantic", "outcome"), NO_SANDBOX)
    success = None if checked is None else checked.verdict is Verdict.PASSED
    return replace(
        judgement,
        compiles=None if checked is None else checked.verdict is not Verdict.COMPILE_ERROR,
        success=success,
        semantic=None if success is None else success and judgement.anti_stub,
        errors=_errors(checked),
        outcome=None if checked is None else checked.verdict.value,
        style=style_of_rust(text, entry_point=task.entry_point).value,
        unknown=unknown,
    )


def _errors(checked: RustChecked | None) -> tuple[str, ...]:
    if checked is None or checked.verdict is Verdict.PASSED:
        return ()
    said = checked.verdict.value.replace("_", " ")
    detail = (checked.detail or "")[:_MOST_CHARACTERS]
    return (f"{said}: {detail}" if detail else said,)
