"""A Hub model through the command line: pinned, recorded, resumed and evaluated."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.compose import from_yaml, typed
from mens_exp.config.model import HfModel
from mens_exp.layout import hub as hub_snapshot

NAME = "lab/tiny-llama"
ON_HUB = ["model=hf", f"model.id={NAME}"]


@pytest.fixture
def published(hub, tiny_base):
    """tiny_llama on the stand-in hub, as its first commit."""
    repository = hub.new()
    files = {file.name: file.read_bytes() for file in tiny_base.directory.iterdir()}
    repository.commit(files | {"README.md": b"---\nlicense: mit\n---\n"})
    hub.repositories[NAME] = repository
    return repository


def move_on(published):
    """Push other weights to the branch, as its owner may at any time."""
    files = dict(published.commits[published.refs["main"]])
    del files["model.safetensors"]
    files["config.json"] = b"{}"
    published.commit(files)
    hub_snapshot.forget()


def test_the_commit_is_recorded_and_held_to(
    published,
    tiny_base,
    train_in,
    tmp_path,
    monkeypatch,
):
    """Trained, resumed after the branch has moved, and evaluated offline."""
    commit = published.refs["main"]
    run = train_in(tmp_path / "run", *ON_HUB, "trainer.max_steps=2")
    inputs = Manifest.read(run.manifest).inputs
    assert inputs["base_source"] == "hub"
    assert (inputs["base_id"], inputs["base_revision"]) == (NAME, commit)
    assert (inputs["base_model"], inputs["license"]) == (NAME, "mit")
    assert inputs["base_weights_sha256"] == tiny_base.weights_sha256
    assert "trust_remote_code" not in inputs
    stored = typed(from_yaml(run.config)).model
    assert isinstance(stored, HfModel)
    assert stored.revision == commit
    peft = json.loads((run.peft / "adapter_config.json").read_text("utf-8"))
    assert (peft["base_model_name_or_path"], peft["revision"]) == (NAME, commit)

    move_on(published)
    assert cli.main([f"resume={run.path}", "trainer.max_steps=3"]) == 0
    assert Manifest.read(run.manifest).inputs["base_revision"] == commit

    hub_snapshot.forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    scored = tmp_path / "scored"
    assert (
        cli.main(
            [
                "task=evaluate",
                "logger=none",
                f"path={run.path}",
                "suite=heldout_syntax",
                "suite.items=1",
                "suite.max_new_tokens=40",
                f"hydra.run.dir={scored}",
            ]
        )
        == 0
    )
    assert json.loads((scored / "manifest.json").read_text("utf-8"))["inputs"]["base_id"] == NAME


def test_the_plan_says_what_will_be_downloaded(
    published,
    hub,
    tiny_base,
    train_in,
    tmp_path,
    capsys,
):
    """The plan has bytes and commit; of the weights, only a header is fetched."""
    run = train_in(tmp_path / "plan", *ON_HUB, "task=plan")
    plan = json.loads(run.plan.read_text("utf-8"))
    size = (tiny_base.directory / "model.safetensors").stat().st_size
    assert plan["download_bytes"] == size
    assert plan["model"] == f"{NAME} at {published.refs['main']}"
    assert "of weights, first" in capsys.readouterr().out
    assert len(hub.asked("model.safetensors")) <= 2  # ranges of the header


def test_a_gated_model_is_refused_before_a_run_exists(
    published,
    train_in,
    tmp_path,
    capsys,
):
    """Exit code 2, together with other problems of the command."""
    published.gated = True
    train_in(tmp_path / "run", *ON_HUB, "lora.r=0", code=2)
    said = " ".join(capsys.readouterr().err.split())
    assert "hf auth login" in said
    assert "lora.r" in said
    assert not (tmp_path / "run").exists()


def test_out_of_reach_and_not_cached_is_the_environments_fault(
    published,
    train_in,
    tmp_path,
    monkeypatch,
    capsys,
):
    """Exit code 3 without a run directory."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    train_in(tmp_path / "run", *ON_HUB, code=3)
    assert "HF_HUB_OFFLINE is set" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_wrong_shapes_are_told_before_the_download(
    published,
    hub,
    tiny_base,
    train_in,
    tmp_path,
    capsys,
):
    """The headers show that a projection has another width."""
    tensors = load_file(tiny_base.directory / "model.safetensors")
    key = "model.layers.1.mlp.down_proj.weight"
    tensors[key] = tensors[key][:, :64].contiguous()
    files = dict(published.commits[published.refs["main"]])
    published.commit(files | {"model.safetensors": save(tensors, {"format": "pt"})})
    train_in(tmp_path / "run", *ON_HUB, code=2)
    assert "weights disagree with config.json" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.revision=main", "has no effect on a directory"),
        ("model.trust_remote_code=true", "the model has no custom code"),
    ],
)
def test_settings_without_effect_are_refused(
    tiny_base,
    train_in,
    tmp_path,
    capsys,
    override,
    said,
):
    """A directory has no revisions, and this one has no code."""
    model = ["model=hf", f"model.id={tiny_base.directory}"]
    train_in(tmp_path / "run", *model, override, code=2)
    assert said in " ".join(capsys.readouterr().err.split())
