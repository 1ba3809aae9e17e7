from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard, read_item_events
from mens_exp.errors import RequestError
from mens_exp.tasks.evaluate import subject_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow  # whole runs

SUITE = ["suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=40"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with one training run, and a later evaluation of it."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def trained(train_in: Callable[..., RunDir], place: Path) -> RunDir:
    return train_in(place / "outputs" / "train" / "default" / "a", *SUITE, "optim.lr=0.1")


@pytest.fixture(scope="module")
def evaluated(trained: RunDir, place: Path) -> RunDir:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        command = ["task=evaluate", "path=latest", *SUITE, "hydra.run.dir=outputs/evaluate/b"]
        assert cli.main(command) == 0
    return RunDir(place / "outputs" / "evaluate" / "b")


def test_evaluation_repeats_the_scorecard_of_training(trained: RunDir, evaluated: RunDir) -> None:
    """The saved adapter on a fresh graph answers as the trained graph did."""
    assert read_item_events(evaluated.events) == read_item_events(trained.events)
    assert Scorecard.read(evaluated.scorecard) == Scorecard.read(trained.scorecard)
    base, tuned = (e["completion"] for e in read_item_events(trained.events)[::2])
    assert base != tuned


def test_evaluation_is_a_run_of_its_own(trained: RunDir, evaluated: RunDir) -> None:
    """It names its subject and the inputs it used, and has a report."""
    manifest = Manifest.read(evaluated.manifest)
    assert (manifest.task, manifest.status) == ("evaluate", Status.SUCCEEDED)
    theirs = Manifest.read(trained.manifest).inputs
    assert manifest.inputs["base_weights_sha256"] == theirs["base_weights_sha256"]
    assert manifest.inputs["data"]["rows_sha256"] == theirs["data"]["rows_sha256"]
    assert evaluated.report.is_file()


def test_latest_is_still_the_training_run_after_an_evaluation(
    trained: RunDir, evaluated: RunDir, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation started later, and is not its own subject."""
    monkeypatch.chdir(place)
    assert evaluated.manifest.is_file()
    assert subject_of("latest").path.resolve() == trained.path.resolve()
    recorded = Manifest.read(evaluated.manifest).inputs["subject"]
    assert (place / recorded).resolve() == trained.path.resolve()


def test_an_evaluation_is_no_subject(evaluated: RunDir) -> None:
    """It has trained nothing."""
    with pytest.raises(RequestError, match=r"the run trained nothing.*\(evaluate\)"):
        subject_of(str(evaluated.path))


def test_a_run_without_an_adapter_is_refused_before_a_directory_is_made(
    broken: Callable[..., RunDir],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its status is named, and how to finish it."""
    run = broken(tmp_path / "run", 5)
    out = tmp_path / "evaluation"
    command = ["task=evaluate", f"path={run.path}", *SUITE, f"hydra.run.dir={out}"]
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert "the run has no adapter" in said
    assert "(cancelled)" in said
    assert f"resume={run.path}" in said
    assert not out.exists()


def test_an_unknown_path_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is made for a command that is refused."""
    out = tmp_path / "evaluation"
    assert cli.main(["task=evaluate", "path=nowhere", f"hydra.run.dir={out}"]) == 2
    assert "no such run directory" in capsys.readouterr().err
    assert not out.exists()


def test_another_base_than_in_training_is_refused(
    trained: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter says nothing about weights that it was not trained on."""
    moved = tmp_path / "moved"
    copied = RunDir(moved)
    shutil.copytree(trained.path, moved)
    text = copied.config.read_text(encoding="utf-8")
    copied.config.write_text(text.replace("init_seed: 0", "init_seed: 1"), encoding="utf-8")
    out = tmp_path / "evaluation"
    command = ["task=evaluate", f"path={moved}", *SUITE, f"hydra.run.dir={out}"]
    assert cli.main(command) == 2
    assert "base_weights_sha256: is not what the run was trained on" in capsys.readouterr().err
    assert Manifest.read(RunDir(out).manifest).status is Status.FAILED
