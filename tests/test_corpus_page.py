from __future__ import annotations

import re
import shlex
from pathlib import Path

from mens_exp.config.corpus import STEPS
from mens_exp.config.overrides import check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "corpus.md"


def test_the_command_of_the_page_composes():
    """The command is valid as it stands."""
    (command,) = re.findall(r"<!-- composes -->\n    (.*)\n", PAGE.read_text("utf-8"))
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "mens_exp", "task=corpus"]
    assert [str(problem) for problem in check(words[3:]).problems] == []


def test_the_page_tells_of_every_step():
    """Each step has a row in the table."""
    text = PAGE.read_text("utf-8").partition("## What is in the directory")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(STEPS)
