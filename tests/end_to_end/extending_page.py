"""The files and commands in docs/how-to/extending.md, read from the page itself."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "extending.md"
TINY = [
    "experiment=smoke",
    "suite=none",
    "suite.items=0",
    "trainer=cpu",
    "data=jsonl",
    "data.val_frac=0.1",
]

# The experiment sets values that only the built-in schedules have.
WITHOUT_EXPERIMENT = [
    *("model=tiny_llama", "logger=none", "trainer.max_steps=4", "data.seq_len=256"),
    *TINY[1:],
]


def files():
    """Return each file on the page by its path: a name in backquotes, followed by its block."""
    block = re.compile(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return dict(block.findall(PAGE.read_text("utf-8")))


def commands():
    """Return the overrides of each command on the page."""
    lines = re.findall(r"^    python -m mens_exp (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def write_into(directory):
    """Write every file of the page."""
    for name, text in files().items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
