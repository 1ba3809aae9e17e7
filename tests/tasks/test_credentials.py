"""Planted credentials, searched for in everything that a run writes."""

from __future__ import annotations

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.training.module import TrainingModule

PASSWORD = "q7Zp2Lk9" + "Vx4Tn8Rw1Yb6"
URL = f"https://user:{PASSWORD}@host/path"


def holding(directory, secret=PASSWORD):
    """List the files below a directory that contain a secret, in text or in binary data."""
    return [
        str(path.relative_to(directory))
        for path in sorted(directory.rglob("*"))
        if path.is_file() and secret.encode() in path.read_bytes()
    ]


def test_a_url_in_the_environment_reaches_no_record(train_in, tmp_path, monkeypatch):
    """Manifest, telemetry, report, model card and W&B mirror; all but the last once had it."""
    monkeypatch.setenv("MENS_EXP_NOTE", URL)
    run = train_in(tmp_path / "run", "logger=wandb")
    assert holding(run.path) == []
    note = Manifest.read(run.manifest).provenance["environment"]["MENS_EXP_NOTE"]
    assert note.startswith("https://")
    assert note.endswith("characters)@host/path")


def test_a_url_in_an_error_reaches_no_record(train_in, tmp_path, monkeypatch):
    """The record names what failed in a library, without the password in its URL."""

    def step(self, batch, index):
        raise OSError(f"cannot reach {URL}")

    monkeypatch.setattr(TrainingModule, "training_step", step)
    run = train_in(tmp_path / "run", code=1)
    assert holding(run.path) == []
    error = Manifest.read(run.manifest).error
    assert error["message"].startswith("cannot reach https://")


@pytest.mark.parametrize(
    "override",
    [
        f"data.path={URL}",
        "hydra.job.name=hf_" + PASSWORD * 2,
        f"suite.path='/home/api_key={PASSWORD}/x'",
    ],
)
def test_a_credential_in_a_setting_is_refused_before_anything_is_written(
    tiny_run, tmp_path, capsys, override
):
    """The message names the setting, not the credential."""
    place = tmp_path / "run"
    assert cli.main([*tiny_run, override, f"hydra.run.dir={place}"]) == 2
    said = capsys.readouterr().err
    assert "contains what looks like a credential" in said
    assert PASSWORD not in said
    assert not place.exists()


def test_a_bundle_holds_none(train_in, tmp_path, monkeypatch):
    """A bundle leaves the machine, and must hold no credential either."""
    monkeypatch.setenv("MENS_EXP_NOTE", URL)
    run = train_in(tmp_path / "run")
    out = tmp_path / "bundle.tar.gz"
    assert (
        cli.main(
            [
                "task=export",
                f"path={run.path}",
                f"out={out}",
                "export.allow_absolute_paths=true",
                f"hydra.run.dir={tmp_path / 'own'}",
            ]
        )
        == 0
    )
    assert holding(tmp_path) == []
