"""Generate tasks from a seed: drawn family by family, worded, verified, and free of duplicates.

The n-th draw of a family depends only on the seed, the family's name and n, so that adding a family
or changing a share does not change the draws of the others. `FAMILIES` lists all families in the
order in which they take turns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.digest import digest
from mens_exp.corpus.generator import (
    dates,
    integers,
    iterators,
    lists,
    mappings,
    nested,
    parsing,
    stateful,
    strings,
)
from mens_exp.corpus.generator.family import NOT_TOLD, Case, Draw, Repair, Task, literal
from mens_exp.corpus.generator.mutate import Suite, first_failure, mutants, results_of
from mens_exp.corpus.split import Side
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.corpus.generator.family import Draft, Family

# Suites score bare code, so models not trained on these rows must also be instructed accordingly.
CODE_ONLY: Final = "Answer with the code only."

_FRAMES: Final = (
    "Write a Python {noun} `{signature}` that {does}.",
    "Define a {noun} `{signature}` in Python. It {does}.",
    "Implement `{signature}`, a Python {noun} that {does}.",
    "I need a Python {noun} `{signature}`: it {does}.",
    "Please write `{signature}` in Python, a {noun} that {does}.",
    "Wanted is a Python {noun} that {does}. Its signature is `{signature}`.",
)
_REPAIR_FRAMES: Final = (
    "Repair this program. {task}",
    "The program below is wrong. {task}",
    "Find and fix the mistake. {task}",
    "Somebody broke this code. {task}",
)


def instruction(draft: Draft, draw: Draw) -> str:
    """Return one wording of what a draft asks for, without examples."""
    asked = draw.pick(_FRAMES).format(
        noun=draft.noun.value, signature=draft.signature, does=draw.pick(draft.does)
    )
    return f"{asked} {draft.note}".rstrip()


def examples(results: Sequence[tuple[str, str]], draw: Draw) -> str:
    """Return a sentence with one or two calls and what they give, or nothing.

    Args:
        results: expressions and their values, as source text.
        draw: what decides.
    """
    if not results or draw.chance():
        return ""
    shown = draw.some(results, min(len(results), draw.number(1, 2)))
    return "For example, " + " and ".join(f"`{call}` gives `{value}`" for call, value in shown)


def prompt(instruction: str, example: str) -> str:
    """Return what the model is given for a task that is to be written."""
    return " ".join(part for part in (instruction, example and f"{example}.", CODE_ONLY) if part)


def repair_prompt(instruction: str, repair: Repair, draw: Draw) -> str:
    """Return what the model is given for a task that is to be repaired.

    Args:
        instruction: what the program was meant to do.
        repair: the broken program, and how its tests find it out.
        draw: what chooses the wording.
    """
    asked = draw.pick(_REPAIR_FRAMES).format(task=f"The task was: {instruction}")
    told = (
        f"This test fails:\n\n```python\n{repair.failing_test}\n```\n\n{repair.error}"
        if repair.failing_test
        else f"It does not run:\n\n{repair.error}"
    )
    return f"{asked}\n\n```python\n{repair.program}\n```\n\n{told}\n\n{CODE_ONLY}"


def assert_statement(setup: Sequence[str], expression: str, value: str, raises: str) -> str:
    """Return the test of one case.

    Args:
        setup: statements before it.
        expression: what is evaluated.
        value: the value expected, as source text; not read where an exception is.
        raises: the exception expected; empty where none is.
    """
    if not raises:
        return "\n".join([*setup, f"assert {expression} == {value}"])
    lines = [
        *setup,
        "try:",
        f"    {expression}",
        f"except {raises}:",
        "    pass",
        "else:",
        f"    raise AssertionError({f'{expression} must raise {raises}'!r})",
    ]
    return "\n".join(lines)


FAMILIES: Final[tuple[Family, ...]] = (
    *strings.STRINGS,
    *strings.FORMATTING,
    *lists.LISTS,
    *mappings.DICTS,
    *mappings.SETS,
    *integers.ARITHMETIC,
    *integers.BITS,
    *nested.RECURSION,
    *nested.MATRICES,
    *parsing.PARSING,
    *parsing.VALIDATION,
    *dates.DATES,
    *stateful.CLASSES,
    *stateful.SIMULATION,
    *iterators.ITERATORS,
    *iterators.SORTING,
)

SIDES: Final[dict[str, Side]] = {family.name: family.side for family in FAMILIES}


def families_of(side: Side) -> list[Family]:
    """Return the families of one side, in the order of the catalogue."""
    return [family for family in FAMILIES if family.side is side]


BENCHMARK_REPAIR_FRAC: Final = 0.25
_FRUITLESS: Final = 400  # draws of a family without a new task, after which it counts as used up


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """Tasks of one side.

    Attributes:
        tasks: no two ask the same for the same answer; families take turns.
        dropped: draws that made no task, by reason: `duplicate`, or `weak_tests` where all
            results were the same or no mutant failed.
    """

    tasks: list[Task]
    dropped: dict[str, int]


@dataclass(slots=True)
class _Source:
    """One family and how far its draws have come; `phase`, in [0, 1), shifts its repairs."""

    family: Family
    phase: float
    drawn: int = 0
    made: int = 0
    seen: set[str] = field(default_factory=set)

    def wants_repair(self, repair_frac: float) -> bool:
        """Return whether the next task is one to repair: exactly their share, spread evenly."""
        before, after = (each * repair_frac + self.phase for each in (self.made, self.made + 1))
        return int(after) > int(before)


def benchmark_tasks(
    seed: int, count: int, repair_frac: float = BENCHMARK_REPAIR_FRAC
) -> list[Task]:
    """Return tasks of the families that nothing is ever trained or validated on.

    Args:
        seed: the generator's seed.
        count: how many.
        repair_frac: share of them that are to be repaired.

    Returns:
        The tasks; of the same seed and share, the first ones of any larger count.

    Raises:
        DataError: there are not so many different ones.
    """
    return generate(Side.HELDOUT, count, seed, repair_frac).tasks


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Return the SHA-256 of tasks in their order: prompts, solutions and tests."""
    return digest([[task.prompt, task.solution, list(task.tests)] for task in tasks])


def generate(side: Side, count: int, seed: int, repair_frac: float) -> Generated:
    """Draw tasks from the families of one side.

    Args:
        side: whose families.
        count: how many tasks.
        seed: the generator's seed.
        repair_frac: share of tasks to repair, in [0, 1].

    Raises:
        DataError: the families do not have that many different tasks.
    """
    dropped: Counter[str] = Counter()
    tasks = list(drawn_tasks(side, count, seed, repair_frac, dropped))
    return Generated(tasks=tasks, dropped=dict(sorted(dropped.items())))


def drawn_tasks(
    side: Side,
    count: int,
    seed: int,
    repair_frac: float,
    dropped: Counter[str],
    where: str = "data.rows",
) -> Iterator[Task]:
    """Yield what `generate` returns, a task at a time.

    Args:
        side: whose families.
        count: how many tasks.
        seed: the generator's seed.
        repair_frac: share of tasks to repair, in [0, 1].
        dropped: counts draws that made no task, by reason; added to.
        where: the setting that asks for so many, for messages.

    Raises:
        DataError: the families do not have that many different tasks.
    """
    families = families_of(side)
    sources = [
        _Source(family, phase=place / len(families)) for place, family in enumerate(families)
    ]
    made = 0
    while made < count:
        if not sources:
            raise DataError(
                "the families do not have that many different tasks",
                where=where,
                found=f"{count} for {side.value}",
                expected=f"at most {made} with the seed {seed}",
                remedy="ask for fewer rows",
            )
        for source in sources[: count - made]:
            task = _next(source, seed, repair_frac, dropped)
            if task is None:
                sources.remove(source)  # used up
            else:
                made += 1
                yield task


def _next(source: _Source, seed: int, repair_frac: float, dropped: Counter[str]) -> Task | None:
    """Return the family's next new task; None where it is used up."""
    for _ in range(_FRUITLESS):
        name = f"{seed}/{source.family.name}/{source.drawn}"
        source.drawn += 1
        task = draw_task(source.family, name, repair=source.wants_repair(repair_frac))
        if task is None:
            dropped["weak_tests"] += 1
            continue
        # Without its examples: other inputs make no other task.
        key = digest(
            [task.instruction, task.solution, task.repair.program if task.repair else None]
        )
        if key in source.seen:
            dropped["duplicate"] += 1
            continue
        source.seen.add(key)
        source.made += 1
        return task
    return None


def draw_task(family: Family, seed: str, *, repair: bool) -> Task | None:
    """Draw a task of a family and verify it.

    Args:
        family: the family.
        seed: what its random stream is named by.
        repair: whether it is to be repaired.

    Returns:
        A task whose solution passes its tests while a mutant fails; the mutant is what is to
        be repaired. None where this draw's tests tell too little apart.

    Raises:
        AssertionError: the family's reference contradicts its own second source.
    """
    draw = Draw(seed)
    draft = family.draft(draw)
    values = _values(draft)
    if len(set(values)) == 1:
        return None
    tests = [
        assert_statement(case.setup, case.expression, value, case.raises)
        for case, value in zip(draft.cases, values, strict=True)
    ]
    suite = Suite(tests)
    failure = first_failure(draft.solution, suite)
    assert failure is None, f"{seed}: the reference fails {failure}"
    asked = instruction(draft, draw)
    shown = examples(
        [
            (case.expression, value)
            for case, value in zip(draft.cases, values, strict=True)
            if not case.setup and not case.raises
        ],
        draw,
    )
    broken = _broken(draft.solution, suite, draw)
    if broken is None:
        return None
    return Task(
        family=family.name,
        theme=family.theme,
        seed=seed,
        entry_point=draft.entry_point,
        instruction=asked,
        prompt=repair_prompt(asked, broken, draw) if repair else prompt(asked, shown),
        solution=draft.solution,
        tests=suite.tests,
        difficulty=draft.difficulty,
        repair=broken if repair else None,
    )


def _values(draft: Draft) -> list[str]:
    """Return what each case gives, as source text; the exception's name where one is wanted."""
    pairs = [("\n".join(case.setup), case.expression) for case in draft.cases]
    results = results_of(draft.solution, pairs)
    return [_value(case, result) for case, result in zip(draft.cases, results, strict=True)]


def _value(case: Case, result: object) -> str:
    if isinstance(result, Exception):
        assert type(result).__name__ == case.raises, f"{case.expression} raised {result!r}"
        return f"raises {case.raises}"
    assert not case.raises, f"{case.expression} did not raise {case.raises}"
    agrees = case.want is NOT_TOLD or (result == case.want and type(result) is type(case.want))
    assert agrees, f"{case.expression} gave {result!r}, not {case.want!r}"
    return literal(result)


def _broken(solution: str, suite: Suite, draw: Draw) -> Repair | None:
    """Return the first mutant that fails and ends; None where no mutant fails a test."""
    first = None
    for mutant in mutants(solution, draw):
        failure = first_failure(mutant.program, suite)
        # An address in a message would be another one in the next process.
        if failure is not None and failure.ends and " at 0x" not in failure.error:
            first = first or Repair(
                operator=mutant.operator,
                program=mutant.program,
                failing_test=failure.test,
                error=failure.error,
            )
            if failure.test:  # one that does not even parse says nothing of the tests
                return first
    return None
