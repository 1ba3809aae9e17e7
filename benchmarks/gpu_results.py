"""The form of the results of benchmarks/gpu.py, and their page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypedDict

import page
from record import Better, Described, Figure, Size, shown

from mens_exp.artifacts.record import StoredRecord
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "How fast and how large is QLoRA of an 8B model on one GPU?"
SLICES = {
    "2x2048": "A step of 2 × 2,048 tokens on the shape of Llama-3.1-8B",
    "1x8192": "A step of 8,192 tokens, packed from documents of 1,024, on the same shape",
    "main_job": "README's first command",
    "nccl": "NCCL with one process",
    "tests": "The tests that need a GPU",
}
DRY_NOTE = """
**A dry run on the CPU with tiny shapes. It shows that every line works; its figures mean nothing.**
"""


class State(StrEnum):
    """The final state of a slice."""

    DONE = "done"
    STOPPED = "stopped"  # out of time; the next start continues
    SKIPPED = "skipped"  # the machine lacks something
    FAILED = "failed"


class Card(TypedDict):
    """The GPU, as reported by its driver."""

    name: str
    driver: str
    memory_gib: float
    cuda: str | None


class Goal(TypedDict):
    """A target value; ``met`` is null if the run cannot decide it."""

    name: str
    value: float
    goal: float
    unit: str
    better: Better
    met: bool | None


class Slice(Described):
    """The result of a slice.

    ``reason`` is set for every state but done. ``missing`` gives the reason for each omitted part,
    ``facts`` describes how the other parts were run, and ``tests`` has the outcome of each GPU
    test. ``unknown`` holds the reason if there is no ``card``.
    """

    state: State
    reason: str
    seconds: float
    card: Card | None
    missing: dict[str, str]
    facts: dict[str, str]
    tests: dict[str, str]
    figures: list[Figure]
    goals: list[Goal]


@dataclass(kw_only=True, slots=True)
class GpuResults(StoredRecord):
    """The newest result of each slice.

    Attributes:
        format: always ``mens_exp_gpu_benchmark``.
        version: version of this layout.
        size: smallest for a dry run.
        slices: results by slice name.
    """

    format: str = "mens_exp_gpu_benchmark"
    version: int = 1
    size: Size
    slices: dict[str, Slice]

    def problems(self, where: str) -> list[DataError]:
        """Return problems other than wrong types."""
        return [
            DataError(
                "wrong value", where=f"{where}: slices.{name}", found=found, expected=expected
            )
            for name, one in self.slices.items()
            for found, expected in _problems_of(name, one)
        ]


def _problems_of(name: str, one: Slice) -> Iterator[tuple[str, str]]:
    if name not in SLICES:
        yield name, f"one of {', '.join(SLICES)}"
    if (one["state"] == State.DONE) == bool(one["reason"]):
        yield one["reason"] or "no reason", "a reason for every state but done"
    if one["state"] == State.DONE and not one["figures"]:
        yield "no figure", "a figure of a slice that is done"
    if (one["card"] is None) != ("card" in one["unknown"]):
        yield "card", "a reason where there is no card, and only there"


@dataclass(kw_only=True, slots=True)
class Found:
    """The findings of a finished slice."""

    state: State = State.DONE
    reason: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)


def drawn(results: GpuResults) -> str:
    """Return the page; deterministic for given results."""
    parts = ["# One GPU\n", QUESTION]
    if results.size == Size.SMALLEST:
        parts.append(DRY_NOTE)
    parts += ["", "| Slice | State | Seconds |", "|---|---|---:|"]
    for name, title in SLICES.items():
        one = results.slices.get(name)
        state = "not begun" if one is None else state_of(one)
        seconds = "" if one is None else shown(one["seconds"])
        parts.append(f"| {name}: {title} | {page.cell(state)} | {seconds} |")
    for name, title in SLICES.items():
        if name in results.slices:
            parts += [f"\n## {title}\n", *_section(results.slices[name])]
    return "\n".join(parts).rstrip() + "\n"


def state_of(one: Slice) -> str:
    """Return a slice's state with its reason."""
    return f"{one['state']}: {one['reason']}" if one["reason"] else str(one["state"])


def _section(one: Slice) -> Iterator[str]:
    yield f"    {one['command']}\n"
    card = one["card"]
    facts = page.facts_of(one)
    if card is not None:
        cuda = f", CUDA {card['cuda']}" if card["cuda"] else ""
        memory = f"{shown(card['memory_gib'])} GiB"
        facts.insert(1, f"{card['name']}, {memory}, driver {card['driver']}{cuda}")
    yield ". ".join(facts) + "."
    if one["note"]:
        yield f"Note: {page.cell(one['note'])}."
    yield ""
    for what, why in {**one["facts"], **one["missing"], **one["unknown"]}.items():
        yield f"- {what}: {page.cell(why)}"
    if one["figures"]:
        yield ""
        yield from page.table(one["figures"], None)
    if one["goals"]:
        yield "\n| Goal | Value | Goal | Met |\n|---|---:|---:|---|"
    for goal in one["goals"]:
        met = {True: "yes", False: "no", None: "cannot be told here"}[goal["met"]]
        sign = "≥" if goal["better"] == Better.HIGHER else "≤"
        value, limit = shown(goal["value"]), f"{sign} {shown(goal['goal'])}"
        yield f"| {goal['name']} | {value} {goal['unit']} | {limit} {goal['unit']} | {met} |"
    yield from _tests(one["tests"])


def _tests(outcomes: dict[str, str]) -> Iterator[str]:
    """Yield the tests that failed, and the reasons of those that were skipped."""
    skipped = Counter(how for how in outcomes.values() if how.startswith("skipped"))
    lines = [f"- {count} {page.cell(how)}" for how, count in skipped.items()]
    for name, how in outcomes.items():
        if not how.startswith(("passed", "skipped")):
            lines.append(f"- `{name}`: {page.cell(how)}")
    yield from ["", *lines] if lines else []
