from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from mens_exp import load_run

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
READING = ("01-review-a-run", "02-compare-arms", "03-where-nf4-hurts")
TRAINING = "04-train-and-compare"
NOTEBOOKS = (*READING, TRAINING)
STUDY = FOLDER / "records" / "study"
READERS = {"artifacts", "report"}
HEAVY = {"bitsandbytes", "datasets", "lightning", "peft", "torch", "transformers", "wandb"}
STRICT = "import warnings\nwarnings.simplefilter('error')"
# PEFT 0.21 uses the old name in transformers 5, as noted in pyproject.toml.
OLD_NAME = (
    "warnings.filterwarnings('ignore', '`is_gradient_checkpointing` is deprecated')\n"
    "warnings.filterwarnings('ignore', '`torch.jit.script_method` is deprecated')"
)
LAX = "warnings.simplefilter('default')  # the kernel's own way of ending is not ours"
LOADED = f"import sys\nprint('loaded:', sorted(set({sorted(HEAVY)!r}) & sys.modules.keys()))"


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_of(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def imported(notebook):
    """Yield the dotted name of every module that a notebook's cells import."""
    for node in ast.walk(ast.parse("\n".join(code_of(notebook)))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def forbidden(notebook):
    """Return the modules a notebook imports beyond the readers and light libraries."""
    return {
        name
        for name in imported(notebook)
        if name.split(".")[0] in HEAVY
        or (name.split(".")[0] == "mens_exp" and name.split(".")[1:2] not in [[x] for x in READERS])
    }


def dirty(notebook):
    """Return the ids of cells that have outputs or execution counts."""
    return [
        cell.id
        for cell in notebook.cells
        if cell.get("outputs") or cell.get("execution_count") is not None
    ]


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Run a notebook with warnings as errors; return it with its outputs.

    With `failing`, return instead what the failing cell said.
    """
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.delenv("MENS_EXP_NOTEBOOK_PATH", raising=False)

    def executed(notebook, *, failing=False):
        last = [new_code_cell(LOADED), new_code_cell(LAX)]
        notebook.cells = [new_code_cell(f"{STRICT}\n{OLD_NAME}"), *notebook.cells, *last]
        source, target, sockets = (tmp_path / name for name in ("in.ipynb", "out.ipynb", "k"))
        nbformat.write(notebook, source)
        script = Path(__file__).with_name("execute.py")
        words = [sys.executable, script, source, target, FOLDER, sockets]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=400)
        if failing:
            assert "CellExecutionError" in done.stderr
            return re.sub(r"\x1b\[[\d;]*m", "", done.stderr)
        assert done.returncode == 0, done.stderr
        return nbformat.read(target, as_version=4)

    return executed


def outputs(notebook, kind):
    return [
        one for cell in notebook.cells for one in cell.get("outputs", []) if one.output_type == kind
    ]


def text_of(notebook):
    shown = [one.data.get("text/plain", "") for one in outputs(notebook, "display_data")]
    return "\n".join(shown + [one.text for one in outputs(notebook, "stream")])


def test_every_notebook_is_tested():
    """The lists above must name every notebook, and no other."""
    found = {path.stem for path in FOLDER.glob("*.ipynb")}
    assert found == {*NOTEBOOKS, "colab"}  # test_colab.py runs the training one


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_stored_without_outputs(name):
    """Cells have no execution count and no output."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert dirty(notebook) == []
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}


@pytest.mark.parametrize(
    "left",
    [{"execution_count": 3}, {"outputs": [nbformat.v4.new_output("stream", text="5.4")]}],
)
def test_notebook_with_an_output_is_found(left):
    """Control: the check finds a count without an output, and the reverse."""
    assert len(dirty(new_notebook(cells=[new_code_cell("1", **left)]))) == 1


@pytest.mark.parametrize("name", READING)
def test_notebook_imports_readers_only(name):
    """A notebook needs only records and their renderings, and cannot train."""
    assert forbidden(read(name)) == set()
    assert any(module.startswith("mens_exp.artifacts.") for module in imported(read(name)))


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "def f():\n    from mens_exp.training.build import trainer",
        "import mens_exp.cli",
        "from mens_exp import tasks",
    ],
)
def test_import_of_training_is_found(source):
    """Control: the check finds libraries, our packages, nested imports and the package itself."""
    assert len(forbidden(new_notebook(cells=[new_code_cell(source)]))) == 1


@pytest.mark.parametrize("name", READING)
def test_notebook_runs_to_its_end(execute, name):
    """On the shipped records no cell fails, warns or loads torch, and each plot is drawn."""
    done = execute(read(name))
    drawn = [one for one in outputs(done, "display_data") if "image/png" in one.data]
    assert len(drawn) == "\n".join(code_of(done)).count("plt.show()")
    assert [one.text for one in outputs(done, "stream") if one.name == "stderr"] == []
    assert "loaded: []" in text_of(done)


def test_a_notebook_trains_and_compares(execute, tmp_path, monkeypatch):
    """At most ten cells make four runs, their plots, a verdict and a model that answers."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setenv("MENS_EXP_NOTEBOOK_PATH", str(place))
    notebook = read(TRAINING)
    assert len(code_of(notebook)) <= 10
    assert {name.split(".")[0] for name in imported(notebook)} & HEAVY == set()
    done = execute(notebook)
    runs = [load_run(file.parent) for file in place.glob("outputs/train/default/*/manifest.json")]
    assert sorted((run.config.seed, run.config.lora.r) for run in runs) == [
        (seed, rank) for seed in (1, 2) for rank in (2, 16)
    ]
    shown = [one.data.get("text/html", "") for one in outputs(done, "display_data")]
    bars = [html for html in shown if "<progress" in html]
    assert len(bars) == 4
    assert all('value="6" max="6"' in bar for bar in bars)
    results = "".join(one.data.get("text/html", "") for one in outputs(done, "execute_result"))
    for word in ("Validation loss", "tiny_llama", "lora.r=2", "≈"):
        assert word in results
    assert [one.text for one in outputs(done, "stream") if one.name == "stderr"] == []
    [page] = place.glob("outputs/compare/default/*/compare.html")
    assert f"The page: {page}" in text_of(done)
    assert "PeftModelForCausalLM" in str(outputs(done, "execute_result"))


def test_notebooks_show_what_the_records_hold(execute):
    """All six runs exist, each with the manifest that was compared."""
    shown = text_of(execute(read("02-compare-arms")))
    rows = [line for line in shown.splitlines() if "│ lora.r=" in line and "5.6380" in line]
    assert len(rows) == 6
    assert all(row.rstrip(" │").endswith("yes") for row in rows)


def test_variable_names_another_run(execute, tmp_path, monkeypatch):
    """Another run can be read, even one without a step or a score."""
    shutil.copytree(STUDY / "0_6fc0dd12", tmp_path / "run")
    (tmp_path / "run" / "scorecard.json").unlink()
    telemetry = tmp_path / "run" / "telemetry.jsonl"
    lines = telemetry.read_text("utf-8").splitlines(keepends=True)
    telemetry.write_text("".join(one for one in lines if '"event":"step"' not in one), "utf-8")
    monkeypatch.setenv("MENS_EXP_NOTEBOOK_PATH", str(tmp_path / "run"))
    shown = text_of(execute(read("01-review-a-run")))
    assert "lora.r=2" in shown
    assert "The run has no scorecard (suite=none)." in shown


@pytest.mark.parametrize("name", READING)
def test_directory_without_a_run_is_refused(execute, tmp_path, monkeypatch, name):
    """The reader's message says what is missing."""
    monkeypatch.setenv("MENS_EXP_NOTEBOOK_PATH", str(tmp_path))
    said = execute(read(name), failing=True)
    assert "no manifest.json in this directory" in said


def test_warning_in_a_cell_fails(execute):
    """Warnings of libraries are errors in notebooks as in tests."""
    cell = new_code_cell("import warnings\nwarnings.warn('old name', DeprecationWarning)")
    said = execute(new_notebook(cells=[cell]), failing=True)
    assert "DeprecationWarning: old name" in said
