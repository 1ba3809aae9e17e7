"""Commands that torchrun starts in several processes, for training or anything else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mens_exp import __version__, cli
from mens_exp.tasks import coordinator

OF_ONE = (
    ["task=plan"],
    ["task=evaluate", "path=latest"],
    ["task=compare", "path=a,b"],
    ["task=train", "task=chat"],
    ["-m", "seed=1,2"],
    ["seed=1,2", "--multirun"],
    ["sweep.resume=outputs"],
)


@pytest.fixture
def started_as(tmp_path, monkeypatch):
    """Act as one of torchrun's two processes, in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def said(rank):
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        told |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in told.items():
            monkeypatch.setenv(name, value)

    return said


@pytest.mark.parametrize("command", OF_ONE, ids=" ".join)
def test_the_first_process_refuses_what_one_does(started_as, tmp_path, capsys, command):
    """Exit code 2, and no file is created."""
    started_as(0)
    assert cli.main(command) == 2
    assert "torchrun started several processes for" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [*OF_ONE, ["--version"], ["--help"]], ids=" ".join)
def test_the_others_have_nothing_to_do_with_it(
    started_as,
    capsys,
    monkeypatch,
    command,
):
    """They print nothing: an error of theirs would end the first process before its message."""
    started_as(1)
    monkeypatch.setattr(
        coordinator, "follow_from_elsewhere", lambda _: pytest.fail("it would wait")
    )
    assert cli.main(command) == 0
    assert capsys.readouterr() == ("", "")


def test_a_question_is_answered_once(started_as, capsys):
    """The first process answers."""
    started_as(0)
    assert cli.main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", [["trainer=ddp"], ["task=chat", "task=train"], ["resume=run"]])
def test_the_others_of_a_training_run_follow(started_as, monkeypatch, command):
    """The first process tells them how to continue."""
    started_as(1)
    seen = []

    def follow(rank):
        seen.append(rank)
        return 7

    monkeypatch.setattr(coordinator, "follow_from_elsewhere", follow)
    assert cli.main(command) == 7
    assert [rank.rank for rank in seen] == [1]


def test_a_task_that_an_experiment_chooses_is_refused_as_well(started_as, tmp_path, capsys):
    """The composed configuration shows the task; torchrun then ends the other processes."""
    mine = tmp_path / "conf" / "experiment" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# @package _global_\ndefaults:\n  - override /task: inspect\n  - _self_\n")
    started_as(0)
    assert cli.main(["experiment=mine", f"path={tmp_path}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "torchrun started several processes for a task that runs in one" in said
    assert "found inspect" in said


def test_torchrun_itself_ends_at_once(tmp_path):
    """With two real processes, of which the second would otherwise wait for an hour."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*torchrun, "-m", "mens_exp", "task=evaluate", "path=latest"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "torchrun started several processes for a task that runs in one" in ended.stderr
    assert "exitcode: 2" in ended.stderr
