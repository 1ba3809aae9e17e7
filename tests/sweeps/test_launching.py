"""The end of a sweep: its page and its messages."""

from __future__ import annotations

import errno
import io
import os
import shlex
import shutil
from types import SimpleNamespace

import pytest
from rich.console import Console

from mens_exp import cli
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import Job, JobState, SweepDir
from mens_exp.config.overrides import check
from mens_exp.sweeps import multirun
from mens_exp.sweeps.multirun import finish


@pytest.fixture
def ended(tmp_path, make_sweep):
    """A launcher whose only job ended with code 1."""
    directory = SweepDir(tmp_path)
    made = make_sweep({})
    made.write(directory.record)
    console = Console(file=io.StringIO(), width=200)
    return SimpleNamespace(directory=directory, record=made, console=console, run=lambda: 1)


def test_a_sweep_leaves_its_page_however_it_ended(ended):
    """The message has its path, and the command to resume."""
    assert finish(ended) == 1
    said = ended.console.file.getvalue()
    assert f"Report: {ended.directory.page}" in said
    assert "sweep.resume=" in said
    assert "1 waiting" in ended.directory.page.read_text(encoding="utf-8")


def test_what_would_run_nothing_is_no_next_step(ended):
    """A search without a trial left to run does not suggest to resume."""
    assert finish(ended, lambda: True) == 1
    said = ended.console.file.getvalue()
    assert "sweep.resume=" not in said
    assert "none runs again" in said


def test_a_job_killed_after_its_end_gets_its_pages(ended, finished, monkeypatch):
    """Its record says that it had succeeded; a page that cannot be written is named."""
    job = ended.record.jobs[0]
    job["state"] = JobState.SUCCEEDED
    run = RunDir(shutil.copytree(finished.path, ended.directory.path / job["directory"]))
    page, card = run.report.read_bytes(), run.model_card.read_bytes()
    run.model_card.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("mens_exp.report.write.write_report", lambda _: 1 // 0)
        finish(ended)
    assert f"Pages of {job['directory']} were not written: Zero" in ended.console.file.getvalue()
    assert not run.model_card.exists()
    finish(ended)
    assert (run.report.read_bytes(), run.model_card.read_bytes()) == (page, card)


def test_what_is_said_of_a_place_can_be_typed_again(tmp_path, make_sweep):
    """Blanks, quotes and brackets are quoted for the shell and Hydra, and kept by the terminal."""
    directory = SweepDir(tmp_path / "it's a [bold] \\ place, #1")
    directory.path.mkdir()
    made = make_sweep({})
    made.write(directory.record)
    console = Console(file=(file := io.StringIO()), width=20)
    made_up = SimpleNamespace(directory=directory, record=made, console=console, run=lambda: 1)
    finish(made_up)
    lines = file.getvalue().splitlines()
    assert f"The record: {directory.record}" in lines
    assert f"Report: {directory.page}" in lines
    again = lines[lines.index("Next, to continue, once the cause is fixed:") + 1]
    python, *words = shlex.split(again)
    assert (python, words[:2]) == ("python", ["-m", "mens_exp"])
    (cell,) = check(words[2:], multirun=True).cells
    assert cell.config.sweep.resume == str(directory.path)


def test_of_two_launches_into_one_directory_the_second_is_refused(
    tiny_run,
    tmp_path,
    monkeypatch,
    capsys,
    make_sweep,
):
    """Here the first launch wrote its record while the second one was planning."""
    directory = SweepDir(tmp_path / "sweep")
    plan = multirun.plan_sweep

    def planned(overrides):
        found = plan(overrides)
        directory.path.mkdir()
        make_sweep({}).write(directory.record)
        return found

    monkeypatch.setattr(multirun, "plan_sweep", planned)
    command = ["-m", *tiny_run, "task=plan", f"hydra.sweep.dir={directory.path}"]
    assert cli.main(command) == 2
    assert "a sweep already exists here" in capsys.readouterr().err
    assert [path.name for path in directory.path.iterdir()] == ["sweep.json"]


def test_a_sweep_that_cannot_be_made_is_refused(tiny_run, tmp_path, capsys):
    """A file is in place of the parent directory."""
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "sweep"
    assert cli.main(["-m", *tiny_run, "task=plan", f"hydra.sweep.dir={place}"]) == 3
    said = capsys.readouterr().err
    assert "hydra.sweep.dir: the directory of the sweep cannot be written to" in said
    assert "Traceback" not in said


def test_no_room_for_the_frozen_configurations_is_told(
    tiny_run,
    tmp_path,
    monkeypatch,
    capsys,
):
    """Nothing was started; the same command works once there is room."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = tmp_path / "sweep"
    command = ["-m", *tiny_run, "task=plan", f"hydra.sweep.dir={place}"]
    with monkeypatch.context() as patch:
        patch.setattr(Job, "write", full)
        assert cli.main(command) == 3
    assert "No space left on device" in capsys.readouterr().err
    assert not SweepDir(place).record.exists()
    monkeypatch.setattr(multirun.Launcher, "run", lambda _: 0)
    assert cli.main(command) == 0


def test_a_page_that_fails_undoes_no_sweep(ended, monkeypatch):
    """The exit code is that of the jobs, and the reason is shown."""

    def refuse(_):
        raise OSError("disk full")

    monkeypatch.setattr(multirun, "write_sweep_page", refuse)
    assert finish(ended) == 1
    assert "sweep.html was not written: OSError: disk full" in ended.console.file.getvalue()
    assert not ended.directory.page.exists()
