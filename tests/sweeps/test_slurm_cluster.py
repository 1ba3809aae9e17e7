"""Sweeps on a real Slurm: a cluster of one node that these tests start and stop."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import psutil
import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import AttemptLog, SweepDir, SweepRecord

_STAND_IN = runpy.run_path(str(Path(__file__).with_name("slurm_cluster.py")))
_MISSING = _STAND_IN["missing"]() if os.name != "nt" else "Slurm runs on Linux"

pytestmark = [
    pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING)),
    pytest.mark.usefixtures("slurm_of_one_node"),
]

LIMIT_S = 300
SLURM = ["hydra/launcher=slurm", "hydra.launcher.poll_s=0.5"]


def command(tiny_run, directory, *overrides):
    """A sweep of thirty steps per job, with a checkpoint after every second step."""
    given = [*tiny_run, "trainer.max_steps=30", "sweep.retries=0", "seed=1", *overrides]
    by_key = {text.partition("=")[0]: text for text in given}
    return ["-m", *by_key.values(), f"hydra.sweep.dir={directory}"]


@pytest.fixture
def start(tiny_run, tmp_path, cache):
    """Launch a sweep in a process of its own."""

    def launched(*overrides):
        source = os.pathsep.join(filter(None, sys.path))
        arguments = command(tiny_run, tmp_path / "sweep", *SLURM, *overrides)
        return fork_server.Popen(
            [sys.executable, "-m", "mens_exp", *arguments],
            env={**os.environ, "PYTHONPATH": source, "MENS_EXP_CACHE": str(cache)},
        )

    return launched


@pytest.fixture(scope="module")
def whole(tiny_run, tmp_path_factory):
    """The adapter of the first cell, without Slurm and without a disturbance."""
    directory = tmp_path_factory.mktemp("whole") / "sweep"
    assert cli.main(command(tiny_run, directory)) == 0
    return adapter(directory)


def jobs(directory):
    return list(SweepRecord.read(SweepDir(directory).record).jobs)


def run_of(directory, number=0):
    return RunDir(directory / jobs(directory)[number]["directory"])


def adapter(directory, number=0):
    return run_of(directory, number).adapter / "adapter.safetensors"


def slurm(*arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def until(is_so, launcher=None):
    """Wait until a condition holds, as long as the launcher lives."""
    began = time.time()
    while not (found := is_so()):
        assert launcher is None or launcher.poll() is None, "the launcher has ended"
        assert time.time() - began < LIMIT_S
        time.sleep(0.05)
    return found


def paused_at_its_first_checkpoint(directory, launcher):
    """Suspend the job, so that a disturbance finds it in training, however slow Slurm is."""
    until(lambda: list(directory.glob("0_*/checkpoints/step_00000002.ckpt")), launcher)
    job = psutil.Process(AttemptLog(SweepDir(directory).attempts(0)).attempts()[-1]["pid"])
    job.suspend()
    assert not adapter(directory).exists()
    return job


def queue_id(directory):
    """Return the array's number, once the sweep's first job has one."""

    def found():
        words = str(jobs(directory)[0]["reason"]).split()
        named = [word for word in words if word.rstrip(":").endswith("_0")]
        return named[0].partition("_")[0] if named else ""

    until(SweepDir(directory).record.exists)
    return str(until(found))


def is_asked_to_end(process):
    """Tell whether a stopped process has a pending SIGTERM."""
    text = Path(f"/proc/{process.pid}/status").read_text("ascii")
    pending = next(line for line in text.splitlines() if line.startswith("ShdPnd"))
    return bool(int(pending.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.usefixtures("forked_by_slurm")
def test_an_array_of_cells_succeeds_with_the_bytes_of_a_local_sweep(
    tiny_run, whole, tmp_path, monkeypatch
):
    """Each cell is a task of one array; the record has Slurm's ids and nodes."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))  # no memory figures of other runs
    place = tmp_path / "sweep"
    given = [*SLURM, "seed=1,2", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=0.75"]
    assert cli.main(command(tiny_run, place, *given)) == 0
    assert [job["state"] for job in jobs(place)] == ["succeeded", "succeeded"]
    (first,), (second,) = (job["attempts"] for job in jobs(place))
    array = first["queue_id"].partition("_")[0]
    assert [first["queue_id"], second["queue_id"]] == [f"{array}_0", f"{array}_1"]
    assert first["host"]
    assert first["exit_code"] == 0
    assert adapter(place).read_bytes() == whole.read_bytes()
    assert adapter(place, 1).read_bytes() != whole.read_bytes()
    said = slurm("scontrol", "show", "job", first["queue_id"])
    assert "TimeLimit=01:00:00" in said
    assert "MinMemoryNode=768M" in said


@pytest.mark.usefixtures("forked_by_slurm")
@pytest.mark.parametrize("by", ["us", pytest.param("the clock", marks=pytest.mark.soak)])
def test_a_job_out_of_time_is_put_back_and_goes_on_to_the_same_bytes(start, whole, tmp_path, by):
    """After Slurm's warning it closes its record and requeues itself; the second start resumes."""
    place = tmp_path / "sweep"
    launcher = start("hydra.launcher.timeout_min=3", "hydra.launcher.signal_delay_s=90")
    job = paused_at_its_first_checkpoint(place, launcher)
    if by == "us":  # as Slurm itself sends it, a minute and a half later
        slurm("scancel", "--batch", "--signal=USR1", jobs(place)[0]["attempts"][0]["queue_id"])
    until(lambda: is_asked_to_end(job), launcher)
    job.resume()
    assert launcher.wait(LIMIT_S) == 0
    first, *_, last = jobs(place)[0]["attempts"]
    assert (first["why"], first["exit_code"]) == ("TIMEOUT", 130)
    assert (last["exit_code"], last["queue_id"]) == (0, first["queue_id"])
    manifest = Manifest.read(run_of(place).manifest)
    assert manifest.attempts[0]["status"] == Status.CANCELLED
    assert (manifest.attempts[-1]["resumed_from_step"] or 0) >= 2
    assert adapter(place).read_bytes() == whole.read_bytes()


def test_a_preempted_job_is_put_back_by_slurm_and_goes_on_to_the_same_bytes(start, whole, tmp_path):
    """A job of a higher partition takes its node."""
    place = tmp_path / "sweep"
    launcher = start("hydra.launcher.partition=low")
    paused_at_its_first_checkpoint(place, launcher)
    slurm("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    assert launcher.wait(LIMIT_S) == 0
    first, last = jobs(place)[0]["attempts"]
    assert first["queue_id"] == last["queue_id"]
    assert (Manifest.read(run_of(place).manifest).attempts[-1]["resumed_from_step"] or 0) >= 2
    assert adapter(place).read_bytes() == whole.read_bytes()


def killed_and_started_again(name, meanwhile):
    """Kill one of Slurm's daemons, wait, and restart it as an administrator would."""
    configuration = Path(os.environ["SLURM_CONF"])
    place = configuration.with_name(f"{name}.pid")
    old = int(place.read_text("ascii"))
    os.kill(old, signal.SIGKILL)
    meanwhile()
    program = shutil.which(name)
    assert program is not None
    subprocess.run([program, "-f", str(configuration)], check=True)
    until(lambda: place.exists() and int(place.read_text("ascii") or old) != old)


@pytest.mark.usefixtures("forked_by_slurm")
def test_killed_daemons_of_slurm_change_nothing(start, whole, tmp_path):
    """The controller and the node's daemon are each silent for some polls of the launcher."""
    place = tmp_path / "sweep"
    launcher = start()
    job = paused_at_its_first_checkpoint(place, launcher)
    # The controller saves its state at most every five seconds. One killed before the next save
    # does not know of the job's start, and ends the job. A change makes it save.
    state, changed = Path(os.environ["SLURM_CONF"]).with_name("state") / "job_state", time.time()
    queued = jobs(place)[0]["attempts"][0]["queue_id"]
    slurm("scontrol", "update", f"JobId={queued}", "Comment=to be saved")
    until(lambda: state.exists() and state.stat().st_mtime > changed, launcher)
    for name in ("slurmctld", "slurmd"):
        killed_and_started_again(name, lambda: time.sleep(2))
        assert launcher.poll() is None
    until(lambda: "idle" in (said := slurm("sinfo", "--noheader", "--format=%T")) or "mix" in said)
    job.resume()
    assert launcher.wait(LIMIT_S) == 0
    assert jobs(place)[0]["attempts"][-1]["exit_code"] == 0
    assert jobs(place)[0]["state"] == "succeeded"
    assert adapter(place).read_bytes() == whole.read_bytes()


@pytest.mark.usefixtures("forked_by_slurm")
def test_a_job_that_is_out_of_time_too_often_has_failed(start, tmp_path):
    """The reason has Slurm's word; with a longer limit, it can be resumed."""
    place = tmp_path / "sweep"
    launcher = start(
        "hydra.launcher.timeout_min=2",
        "hydra.launcher.signal_delay_s=30",
        "hydra.launcher.max_num_timeout=0",
        "trainer.max_steps=4",
    )
    log = AttemptLog(SweepDir(place).attempts(0))
    (attempt,) = until(log.attempts, launcher)
    psutil.Process(attempt["pid"]).suspend()
    # As Slurm itself sends it, without waiting for the time to pass.
    slurm("scancel", "--batch", "--signal=USR1", attempt["queue_id"])
    until(lambda: is_asked_to_end(psutil.Process(attempt["pid"])), launcher)
    psutil.Process(attempt["pid"]).resume()
    assert launcher.wait(LIMIT_S) == 1
    (only,) = jobs(place)
    assert only["state"] == "failed"
    assert only["reason"] == "TIMEOUT: its 2 minutes were over, 1 time"
    assert cli.main([f"sweep.resume={place}", "hydra.launcher.timeout_min=20"]) == 0
    first, second = jobs(place)[0]["attempts"]
    assert (first["why"], second["exit_code"]) == ("TIMEOUT", 0)
    assert first["queue_id"] != second["queue_id"]


def test_scancel_shows_as_cancelled(start, tmp_path):
    """The running job closes its record before it ends."""
    place = tmp_path / "sweep"
    launcher = start()
    job = paused_at_its_first_checkpoint(place, launcher)
    slurm("scancel", f"{jobs(place)[0]['attempts'][0]['queue_id']}")
    assert launcher.wait(LIMIT_S) == 1
    assert not job.is_running()
    (only,) = jobs(place)
    assert (only["state"], only["reason"]) == ("cancelled", "CANCELLED: ended by scancel")
    assert Manifest.read(run_of(place).manifest).status is Status.CANCELLED


@pytest.mark.usefixtures("forked_by_slurm")
def test_scancel_in_the_queue_shows_as_cancelled(start, tmp_path):
    """The other cell runs; both are held at first, by an sbatch option without a setting."""
    place = tmp_path / "sweep"
    launcher = start("seed=1,2", "task=plan", "+hydra.launcher.additional_parameters.hold=true")
    array = queue_id(place)
    slurm("scancel", f"{array}_1")
    slurm("scontrol", "release", array)
    assert launcher.wait(LIMIT_S) == 1
    kept, cancelled = jobs(place)
    assert kept["state"] == "succeeded"
    assert (cancelled["state"], cancelled["attempts"]) == ("cancelled", [])
    assert cancelled["reason"] == f"CANCELLED: {array}_1 left Slurm's queue before it began"


@pytest.mark.usefixtures("forked_by_slurm")
def test_jobs_in_the_queue_outlive_their_launcher(start, tmp_path):
    """Resuming waits for the existing array, and submits nothing."""
    place = tmp_path / "sweep"
    launcher = start("seed=1,2", "task=plan", "+hydra.launcher.additional_parameters.hold=true")
    array = queue_id(place)
    launcher.kill()
    launcher.wait()
    slurm("scontrol", "release", array)
    assert cli.main([f"sweep.resume={place}"]) == 0
    ids = [[one["queue_id"] for one in job["attempts"]] for job in jobs(place)]
    assert ids == [[f"{array}_0"], [f"{array}_1"]]
    assert len(list(SweepDir(place).batch.glob("*.sh"))) == 1


def test_ctrl_c_takes_the_jobs_out_of_the_queue(start, tmp_path):
    """Both jobs are recorded as cancelled, and none is pending."""
    place = tmp_path / "sweep"
    launcher = start("seed=1,2", "task=plan", "+hydra.launcher.additional_parameters.hold=true")
    array = queue_id(place)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LIMIT_S) == 130
    assert [job["state"] for job in jobs(place)] == ["cancelled", "cancelled"]
    assert "PENDING" not in slurm("squeue", "--noheader", "--format=%T", f"--jobs={array}")


def test_set_up_that_fails_is_the_reason(tiny_run, tmp_path):
    """The job never started, and the record has the shell's message."""
    place = tmp_path / "sweep"
    given = [*SLURM, "task=plan", "hydra.launcher.setup=[no_such_module_command]"]
    assert cli.main(command(tiny_run, place, *given)) == 1
    (only,) = jobs(place)
    assert (only["state"], only["attempts"]) == ("failed", [])
    assert "no_such_module_command: command not found" in only["reason"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("hydra.launcher.partition=nowhere", "invalid partition specified: nowhere"),
        ("hydra.launcher.mem_gb=900", "Requested node configuration is not available"),
    ],
)
def test_what_slurm_would_not_take_is_refused_before_anything_is_written(
    tiny_run,
    tmp_path,
    capsys,
    setting,
    said,
):
    """Exit code 2 with Slurm's own message."""
    place = tmp_path / "sweep"
    assert cli.main(command(tiny_run, place, *SLURM, setting)) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not place.exists()
