from __future__ import annotations

import shutil
import sys
from importlib import metadata
from types import SimpleNamespace

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.report.plan_view import State
from mens_exp.tasks import doctor


def found(name):
    (finding,) = [one for one in doctor.examine() if one.name == name]
    return finding


def test_the_doctor_leaves_a_record(tmp_path, capsys):
    """Every finding is printed and recorded; as this machine runs the tests, none is bad."""
    assert cli.main(["task=doctor", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    manifest = Manifest.read(RunDir(tmp_path / "run").manifest)
    assert manifest.status is Status.SUCCEEDED
    names = [finding["name"] for finding in manifest.facts["findings"]]
    assert {"Python", "torch", "4 bits on cpu", "memory", "cache", "outputs", "W&B"} <= set(names)
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_a_bad_finding_ends_with_the_code_of_the_environment(tmp_path, monkeypatch, capsys):
    """Exit code 3, after every finding has been printed."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    assert cli.main(["task=doctor", f"hydra.run.dir={tmp_path / 'run'}"]) == 3
    shown = capsys.readouterr()
    assert "W&B" in shown.out
    assert "cache, outputs" in shown.err
    assert Manifest.read(RunDir(tmp_path / "run").manifest).status is Status.FAILED


def test_other_settings_are_refused_as_without_effect():
    """The doctor examines the machine, so settings of a run have no effect and are refused."""
    assert cli.main(["task=doctor", "lora.r=8"]) == 2


def test_a_sandbox_is_probed(sandbox):
    """A sandbox that is present is probed for what it must contain."""
    finding = found("sandbox")
    assert (finding.state, finding.remedy) == (State.GOOD, None)
    assert "every hostile probe contained" in finding.found


def test_a_missing_sandbox_is_a_note_with_its_remedy(monkeypatch):
    """A missing sandbox is only a note with its remedy, as most runs execute nothing."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    finding = found("sandbox")
    assert finding.state is State.NOTE
    assert "apt-get install bubblewrap" in str(finding.remedy)


def test_a_package_out_of_its_range_is_bad(monkeypatch):
    """A package outside its supported range is named with the command that fixes it."""
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: "0.1" if n == "peft" else real(n))
    finding = found("peft")
    assert (finding.state, finding.found) == (State.BAD, "0.1")
    assert finding.remedy is not None
    assert finding.remedy.startswith("pip install 'peft")


def test_an_absent_package_is_bad(monkeypatch):
    """An absent package is as bad as one of a wrong version."""
    real = metadata.version

    def version(name):
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert found("peft").found == "not installed"


def test_an_old_python_is_bad(monkeypatch):
    """Python 3.10 lacks what the code uses."""
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    assert found("Python").state is State.BAD


def test_a_driver_without_a_cuda_build_is_bad(monkeypatch):
    """The CPU build of torch on a GPU machine, the commonest mistake, is bad."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", {"nvidia-smi": "/usr/bin/nvidia-smi"}.get)
    finding = found("torch")
    assert finding.state is State.BAD
    assert "CUDA build" in (finding.remedy or "")


def test_little_memory_is_a_note(monkeypatch):
    """Little memory is only a note, as smaller jobs still run."""
    real = doctor.psutil.virtual_memory()
    monkeypatch.setattr(
        doctor.psutil, "virtual_memory", lambda: real._replace(available=1_000_000_000)
    )
    assert found("memory").state is State.NOTE


def test_a_configured_account_is_told_without_its_key(
    monkeypatch,
):
    """A configured account is reported, but no finding contains the key."""
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    finding = found("W&B")
    assert "an account is configured" in finding.found
    assert "very-secret" not in str(finding)
