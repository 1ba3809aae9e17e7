from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mens_exp.errors import MensError
from mens_exp.export.handoff import (
    HANDOFF_FILE,
    BackendFamily,
    Handoff,
    model_directory,
    occupied,
    write_handoff,
)


def exported(directory, **changes):
    directory.mkdir(exist_ok=True)
    values = {
        "base_model": "base",
        "artifact_dir": ".",
        "tokenizer_source": ".",
        "prompt_format": "chatml",
    }
    write_handoff(Handoff(backend_family=BackendFamily.OTHER, **values | changes), directory)
    return directory


def test_a_complete_directory_is_itself(tiny_base, tmp_path):
    """Its hand-off record, if any, makes no difference."""
    assert model_directory(str(tiny_base.directory)) == tiny_base.directory
    copy = Path(shutil.copytree(tiny_base.directory, tmp_path / "m"))
    assert model_directory(str(exported(copy))) == copy


def test_an_export_names_its_model(tiny_base, tmp_path):
    """The record's artifact_dir is relative to the export."""
    export = exported(tmp_path / "export", artifact_dir="model")
    shutil.copytree(tiny_base.directory, export / "model")
    assert model_directory(str(export)) == export / "model"


def test_an_adapter_is_sent_to_the_merge(finished):
    """A run with an adapter, its adapter directory and its PEFT directory are all refused."""
    for path in (finished.path, finished.adapter, finished.peft):
        with pytest.raises(MensError, match="is an adapter, not a complete model") as refused:
            model_directory(str(path))
        assert f"task=merge path={path} out=<directory>" in str(refused.value)


def test_the_weights_of_a_full_run_are_its_model(tiny_base, tmp_path):
    """A run that trained every weight stores them in weights/."""
    run = tmp_path / "run"
    shutil.copytree(tiny_base.directory, run / "weights")
    (run / "manifest.json").write_text("{}", encoding="utf-8")
    assert model_directory(str(run)) == run / "weights"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "is not a complete model directory"),
        ({"manifest.json": "{}"}, "is not a complete model directory"),
        ({"x.gguf": ""}, "llama-server -m .*x.gguf"),
        ({"config.json": "{}"}, "tokenizer.json: is missing"),
        ({"config.json": "{}", "tokenizer.json": "{}"}, "contains no safetensors weights"),
        ({HANDOFF_FILE: "{}"}, "not this format"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, files, said):
    """The message names what is missing, or the program that reads such a file."""
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(MensError, match=said):
        model_directory(str(tmp_path))


def test_a_path_that_is_not_there_is_named(tmp_path):
    """The message says that the path does not exist."""
    with pytest.raises(MensError, match="which does not exist"):
        model_directory(str(tmp_path / "absent"))


def test_weights_that_config_json_denies_are_refused(tiny_base, tmp_path):
    """Loading would initialize a missing layer at random."""
    copy = shutil.copytree(tiny_base.directory, tmp_path / "m")
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] += 1
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(MensError, match=r"weights disagree with config\.json"):
        model_directory(str(copy))


def test_only_an_export_is_written_over(tmp_path):
    """The target may be new, empty or an earlier export."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x", encoding="utf-8")
    exported(tmp_path / "earlier")
    for free in (None, str(tmp_path / "new"), str(tmp_path / "empty"), str(tmp_path / "earlier")):
        assert occupied(free) == []
    for taken in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        (problem,) = occupied(str(taken))
        assert "already exists and is not an earlier export" in str(problem)
