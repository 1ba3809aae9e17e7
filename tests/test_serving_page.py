from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mens_exp.config.overrides import check
from mens_exp.export.handoff import serve_command

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "serving.md"


def _commands():
    blocks = re.findall(r"<!-- composes -->\n```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("command", _commands())
def test_a_command_of_the_page_composes(command):
    """Each is valid as it stands."""
    assert command.startswith("python -m mens_exp task=")
    checked = check(shlex.split(command)[3:])
    assert [str(problem) for problem in checked.problems] == []


def test_the_page_has_commands_and_quotes_the_vllm_command_that_is_written():
    """There are nine commands between the markers, and the vLLM command is current."""
    assert len(_commands()) == 9
    base = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert serve_command(base, "mine", "adapter/peft", 16) in PAGE.read_text("utf-8")
