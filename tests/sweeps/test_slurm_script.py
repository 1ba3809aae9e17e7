"""The script for sbatch, and what is refused before it; no Slurm is needed."""

from __future__ import annotations

import stat
import subprocess

import pytest

from mens_exp import cli
from mens_exp.config.sweep import SlurmLauncher
from mens_exp.errors import ConfigError, RequestError, SetupError
from mens_exp.sweeps.slurm_commands import script, slurm_problems


def made(tmp_path, **settings):
    launcher = SlurmLauncher(**settings)
    return script(launcher, [0, 3], batch=tmp_path / "b c", arguments=["a b"])


def options(text):
    return {line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Commands that store their input, and print what a file contains."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    body = (
        f"#!/bin/sh\ncat > {tmp_path}/given\ncat {tmp_path}/says >&2\nexit $(cat {tmp_path}/code)\n"
    )
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (bin_ / name).write_text(body)
        (bin_ / name).chmod(stat.S_IRWXU)
    (tmp_path / "says").write_text("")
    (tmp_path / "code").write_text("0")
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    return tmp_path


def test_settings_become_options_of_sbatch(tmp_path):
    """A null setting keeps the cluster's default, and a bare flag stays bare."""
    text = made(
        tmp_path,
        partition="gpu",
        mem_gb=1.5,
        gpus_per_node=2,
        timeout_min=90,
        array_parallelism=4,
        additional_parameters={"mail-user": "a b", "hold": True},
    )
    found = options(text)
    assert {"--partition=gpu", "--mem=1536M", "--gpus-per-node=2", "--time=90"} <= found
    assert {"--array=0,3%4", "--signal=B:USR1@120", "--requeue", "--nodes=1"} <= found
    assert {"--mail-user='a b'", "--hold"} <= found
    assert not {one.partition("=")[0] for one in found} & {"--account", "--qos", "--gres"}


def test_a_job_of_several_nodes_asks_for_them(tmp_path):
    """Cores, GPUs and memory are those of each node."""
    found = options(made(tmp_path, nodes=2, cpus_per_task=4, gpus_per_node=4, mem_gb=8))
    assert {"--nodes=2", "--cpus-per-task=4", "--gpus-per-node=4", "--mem=8192M"} <= found


def test_the_script_is_one_that_bash_reads(tmp_path):
    """Paths with blanks are quoted, and the setup lines come before the job."""
    text = made(tmp_path, setup=["module load cuda"])
    assert subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert text.index("module load cuda") < text.index("exec ")
    assert text.rstrip().endswith("-m mens_exp.sweeps.slurm_task 'a b'")
    assert f"--output='{tmp_path}/b c/slurm_%A_%a.out'" in text


@pytest.mark.parametrize("name", ["slurm", "submitit_slurm"])
def test_without_slurm_the_launcher_is_refused(tiny_run, tmp_path, monkeypatch, capsys, name):
    """Exit code 3 with the missing commands and a remedy; nothing is written."""
    monkeypatch.setenv("PATH", str(tmp_path))
    place = tmp_path / "sweep"
    given = [f"hydra/launcher={name}", "task=plan", f"hydra.sweep.dir={place}"]
    assert cli.main(["-m", *tiny_run, *given]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "Slurm's commands were not found" in said
    assert "no sbatch, squeue, scancel, scontrol on the PATH" in said
    assert "hydra/launcher=local" in said
    assert not place.exists()


def test_sbatch_judges_the_request(stand_in):
    """The script of all cells goes to sbatch, and there is no problem if sbatch accepts it."""
    assert slurm_problems(SlurmLauncher(partition="p"), 3) == []
    assert {"--array=0,1,2%256", "--partition=p"} <= options((stand_in / "given").read_text())
    (stand_in / "code").write_text("1")
    (stand_in / "says").write_text("sbatch: error: Invalid account\n")
    (wrong,) = slurm_problems(SlurmLauncher(account="a"), 3)
    assert isinstance(wrong, RequestError)
    assert "sbatch: error: Invalid account" in str(wrong)


@pytest.mark.parametrize(
    "said",
    [
        "Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    ],
)
def test_a_slurm_that_does_not_answer_is_no_wrong_request(stand_in, said):
    """Exit code 3, since the user cannot correct it."""
    (stand_in / "code").write_text("1")
    (stand_in / "says").write_text(f"{said}\n")
    (wrong,) = slurm_problems(SlurmLauncher(), 1)
    assert isinstance(wrong, SetupError)
    assert "sinfo" in str(wrong)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"additional_parameters": {"array": "0-9"}}, "additional_parameters.array"),
        ({"additional_parameters": {"cpus_per_task": 4}}, "additional_parameters.cpus_per_task"),
        ({"timeout_min": 2}, "signal_delay_s"),
    ],
)
def test_settings_that_undo_the_launcher_are_refused(stand_in, settings, where):
    """Before sbatch is called."""
    (wrong,) = slurm_problems(SlurmLauncher(**settings), 1)
    assert isinstance(wrong, ConfigError)
    assert wrong.where == f"hydra.launcher.{where}"
    assert not (stand_in / "given").exists()


def test_a_key_of_several_tasks_is_unknown(capsys):
    """The trainer sets the number of processes on a node."""
    given = ["-m", "hydra/launcher=slurm", "hydra.launcher.tasks_per_node=2", "model=tiny_llama"]
    assert cli.main(given) == 2
    assert "tasks_per_node" in capsys.readouterr().err
