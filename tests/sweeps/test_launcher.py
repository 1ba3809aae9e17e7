from __future__ import annotations

import io
import json
import os
import signal
import threading
import time

import pytest

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState, SweepRecord
from mens_exp.errors import SetupError
from mens_exp.sweeps.launcher import Launcher

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals; run it on Linux")

DONE = [("end", "succeeded"), ("exit", 0)]


def states(launcher):
    return [str(job["state"]) for job in SweepRecord.read(launcher.directory.record).jobs]


def tries(launcher, number):
    return len(launcher.record.jobs[number]["attempts"])


def environment(launcher, number):
    place = launcher.directory.path / launcher.record.jobs[number]["directory"]
    return dict(json.loads((place / "tried_0").read_text("utf-8")))


def interrupt_when(path, number=signal.SIGINT):
    """Send a signal to this process as soon as a file exists."""

    def work():
        while not path.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_all_jobs_succeed(sweep):
    """Exit code 0; the record has each job's process, peak memory and results."""
    launcher = sweep([DONE], [DONE])
    assert launcher.run() == 0
    assert states(launcher) == ["succeeded", "succeeded"]
    jobs = SweepRecord.read(launcher.directory.record).jobs
    assert len({job["attempts"][0]["pid"] for job in jobs}) == 2
    for job in jobs:
        assert job["results"] == {"wall_s": 2.0, "tuned_val_loss": 1.5}
        assert job["attempts"][0]["exit_code"] == 0
        assert (job["attempts"][0]["peak_rss_bytes"] or 0) > 1_000_000


def test_a_job_that_ended_before_it_could_be_taken_over_is_not_started_again(sweep):
    """A batch system still ran it when its directory was read, but not when the queue was."""
    launcher = sweep([DONE])
    assert launcher.run() == 0
    (job,) = launcher.record.jobs
    job["state"], job["results"] = JobState.WAITING, {}
    assert Launcher(launcher.directory, launcher.record, launcher.console).run() == 0
    (job,) = SweepRecord.read(launcher.directory.record).jobs
    assert job["state"] == "succeeded"
    assert job["results"] == {"wall_s": 2.0, "tuned_val_loss": 1.5}
    assert len(job["attempts"]) == 1


def test_a_failed_job_stops_no_other_and_its_code_is_the_sweeps(sweep):
    """The sweep's code is the largest one, and a job's last output is its reason."""
    launcher = sweep([[("say", "no such rows"), ("exit", 2)]], [DONE], [[("exit", 3)]])
    assert launcher.run() == 3
    assert states(launcher) == ["failed", "succeeded", "failed"]
    assert launcher.record.jobs[0]["reason"] == "no such rows"
    assert launcher.record.jobs[2]["reason"] == "exit code 3"


def test_a_killed_job_is_started_again(sweep):
    """With retries=1 it runs once more, and both attempts are recorded."""
    launcher = sweep([[("kill", "SIGKILL")], DONE], retries=1)
    assert launcher.run() == 0
    codes = [one["exit_code"] for one in launcher.record.jobs[0]["attempts"]]
    assert codes == [-signal.SIGKILL, 0]


def test_retries_come_to_an_end(sweep):
    """Two retries are three attempts; after that the sweep has failed."""
    launcher = sweep([[("kill", "SIGKILL")]], retries=2)
    assert launcher.run() == 1
    assert (states(launcher), tries(launcher, 0)) == (["failed"], 3)
    assert "killed by SIGKILL" in str(launcher.record.jobs[0]["reason"])


@pytest.mark.parametrize(("code", "attempts"), [(1, 2), (2, 1), (3, 1), (4, 1), (130, 1)])
def test_only_what_may_pass_is_tried_again(sweep, code, attempts):
    """A wrong request, a missing environment, a gate and a cancellation are not retried."""
    launcher = sweep([[("exit", code)]], retries=1)
    assert launcher.run() == code
    assert tries(launcher, 0) == attempts


def test_success_without_a_record_is_none(sweep):
    """Exit code 0 is not enough."""
    launcher = sweep([[("exit", 0)]])
    assert launcher.run() == 1
    assert launcher.record.jobs[0]["reason"] == "it ended without a record of success"


def test_as_many_jobs_at_a_time_as_asked_for(sweep, tmp_path):
    """Two jobs wait for each other's file, so they run together; the third one comes later."""
    files = [tmp_path / "sweep" / f"{number}_job" / "tried_0" for number in (0, 1)]
    met = [[("wait", str(other)), *DONE] for other in reversed(files)]
    launcher = sweep([met[0]], [met[1]], [DONE], n_jobs=2)
    assert launcher.run() == 0
    begins = [job["attempts"][0]["started_utc"] for job in launcher.record.jobs]
    ends = [str(job["attempts"][0]["ended_utc"]) for job in launcher.record.jobs]
    assert begins[2] >= min(ends[:2])


def test_jobs_get_their_threads_and_take_gpus_in_turn(sweep, tmp_path):
    """Of three GPUs, each of two slots keeps one."""
    files = [tmp_path / "sweep" / f"{number}_job" / "tried_0" for number in (0, 1)]
    met = [[("wait", str(other)), *DONE] for other in reversed(files)]
    launcher = sweep([met[0]], [met[1]], n_jobs=2, threads=3, gpus=["4", "6", "7"])
    assert launcher.run() == 0
    assert environment(launcher, 0)["OMP_NUM_THREADS"] == "3"
    assert environment(launcher, 1)["MKL_NUM_THREADS"] == "3"
    assert [environment(launcher, n)["CUDA_VISIBLE_DEVICES"] for n in (0, 1)] == ["4", "6"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_ends_the_sweep(sweep, number):
    """A running job closes its record, a waiting one does not start, and the exit code is 130."""
    name = signal.Signals(number).name
    running = [("on interrupt", 130), ("wait", "never")]
    launcher = sweep([running], [DONE])
    thread = interrupt_when(launcher.directory.path / "0_job" / "listens", number)
    assert launcher.run() == 130
    thread.join()
    assert states(launcher) == ["cancelled", "cancelled"], name
    reasons = [job["reason"] for job in launcher.record.jobs]
    assert reasons == ["the sweep was cancelled", "the sweep was cancelled before it began"]
    assert tries(launcher, 1) == 0


def test_a_job_that_ends_well_during_a_cancellation_has_succeeded(sweep):
    """A signal while the record is being closed changes nothing, as in a single run."""
    launcher = sweep([[("end", "succeeded"), ("on interrupt", 0), ("wait", "never")]], [DONE])
    thread = interrupt_when(launcher.directory.path / "0_job" / "listens")
    assert launcher.run() == 130
    thread.join()
    assert states(launcher) == ["succeeded", "cancelled"]


def test_signal_handlers_are_put_back(sweep):
    """The process has its earlier signal handlers after the sweep."""
    before = signal.getsignal(signal.SIGINT)
    assert sweep([DONE]).run() == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_no_process_is_no_reason_to_stop(sweep, monkeypatch):
    """If the system cannot start a process, the job has failed with that reason."""
    from mens_exp.sweeps import executors

    def none(*_):
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(executors, "start", none)
    launcher = sweep([DONE], [DONE])
    assert launcher.run() == 1
    assert states(launcher) == ["failed", "failed"]
    assert "Resource temporarily unavailable" in str(launcher.record.jobs[0]["reason"])


def test_output_of_all_attempts_is_kept(sweep):
    """The job's log has the output of one attempt after the other."""
    launcher = sweep([[("say", "first"), ("exit", 1)], [("say", "second"), *DONE]], retries=1)
    assert launcher.run() == 0
    log = RunDir(launcher.directory.path / "0_job").log.read_text("utf-8")
    assert log.splitlines() == ["first", "second"]


def test_a_full_disk_ends_no_sweep(sweep, monkeypatch):
    """The record is written once there is room again, and the message appears once."""
    launcher = sweep([DONE])
    write, refusals = SweepRecord.write, iter(range(2))

    def full(record, path):
        if next(refusals, None) is not None:
            raise OSError(28, "No space left on device")
        write(record, path)

    monkeypatch.setattr(SweepRecord, "write", full)
    assert launcher.run() == 0
    assert SweepRecord.read(launcher.directory.record).jobs[0]["state"] == JobState.SUCCEEDED
    file = launcher.console.file
    assert isinstance(file, io.StringIO)
    assert file.getvalue().count("was not written, and will be tried again") == 1


def test_a_record_that_cannot_be_written_is_told_once_all_jobs_have_ended(sweep, monkeypatch):
    """The jobs run to their ends before the error is raised."""
    launcher = sweep([DONE])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SweepRecord, "write", full)
    with pytest.raises(SetupError, match="No space left on device"):
        launcher.run()
    assert launcher.record.jobs[0]["state"] == JobState.SUCCEEDED
