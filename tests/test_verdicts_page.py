from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from mens_exp.config.overrides import check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "method" / "statistics.md"
HOW_TO = ROOT / "docs" / "how-to" / "compare.md"
COMMANDS = re.findall(r"^    python -m mens_exp(.*)$", HOW_TO.read_text("utf-8"), re.MULTILINE)


def test_the_page_has_its_commands():
    """A sweep, four comparisons, and the three uses of task=promote."""
    assert len(COMMANDS) == 8


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_page_composes(command):
    """Each is valid as it stands, except for the digest that only a scorecard knows."""
    words = shlex.split(command.replace("SHA256", "ab" * 32))
    checked = check([word for word in words if word != "-m"], multirun="-m" in words)
    assert [str(problem) for problem in checked.problems] == []


def test_the_figures_of_looks_are_those_of_the_benchmark():
    """The table has the last full run's rates, by row and schedule."""
    results = ROOT / "benchmarks" / "results" / "looks.json"
    run = [one for one in json.loads(results.read_text("utf-8"))["runs"] if one["size"] == "full"][
        -1
    ]
    figures = {one["name"]: (one["reference_value"], one["value"]) for one in run["figures"]}
    for row, schedule in (
        ("at 3, 5, 10 and 20 seeds", "3, 5, 10 and 20 seeds"),
        ("5, at 3 to 7 seeds", "5 looks, 3 to 7 seeds"),
        ("20, at 3 to 22 seeds", "20 looks, 3 to 22 seeds"),
        ("48, at 3 to 50 seeds", "48 looks, 3 to 50 seeds"),
    ):
        kinds = ("normal", "tiny_llama, validation loss")
        shares = [share for kind in kinds for share in figures[f"{kind}, {schedule}: false"]]
        cells = " | ".join(f"{100 * share:.1f} %" for share in shares)
        assert f"| {row} | {cells} |" in PAGE.read_text("utf-8")
    bounds = [figures[f"{seeds} seeds: upper bound has the power"] for seeds in (3, 5, 10)]
    said = " ".join(PAGE.read_text("utf-8").split())
    first, second, third = (f"{100 * bound:.1f}" for _, bound in bounds)
    assert f"{first}, {second} and {third} %)" in said
    first, second, third = (f"{100 * plain:.0f}" for plain, _ in bounds)
    assert f"{first}, {second} and {third} % at 3, 5 and 10 seeds" in said


def test_the_figures_of_items_are_those_of_the_benchmark():
    """Each cell has the highest rate over both kinds of score and all spreads between seeds."""
    results = ROOT / "benchmarks" / "results" / "items.json"
    run = json.loads(results.read_text("utf-8"))["runs"][-1]
    highest = {}
    for one in run["figures"]:
        name = re.match(r"\w+, (\d+) seeds, (\d+) items, interaction ([\d.]+),", one["name"])
        if name is not None:
            told = highest.setdefault(name.groups(), [0.0, 0.0])
            told[:] = map(max, told, (one["value"], one["reference_value"]))
    page = PAGE.read_text("utf-8")
    for interaction in ("0", "0.5", "1"):
        for seeds in ("3", "5", "10"):
            cells = [highest[seeds, items, interaction] for items in ("16", "64", "164")]
            row = " | ".join(f"{100 * a:.1f} % ({100 * b:.1f} %)" for a, b in cells)
            assert f"| {interaction} | {seeds} | {row} |" in page
    (bound,) = [one["value"] for one in run["figures"] if one["name"].startswith("highest upper")]
    assert bound <= 0.06
    assert f"The highest upper bound of any cell is {100 * bound:.2f} %" in " ".join(page.split())
