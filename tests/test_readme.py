from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mens_exp.config.overrides import check

ROOT = Path(__file__).resolve().parents[1]


def _commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    marked = re.search(r"<!-- recipes: start.*?-->(.*?)<!-- recipes: end -->", text, re.DOTALL)
    assert marked is not None
    return re.findall(r"^    python -m mens_exp(.*)$", marked[1], re.MULTILINE)


def test_readme_has_five_recipes():
    """The markers still enclose what they should."""
    assert len(_commands()) == 5


@pytest.mark.parametrize("command", _commands())
def test_readme_recipe_composes(command):
    """Each quoted command is accepted as it stands."""
    words = shlex.split(command)
    multirun = "-m" in words
    checked = check([word for word in words if word != "-m"], multirun=multirun)
    assert [str(problem) for problem in checked.problems] == []
    assert len(checked.cells) == (4 if multirun else 1)


def test_readme_picture_is_there():
    """The picture of a real report is part of the repository."""
    picture = re.search(r"!\[.*?\]\((.*?)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert picture is not None
    assert (ROOT / picture[1]).read_bytes().startswith(b"\x89PNG")


def test_make_targets_named_in_contributing_exist():
    """CONTRIBUTING quotes no command that the Makefile lacks."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^    make (\w+)", guide, re.MULTILINE)
    assert quoted
    assert [name for name in quoted if f"\n{name}:" not in makefile] == []
