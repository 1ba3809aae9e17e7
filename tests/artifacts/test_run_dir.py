from __future__ import annotations

import json
from pathlib import Path

import pytest

from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.errors import RequestError


def make_run(path, started_utc):
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"started_utc": started_utc}))
    return path


def test_the_names_in_a_run_directory_are_the_documented_ones():
    """Every name in the layout is spelled out."""
    run = RunDir(Path("r"))
    names = {
        run.manifest: "manifest.json",
        run.config: "config.yaml",
        run.plan: "plan.json",
        run.telemetry: "telemetry.jsonl",
        run.checkpoints: "checkpoints",
        run.adapter: "adapter",
        run.peft: "adapter/peft",
        run.chat_template: "chat_template.jinja",
        run.scorecard: "scorecard.json",
        run.events: "events.jsonl",
        run.validation: "validation.jsonl",
        run.report: "report.html",
        run.model_card: "MODEL_CARD.md",
        run.run_summary: "run_summary.json",
        run.skip_stats: "training_skip_stats.json",
        run.wandb: "wandb",
        run.checkpoint(20): "checkpoints/step_00000020.ckpt",
    }
    assert {path.as_posix(): f"r/{name}" for path, name in names.items()} == {
        f"r/{name}": f"r/{name}" for name in names.values()
    }


def test_the_last_checkpoint_is_of_the_highest_step(tmp_path):
    """Steps compare as numbers, and other files do not count."""
    run = RunDir(tmp_path)
    run.checkpoints.mkdir()
    for step in (9, 100_000_000, 20):
        run.checkpoint(step).write_text("")
    (run.checkpoints / ".step_99.ckpt.tmp").write_text("")
    assert run.last_checkpoint() == run.checkpoint(100_000_000)


def test_a_run_without_checkpoints_has_no_last_one(tmp_path):
    """The directory may be missing or empty."""
    run = RunDir(tmp_path)
    assert run.last_checkpoint() is None
    run.checkpoints.mkdir()
    assert run.last_checkpoint() is None


def test_latest_is_the_run_that_started_last(tmp_path):
    """At any depth, by the start time in the record, not by mtime; a damaged record is skipped."""
    outputs = tmp_path / "outputs"
    make_run(outputs / "train" / "b", "2026-11-20T05:58:01.123Z")
    newest = make_run(outputs / "train" / "sweep" / "1", "2026-11-21T00:00:00.000Z")
    make_run(outputs / "plan" / "c", "2026-11-20T23:59:59.999Z")
    damaged = make_run(outputs / "z", "")
    (damaged / "manifest.json").write_text("{")
    assert resolve("latest", tmp_path).path == newest


@pytest.mark.parametrize("name", ["tickets", "sweep/0_seed"])
def test_a_run_that_hydra_put_elsewhere_is_known(tmp_path, name):
    """hydra.run.dir or hydra.sweep.dir; other manifests and nested runs are ignored."""
    make_run(tmp_path / "outputs" / "train" / "b", "2026-11-20T05:58:01.123Z")
    newest = make_run(tmp_path / name, "2026-11-21T00:00:00.000Z")
    make_run(newest / "inside", "2026-11-23T00:00:00.000Z")
    make_run(tmp_path / "a" / "b" / "c", "2026-11-23T00:00:00.000Z")
    make_run(tmp_path / ".hidden", "2026-11-23T00:00:00.000Z")
    for number, text in enumerate(('{"name": "an app"}', "[]", "{", '{"started_utc": 7}')):
        (tmp_path / f"app{number}").mkdir()
        (tmp_path / f"app{number}" / "manifest.json").write_text(text)
    assert resolve("latest", tmp_path).path == newest
    with pytest.raises(RequestError) as caught:
        resolve(f"{newest}x", tmp_path)
    assert f"the nearest is {newest.as_posix()}" in str(caught.value)


def test_latest_is_refused_where_there_is_no_run(tmp_path):
    """The message says what to do next."""
    with pytest.raises(RequestError, match=r"no run found.*Next: train one first"):
        resolve("latest", tmp_path)


def test_a_directory_with_a_manifest_is_a_run(tmp_path):
    """It need not be under outputs/."""
    path = make_run(tmp_path / "elsewhere", "")
    assert resolve(str(path), tmp_path / "here") == RunDir(path)


def test_a_misspelt_run_is_refused_with_the_nearest(tmp_path):
    """A path with one wrong digit gets the intended run as a suggestion."""
    path = make_run(tmp_path / "outputs" / "train" / "20261120_abcd", "")
    with pytest.raises(RequestError) as caught:
        resolve(str(path.with_name("20261120_abce")), tmp_path)
    assert "no such run directory" in str(caught.value)
    assert f"the nearest is {path.as_posix()}" in str(caught.value)


def test_a_directory_without_a_manifest_is_refused(tmp_path):
    """If there is no run at all, the message says to train one first."""
    with pytest.raises(RequestError, match=r"no manifest.json in this directory") as caught:
        resolve(str(tmp_path), tmp_path / "here")
    assert "there is none under" in str(caught.value)
    assert "train first: python -m mens_exp" in str(caught.value)
