"""Wordings of a task's prompt: frames around a family's own wordings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.corpus.generator.draw import Draw
    from mens_exp.corpus.generator.family import Draft, Repair

__all__ = ["CODE_ONLY", "assert_statement", "examples", "instruction", "prompt", "repair_prompt"]

# Suites score bare code; whoever has not been trained on these rows must be told so too.
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
