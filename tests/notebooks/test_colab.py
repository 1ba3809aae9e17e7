from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from mens_exp.config.overrides import check

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "colab.ipynb"
SMALL = """\
MODEL = "model=tiny_llama"
RUN = "trainer=cpu trainer.max_steps=2 data.seq_len=256 schedule.warmup_steps=0 logger=none"
"""


def read():
    return nbformat.read(NOTEBOOK, as_version=4)


def commands():
    """Return each command in a cell, with its braces filled in from the notebook."""
    code = "\n".join(cell.source for cell in read().cells if cell.cell_type == "code")
    values = dict(re.findall(r'^([A-Z]+) = "(.*)"$', code, re.MULTILINE))
    return [
        line.format(**values)
        for line in re.findall(r"^!python -m mens_exp (.*)$", code, re.MULTILINE)
    ]


def test_the_notebook_is_stored_without_outputs_and_asks_for_a_gpu():
    """Git holds no outputs, and Colab reads the GPU request from the metadata."""
    notebook = read()
    nbformat.validate(notebook)
    assert notebook.metadata["accelerator"] == "GPU"
    assert not [cell.id for cell in notebook.cells if cell.get("outputs")]
    assert not [cell.id for cell in notebook.cells if cell.get("execution_count") is not None]


@pytest.mark.parametrize("command", commands()[3:])
def test_a_later_command_composes(command):
    """Each command that the test below does not run is accepted as it stands."""
    words = shlex.split(command)
    checked = check([word for word in words if word != "-m"], multirun="-m" in words)
    assert [str(problem) for problem in checked.problems] == []


def test_the_notebook_trains_on_example_rows_and_shows_the_report(
    tmp_path, monkeypatch, shell_path
):
    """It runs on two random layers up to both models' answers; its sweep is README's."""
    monkeypatch.setenv("PATH", shell_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    notebook = read()
    ids = [cell.id for cell in notebook.cells]
    assert len(commands()) == 6
    notebook.cells = notebook.cells[: ids.index("c-compare")]
    notebook.cells[ids.index("settings")].source = SMALL
    source, target, sockets, here = (
        tmp_path / name for name in ("in.ipynb", "out.ipynb", "k", "here")
    )
    here.mkdir()
    nbformat.write(notebook, source)
    script = Path(__file__).with_name("execute.py")
    words = [sys.executable, script, source, target, here, sockets]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    shown = nbformat.read(target, as_version=4).cells
    report = next(cell for cell in shown if cell.id == "c-report")
    assert "<html" in report.outputs[0].data["text/html"]
    asked = next(cell for cell in shown if cell.id == "c-chat-code")
    answers = "".join(output.text for output in asked.outputs)
    assert "tiny_llama" in answers
    assert "run" in answers
