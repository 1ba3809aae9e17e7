"""Task families: the random draws of a template, its draft, and the task made from it.

A family's template draws parameters and returns a `Draft`: the source of the reference solution,
several wordings of its description, and test cases. `generate` turns the draft into a `Task`: one
wording is chosen, and every case becomes an assert statement whose expected value came from running
the reference. Draws come from one stream of random numbers seeded by a string, independent of the
process, its hash seed and the order of other draws.
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass
from enum import Enum
from string import Template
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mens_exp.artifacts import digest
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.corpus.split import Side

T = TypeVar("T")

_WORDS: Final = (
    "apple amber arrow basket beacon bottle bridge button candle canyon carpet castle cherry "
    "circle copper cotton dagger desert dinner dragon eagle ember engine falcon feather fern "
    "forest garden ginger glacier hammer harbor hazel island ivory jacket jungle kettle "
    "ladder lantern lemon level maple marble meadow mirror needle noon ocean olive orange "
    "orchid paper pebble pepper pillow planet pocket radar rabbit ribbon river rocket saddle "
    "salmon shadow silver spider statue stone summer sunset table temple ticket tiger timber "
    "tulip tunnel valley velvet violet wagon walnut willow window winter yellow zebra "
)
WORDS: Final = tuple(_WORDS.split())


class Draw:
    """Random choices for one task."""

    def __init__(self, seed: str) -> None:
        """Start the stream seeded by a string."""
        # A text is seeded by its SHA-512, not by hash(); nothing here is a secret.
        self._random = random.Random(seed)  # noqa: S311

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return options[self._random.randrange(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Return several different options, in random order."""
        return self._random.sample(options, count)

    def number(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return self._random.randint(low, high)

    def numbers(self, count: int, low: int, high: int) -> list[int]:
        """Return so many whole numbers, each from `low` to `high`."""
        return [self._random.randint(low, high) for _ in range(count)]

    def chance(self) -> bool:
        """Return true half of the time."""
        return self._random.random() < 0.5  # noqa: PLR2004  # a half

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """Return all options in random order."""
        return self._random.sample(options, len(options))

    def words(self, count: int) -> list[str]:
        """Return so many words; one may come twice."""
        return [self.pick(WORDS) for _ in range(count)]

    def letters(self, count: int, alphabet: str) -> str:
        """Return a text of so many letters of an alphabet."""
        return "".join(self.pick(alphabet) for _ in range(count))


class _NotTold(Enum):
    """The expected value of a case that has no second source."""

    NOT_TOLD = 0


NOT_TOLD: Final = _NotTold.NOT_TOLD


class Noun(Enum):
    """The kind of program that a task asks for."""

    FUNCTION = "function"
    GENERATOR = "generator function"
    CLASS = "class"


@dataclass(frozen=True, slots=True)
class Case:
    """One test case.

    Attributes:
        expression: a Python expression, evaluated after the setup.
        setup: statements before it.
        want: its value computed independently of the reference, if that is cheap; the reference is
            compared with it.
        raises: name of the exception that evaluating it must raise; empty if none.
    """

    expression: str
    setup: tuple[str, ...] = ()
    want: Any = NOT_TOLD
    raises: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The result of a template.

    signature: name and parameters as in the instruction, ``clamp(value, low)``.
    does: wordings of its description, each to follow "it": "returns …".
    solution: the reference, ASCII Python source without a final newline.
    cases: the test cases; their results are not all equal.
    difficulty: from 1, a beginner's single line, to 10.
    note: sentences added to every wording: edge cases, exceptions, methods of a class.
    noun: the noun for it in the instruction.
    """

    signature: str
    does: tuple[str, ...]
    solution: str
    cases: Sequence[Case]
    difficulty: int
    note: str = ""
    noun: Noun = Noun.FUNCTION

    @property
    def entry_point(self) -> str:
        """The name that the cases call."""
        return self.signature.partition("(")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A template.

    Attributes:
        name: unique; the group of its rows, so that no split divides it.
        theme: what it exercises; the category of its rows.
        side: the one side whose rows it makes. Fixed here: neither a seed nor a share moves it.
        draft: the template.
    """

    name: str
    theme: str
    side: Side
    draft: Callable[[Draw], Draft]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """A broken version of a solution, and the test failure that reveals it.

    Attributes:
        operator: what was done to the solution, one of `mutate.OPERATORS`.
        program: the broken program.
        failing_test: the first of the tests that fails; empty where the program does not parse.
        error: the last line of the traceback.
    """

    operator: str
    program: str
    failing_test: str
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One task with its verified solution and tests.

    Attributes:
        family: the family's name.
        theme: the family's theme.
        seed: what its random stream is named by; the same seed gives the same task.
        entry_point: the function or class that the tests call.
        instruction: what is asked for, entry point included.
        prompt: what the model is given: the instruction, or the repair around it.
        solution: the reference, bare code; also the answer of a repair.
        tests: statements that pass silently after the solution, and raise otherwise.
        difficulty: 1 to 10; a repair has its task's.
        repair: what is to be repaired; None where the task is to write it.
    """

    family: str
    theme: str
    seed: str
    entry_point: str
    instruction: str
    prompt: str
    solution: str
    tests: tuple[str, ...]
    difficulty: int
    repair: Repair | None = None

    @property
    def id(self) -> str:
        """16 hex digits of the SHA-256 of prompt, solution and tests."""
        return digest.digest([self.prompt, self.solution, list(self.tests)])[:16]

    @property
    def pair(self) -> TrainingPair:
        """The task as a row: no fence and no chatter around the solution."""
        return TrainingPair(
            prompt=self.prompt,
            response=self.solution,
            category=self.theme,
            group=self.family,
            difficulty=self.difficulty,
        )


def code(text: str, **values: object) -> str:
    """Fill in a template of source text.

    Args:
        text: Python, indented as one likes, ``$name`` where a value goes.
        values: the values, as `str` shows them.

    Returns:
        The source, dedented, without blank lines at its ends.
    """
    return Template(textwrap.dedent(text).strip("\n").rstrip()).substitute(
        {name: str(value) for name, value in values.items()}
    )


def call(name: str, *arguments: Any, want: Any = NOT_TOLD, raises: str = "") -> Case:
    """Return the case of one call.

    Args:
        name: the function.
        arguments: what it is called with; lists, tuples, sets, dicts and plain values.
        want: the value it must give, known apart from the reference.
        raises: the exception it must raise.
    """
    given = ", ".join(map(literal, arguments))
    return Case(f"{name}({given})", want=want, raises=raises)


def calls(
    name: str, arguments: Sequence[Sequence[Any]], oracle: Callable[..., Any] | None = None
) -> list[Case]:
    """Return a case of each list of arguments.

    Args:
        name: the function.
        arguments: the arguments of each call.
        oracle: a second implementation, written in another way than the reference.
    """
    return [call(name, *each, want=oracle(*each) if oracle else NOT_TOLD) for each in arguments]


def literal(value: Any) -> str:
    """Spell a value in Python, the same in every process: a set's elements come sorted.

    Args:
        value: a plain value, or lists, tuples, sets and dicts of them.

    Raises:
        TypeError: a value of any other kind.
    """
    if isinstance(value, dict):
        inside = ", ".join(f"{literal(key)}: {literal(each)}" for key, each in value.items())
        return f"{{{inside}}}"
    if isinstance(value, set):
        return f"{{{', '.join(map(literal, sorted(value)))}}}" if value else "set()"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        inside = ", ".join(map(literal, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise TypeError(f"no literal for a {type(value).__name__}")
