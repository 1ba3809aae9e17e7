from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mens_exp.config.overrides import check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "verdicts.md"
COMMANDS = re.findall(r"^    python -m mens_exp(.*)$", PAGE.read_text("utf-8"), re.MULTILINE)


def test_the_page_has_its_commands():
    """A sweep, three comparisons, and the three things that task=promote does."""
    assert len(COMMANDS) == 7


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_page_composes(command):
    """Each is accepted as it stands, but for the digest that only a scorecard knows."""
    words = shlex.split(command.replace("SHA256", "ab" * 32))
    checked = check([word for word in words if word != "-m"], multirun="-m" in words)
    assert [str(problem) for problem in checked.problems] == []
