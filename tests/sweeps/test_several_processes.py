"""Jobs of several processes: their resources, their record, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from mens_exp import cli
from mens_exp.artifacts.host import python_path
from mens_exp.artifacts.sweep import JobState, SweepDir
from mens_exp.config.overrides import check
from mens_exp.config.sweep import SlurmLauncher
from mens_exp.errors import MensError
from mens_exp.planning import machine
from mens_exp.sweeps import launcher, multirun, plan, slurm_task
from mens_exp.sweeps.executors import LocalExecutor
from mens_exp.sweeps.plan import device_problems, launcher_of_cell, plan_sweep
from mens_exp.sweeps.process import Ended
from mens_exp.sweeps.search_request import read_request

TWO = ("trainer=ddp", "trainer.accelerator=cpu")
ON_GPUS = ("trainer=ddp", "trainer.accelerator=gpu")


@pytest.fixture
def planned(tiny_run, tmp_path, monkeypatch):
    """Plan a sweep over `tiny_run` in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def made(*overrides):
        by_key = {text.partition("=")[0]: text for text in [*tiny_run, *overrides]}
        return plan_sweep(list(by_key.values()))

    return made


def test_memory_is_that_of_all_processes(planned):
    """Two on one CPU take more than twice the memory of one, because of gradient buckets."""
    (one,), (both,) = planned("seed=1").jobs, planned("seed=1", *TWO).jobs
    for name in ("memory_bytes", "memory_low_bytes"):
        assert both.estimate[name] >= 2 * one.estimate[name]
    assert both.contract == one.contract


def test_jobs_whose_processes_do_not_fit_together_are_refused(planned, monkeypatch):
    """One job at a time fits, but two do not."""
    (alone,) = planned("seed=1", *TWO).jobs
    room = round(1.5 * alone.estimate["memory_low_bytes"])
    estimate = plan.estimate_of
    monkeypatch.setattr(plan, "estimate_of", lambda cell: estimate(cell) | {"free_bytes": room})
    assert len(planned("seed=1,2", *TWO).jobs) == 2
    with pytest.raises(MensError, match="more memory than is free") as caught:
        planned("seed=1,2", "hydra.launcher.n_jobs=2", *TWO)
    assert caught.value.where == "hydra.launcher.n_jobs"


def test_numbers_of_processes_are_cells_of_their_own(planned):
    """The contract is the same, but the cells differ in resources and files."""
    sweep = planned("trainer.devices=1,2", *TWO)
    assert [job.differs for job in sweep.jobs] == [("trainer.devices=1",), ("trainer.devices=2",)]
    assert len({job.contract for job in sweep.jobs}) == 1
    assert sweep.left_out == ()


def test_more_processes_than_cores_are_told(planned, monkeypatch):
    """Two jobs of two processes on three cores give a note, on four cores none."""
    asked = ("seed=1,2", "hydra.launcher.n_jobs=2", *TWO)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    assert not [note for note in planned(*asked).notes if "share" in note]
    monkeypatch.setattr(machine, "cores", lambda: 3)
    (note,) = [note for note in planned(*asked).notes if "share" in note]
    assert note.startswith("4 processes at a time share 3 cores")
    assert not [note for note in planned("seed=1,2", *TWO).notes if "share" in note]


class Cell:
    """A cell with only its configuration."""

    def __init__(self, config):
        self.config = config


def on_gpus(tiny_config, devices):
    return Cell(
        tiny_config(*ON_GPUS, f"trainer.devices={devices}", "trainer.accumulate_grad_batches=12")
    )


@pytest.mark.parametrize(
    ("settings", "where", "expected"),
    [
        ({}, "hydra.launcher.cpus_per_task", "4 at least"),
        ({"cpus_per_task": 4, "gpus_per_node": 2}, "hydra.launcher.gpus_per_node", "4 at least"),
    ],
)
def test_slurm_is_asked_for_a_core_and_a_gpu_for_each_process(
    tiny_config, settings, where, expected
):
    """The largest job decides."""
    cells = [on_gpus(tiny_config, devices) for devices in (2, 4, 1)]
    (found,) = device_problems(cells, SlurmLauncher(**settings), 3)
    assert (found.where, found.expected) == (where, expected)


def test_what_slurm_is_asked_for_suffices(tiny_config):
    """Without gpus_per_node, the partition or gres may provide GPUs."""
    cells = [on_gpus(tiny_config, 4)]
    enough = SlurmLauncher(cpus_per_task=4, gpus_per_node=4)
    by_gres = SlurmLauncher(cpus_per_task=8, gres="gpu:a100:4")
    one = SlurmLauncher(gpus_per_node=1)
    assert device_problems(cells, enough, 1) == []
    assert device_problems(cells, by_gres, 1) == []
    assert device_problems([Cell(tiny_config())], one, 1) == []


SEVERAL = ("hydra/launcher=slurm", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1")


def cells_of(*overrides):
    checked = check([*SEVERAL, *overrides], multirun=True)
    assert checked.problems == ()
    return list(checked.cells)


@pytest.mark.parametrize(
    "override", ["hydra.launcher.nodes=2", "trainer.num_nodes=2", "+hydra.launcher.nodes=2"]
)
def test_nodes_of_a_job_are_said_once(override):
    """The number is set once, in the launcher or in the trainer, and reaches both."""
    (cell,) = cells_of(override)
    assert cell.config.trainer.num_nodes == 2
    launcher = launcher_of_cell(cell)
    assert launcher.nodes == 2
    assert device_problems([cell], launcher, 1) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("hydra.launcher.nodes=2", "trainer.num_nodes=1"),
        ("trainer.num_nodes=1,2",),
        ("hydra.launcher.nodes=2", "task=plan"),
    ],
)
def test_jobs_of_different_numbers_of_nodes_are_refused(overrides):
    """All tasks of an array have the same number of nodes."""
    cells = cells_of(*overrides)
    (found,) = device_problems(cells, launcher_of_cell(cells[0]), len(cells))
    assert (found.where, found.found) == ("hydra.launcher.nodes", "1, 2")


def test_more_gpus_than_are_visible_are_refused(tiny_config, monkeypatch):
    """Two jobs of two GPUs do not fit on three, unless they run one after the other."""
    from mens_exp.config.sweep import LocalLauncher

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    cells = [on_gpus(tiny_config, 2)] * 2
    (found,) = device_problems(cells, LocalLauncher(n_jobs=2), 2)
    assert "2 of 2 GPUs each" in str(found.found)
    assert device_problems(cells, LocalLauncher(n_jobs=1), 2) == []
    assert device_problems(cells[:1], LocalLauncher(n_jobs=2), 1) == []


def test_the_record_says_how_many_gpus_a_job_takes(planned, tiny_config, monkeypatch):
    """The largest job decides; on the CPU there are no GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    sweep = planned("seed=1", *TWO)
    record = multirun.new_record(sweep, [], [on_gpus(tiny_config, 2), on_gpus(tiny_config, 1)])
    assert (record.gpus, record.gpus_per_job) == (["0", "1", "2", "3"], 2)
    record = multirun.new_record(sweep, [], [job.cell for job in sweep.jobs])
    assert (record.gpus, record.gpus_per_job) == ([], 1)
    assert multirun.job_record(sweep.jobs[0])["processes"] == 2


def test_a_search_knows_its_widest_trial(tiny_run, tmp_path, monkeypatch):
    """The largest choice counts, not the first one."""
    monkeypatch.chdir(tmp_path)
    asked = [*TWO, "trainer.devices=choice(1,2)", "hydra/sweeper=optuna"]
    by_key = {text.partition("=")[0]: text for text in [*tiny_run, *asked]}
    request = read_request(list(by_key.values()))
    assert max(cell.config.trainer.devices for cell in request.probed) == 2


def test_jobs_of_two_gpus_run_side_by_side(sweep, tmp_path):
    """Each job has its own two GPUs, and its processes share its threads."""
    met = [[("wait", str(tmp_path / name)), ("end", "succeeded"), ("exit", 0)] for name in "ab"]
    made = sweep([met[0]], [met[1]], n_jobs=2, threads=4, gpus=["4", "5", "6", "7"], gpus_per_job=2)
    for job in made.record.jobs:
        job["processes"] = 2
    for name in "ab":
        (tmp_path / name).touch()
    assert made.run() == 0
    seen = set()
    for job in made.record.jobs:
        environment = json.loads((tmp_path / "sweep" / job["directory"] / "tried_0").read_text())
        seen.add((environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]))
    assert seen == {("4,5", "2"), ("6,7", "2")}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc; run it on Linux")
def test_a_job_left_at_work_keeps_its_gpus(make_sweep, tmp_path):
    """It runs on the second pair, so the next job gets the first pair."""
    waits = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "6,7"}
    with subprocess.Popen(waits, stdin=subprocess.PIPE, env=environment) as left:
        attempt = {
            "pid": left.pid,
            "process_started": psutil.Process(left.pid).create_time(),
            "started_utc": "2026-11-20T05:58:01.123Z",
            "ended_utc": None,
            "exit_code": None,
            "peak_rss_bytes": None,
        }
        running = {"state": JobState.RUNNING, "attempts": [attempt], "processes": 2}
        gpus = ["4", "5", "6", "7"]
        record = make_sweep(running, n_jobs=2, gpus=gpus, gpus_per_job=2)
        executor = LocalExecutor(SweepDir(tmp_path), record)
        assert executor.adopt(record.jobs[0]) is not None
        assert list(executor._slots) == [1]


def test_going_on_takes_the_gpus_that_are_there_now(
    make_sweep,
    tmp_path,
    monkeypatch,
    capsys,
):
    """It is refused if there are too few for the number of jobs."""
    jobs = [{"processes": 2}, {"processes": 2}]
    record = make_sweep(*jobs, n_jobs=2, gpus=["0", "1", "2", "3"], gpus_per_job=2)
    record.write(SweepDir(tmp_path).record)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9")
    assert cli.main([f"sweep.resume={tmp_path}"]) == 2
    assert "that many concurrent jobs need more GPUs" in capsys.readouterr().err
    taken = []

    def run(self):
        taken.append(self.record.gpus)
        return 0

    monkeypatch.setattr(launcher.Launcher, "run", run)
    assert cli.main([f"sweep.resume={tmp_path}", "hydra.launcher.n_jobs=1"]) == 0
    assert taken == [["8", "9"]]


# A job's first process, which starts another one that takes 100 MB and reports it.
FIRST = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1], "mens_exp.tasks.coordinator"],
                         stdout=subprocess.PIPE)
other.stdout.readline()
print("taken", flush=True)
sys.stdin.readline()
other.kill()
"""
OTHER = "held = b'x' * 100_000_000; print('taken', flush=True); import time; time.sleep(60)"


# A small parent process, since what it starts begins with its size.
LAUNCHER = """
import signal, subprocess, sys, time
from mens_exp.sweeps.process import Child
first = [sys.executable, "-S", "-c", sys.argv[2], sys.argv[3]]
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
process = subprocess.Popen(first, **pipes, start_new_session=True)
child = Child(process)
child.has_others = sys.argv[1] == "True"
assert process.stdout.readline() == b"taken\\n"
assert child.ended() is None
child.pass_on(signal.SIGKILL)
while (ended := child.ended()) is None:
    time.sleep(0.01)
assert ended.exit_code == -signal.SIGKILL
print(ended.peak_rss_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc; run it on Linux")
@pytest.mark.parametrize("has_others", [True, False])
def test_the_peak_of_a_job_counts_those_that_train_along(has_others):
    """The memory of a process is read while it runs, so even a killed one is counted."""
    told = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(has_others), FIRST, OTHER],
        capture_output=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": python_path({})},
    )
    assert (int(told.stdout) > 100_000_000) is has_others


def test_a_slurm_task_shares_its_cores_among_the_processes(make_sweep, tmp_path, monkeypatch):
    """Three processes share six cores, and their memory is counted together."""
    make_sweep({"processes": 3}, threads=6).write(SweepDir(tmp_path).record)
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "0")
    given = {}

    def supervise(_, output, environment, log, **more):
        given.update(more, threads=environment["OMP_NUM_THREADS"])
        log.began(5, 1.0, host="node", queue_id=more["queue_id"])
        return Ended(exit_code=0)

    monkeypatch.setattr(slurm_task, "supervise", supervise)
    before = {one: signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        limits = ["--timeout-min=1", "--signal-delay-s=30", "--max-num-timeout=1"]
        assert slurm_task.main([str(tmp_path), *limits]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (given["threads"], given["processes"]) == ("2", 3)
