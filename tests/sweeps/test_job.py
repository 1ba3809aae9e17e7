from __future__ import annotations

import errno
import json

import pytest

from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import Job
from mens_exp.config.compose import config_digest, from_yaml
from mens_exp.sweeps import job as job_module
from mens_exp.sweeps import multirun
from mens_exp.sweeps.job import ACCEPT_CHANGES
from mens_exp.sweeps.plan import plan_sweep


@pytest.fixture
def rows(rows_file, tmp_path):
    """A copy of the rows that a test may change."""
    copy = tmp_path / "rows.jsonl"
    copy.write_bytes(rows_file.read_bytes())
    return copy


@pytest.fixture
def frozen(tiny_run, rows, tmp_path, monkeypatch):
    """A planning job, frozen as by the launcher."""
    monkeypatch.chdir(tmp_path)
    usual = [text for text in tiny_run if not text.startswith("data.path")]
    planned = plan_sweep([*usual, f"data.path={rows}", "task=plan", "seed=7"])
    run = RunDir(tmp_path / "job")
    multirun.freeze(planned.jobs[0], run.path, job_module.code_digest())
    return run


def refused(run, capsys):
    assert job_module.main([str(run.path)]) == 2
    assert not run.manifest.exists()
    return " ".join(capsys.readouterr().err.split())


def test_a_job_runs_what_was_frozen(frozen):
    """Its record has the overrides, the digest and the choices of the cell."""
    before = frozen.config.read_bytes()
    assert job_module.main([str(frozen.path)]) == 0
    manifest, job = Manifest.read(frozen.manifest), Job.read(frozen.job)
    assert (manifest.status, manifest.seed, manifest.task) == (Status.SUCCEEDED, 7, "plan")
    assert manifest.config_digest == job.config_digest == config_digest(from_yaml(frozen.config))
    assert manifest.overrides == job.overrides
    assert manifest.choices["model"] == "tiny_llama"
    assert (manifest.contract or {})["digest"] == job.contract
    assert frozen.config.read_bytes() == before
    assert not frozen.job_lock.exists()


def test_a_changed_configuration_is_refused(frozen, capsys):
    """Even with sweep.changes=accept, because the configuration defines the cell."""
    frozen.config.write_text(frozen.config.read_text("utf-8").replace("seed: 7", "seed: 8"))
    assert "the frozen configuration has changed" in refused(frozen, capsys)
    assert job_module.main([str(frozen.path), ACCEPT_CHANGES]) == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (MemoryError(), "there is not enough memory"),
    ],
)
def test_what_the_machine_refuses_before_the_run_is_no_bug(
    frozen, monkeypatch, capsys, error, said
):
    """Exit code 3, which tells a search that the trial may run again."""

    def refuses(_):
        raise error

    monkeypatch.setattr(Job, "read", refuses)
    assert job_module.main([str(frozen.path)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_another_error_before_the_run_is_a_bug(frozen, monkeypatch):
    """The exception is not caught."""

    def fails(_):
        raise FileNotFoundError("no such file")

    monkeypatch.setattr(Job, "read", fails)
    with pytest.raises(FileNotFoundError):
        job_module.main([str(frozen.path)])


def test_changed_code_is_refused_unless_told(frozen, monkeypatch, capsys):
    """The message says how to run it anyway."""
    monkeypatch.setattr(job_module, "code_digest", lambda: "0" * 64)
    said = refused(frozen, capsys)
    assert "the code of mens_exp has changed since the launch" in said
    assert said.startswith("the code")  # one line, which becomes the job's reason
    assert "sweep.changes=accept" in said
    assert job_module.main([str(frozen.path), ACCEPT_CHANGES]) == 0


def test_changed_rows_are_refused(frozen, rows, capsys):
    """The contract at launch includes the digest of the rows."""
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "one", "response": "more"}) + "\n")
    assert "the files that it names have changed since the launch" in refused(frozen, capsys)


def test_changed_classes_of_the_user_are_refused(frozen, tmp_path, capsys):
    """Their modules are hashed at launch, too."""
    job = Job.read(frozen.job)
    job.own_files = {"mine.py": "0" * 64}
    job.write(frozen.job)
    (tmp_path / "mine.py").write_text("pass\n")
    assert "mine.py: has changed since the launch" in refused(frozen, capsys)


def test_a_job_killed_after_its_success_renders_its_report(frozen):
    """The manifest stays as it is."""
    assert job_module.main([str(frozen.path)]) == 0
    before = frozen.manifest.read_bytes()
    frozen.report.unlink()
    assert job_module.main([str(frozen.path)]) == 0
    assert frozen.report.is_file()
    assert frozen.manifest.read_bytes() == before


def test_what_does_not_train_begins_anew(frozen, write_manifest):
    """The files of the earlier attempt are moved to attempt_1."""
    write_manifest(frozen, Status.STARTED, task="plan", run_id="before")
    assert job_module.main([str(frozen.path)]) == 0
    assert Manifest.read(frozen.manifest).status is Status.SUCCEEDED
    aside = Manifest.read(frozen.path / "attempt_1" / "manifest.json")
    assert aside.run_id == "before"


def test_a_second_process_of_one_job_is_refused(frozen, capsys):
    """A launcher may have died before it recorded the first process."""
    from mens_exp.artifacts.host import run_lock

    with run_lock(frozen.job_lock):
        assert "a process is still working on this run" in refused(frozen, capsys)


def test_rows_that_are_not_there_are_told_in_one_line(frozen, rows, capsys):
    """For example, if a sweep is resumed from another directory."""
    rows.unlink()
    assert job_module.main([str(frozen.path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert str(rows) in said
