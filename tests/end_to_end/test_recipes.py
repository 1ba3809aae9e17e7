"""The recipes of docs/how-to: each one's files are written and its commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from mens_exp.artifacts.manifest import Manifest, Status

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGES = [HOW_TO / f"{name}.md" for name in ("rows", "training", "adapters")]
BLOCK = re.compile(r"^```(\w+)(?: title=\"(\S+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """One section of a page."""

    title: str
    files: dict[str, str]
    commands: str
    needs_model: bool


def _recipes():
    return [recipe for page in PAGES for recipe in _recipes_of(page)]


def _recipes_of(page):
    before, *sections = re.split(r"^## ", page.read_text("utf-8"), flags=re.MULTILINE)
    ((_, _, preamble),) = BLOCK.findall(before)
    recipes = []
    for section in sections:
        blocks = BLOCK.findall(section)
        commands = "".join(text for kind, _, text in blocks if kind == "bash")
        recipes.append(
            Recipe(
                title=section.partition("\n")[0],
                files={name: text for _, name, text in blocks if name},
                commands=preamble + commands,
                needs_model="<!-- needs: my_model -->" in section,
            )
        )
    return recipes


def _run(recipe, here, rows_file, shell_path):
    for name, text in recipe.files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copy(rows_file, here / "rows.jsonl")
    done = subprocess.run(
        ["bash", "-e", "-c", recipe.commands],  # the reader's own shell
        check=False,
        capture_output=True,
        text=True,
        cwd=here,
        env={**os.environ, "PATH": shell_path},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_pages_hold_the_recipes_that_were_asked_for():
    """A recipe that lost its commands would otherwise pass."""
    recipes = _recipes()
    assert len(recipes) == 31
    assert all(" $SMALL " in recipe.commands.replace("\n", " \n") for recipe in recipes)


@pytest.mark.parametrize("recipe", _recipes(), ids=lambda recipe: recipe.title)
def test_recipe_runs_as_it_stands(recipe, tmp_path, rows_file, tiny_base, shell_path):
    """Every command succeeds, and every training run is recorded as succeeded."""
    if recipe.needs_model:
        shutil.copytree(tiny_base.directory, tmp_path / "my_model")
    said = _run(recipe, tmp_path, rows_file, shell_path)
    runs = sorted(tmp_path.glob("outputs/train/*/*/manifest.json"))
    trained = sum(
        " task=" not in line for line in recipe.commands.splitlines() if "mens_exp" in line
    )
    assert len(runs) == trained
    assert {Manifest.read(run).status for run in runs} == {Status.SUCCEEDED}
    if recipe.files.keys() & {"my_callbacks.py"}:
        assert "said at step 2" in said
        assert "said at step 1" not in said
