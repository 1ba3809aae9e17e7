"""A search between its launcher and its sampler, with stand-ins for cells and runs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import math
import os
from types import SimpleNamespace

import pytest
from optuna.storages.journal import JournalFileBackend

from mens_exp.artifacts.host import machine_fault
from mens_exp.artifacts.manifest import Failure, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState, SweepDir, SweepRecord, TrialState
from mens_exp.errors import ConfigError
from mens_exp.sweeps import searching
from mens_exp.sweeps.outcome import update_from_directory
from mens_exp.sweeps.search_request import Drawn
from mens_exp.sweeps.search_study import Study
from mens_exp.sweeps.searching import Search


class Draws:
    """Cells that draw the given ranks; 0 stands for a cell that cannot run."""

    def __init__(self, *ranks):
        self.ranks = ranks

    def draw(self, number, suggest):
        del suggest
        rank = self.ranks[number]
        params = {"lora.r": f"lora.r={rank}"}
        problem = ConfigError("out of range", where="lora.r", found=rank)
        cell = SimpleNamespace(
            config=SimpleNamespace(task=SimpleNamespace(name="evaluate")),
            number=number,
            meaning=str(rank),
            composed=None,
        )
        return Drawn(
            params=params, cell=cell if rank else None, problems=() if rank else (problem,)
        )


class Suggested:
    """Cells that draw every dimension through the sampler."""

    def __init__(self, space):
        self.space = space

    def draw(self, number, suggest):
        params = {one["key"]: f"{one['key']}={suggest(one)}" for one in self.space}
        config = SimpleNamespace(task=SimpleNamespace(name="evaluate"))
        cell = SimpleNamespace(
            config=config, number=number, meaning=" ".join(params.values()), composed=None
        )
        return Drawn(params=params, cell=cell, problems=())


class Killed(BaseException):
    """The launcher's death."""


class Stage:
    """One search, with a way to end its jobs."""

    def __init__(self, directory, record, write):
        self.directory, self.record, self.write = directory, record, write

    def open(self, *ranks):
        assert self.record.search is not None
        study = Study(self.directory.journal, self.record.search)
        cells = Draws(*ranks)
        return Search(self.directory, self.record, study, cells)

    def end(self, job, loss, state=JobState.SUCCEEDED):
        run = RunDir(self.directory.path / job["directory"])
        self.write(run, Status.SUCCEEDED, results={"tuned_val_loss": loss})
        job["state"], job["reason"] = state, None if state is JobState.SUCCEEDED else "a reason"

    def go_on(self, end=lambda _: None):
        """Run what a launcher does from the files on disk, one trial at a time, to the end.

        `end` may end a job itself, and then returns true.
        """
        if self.directory.record.exists():
            self.record = SweepRecord.read(self.directory.record)
        assert self.record.search is not None
        for job in self.record.jobs:
            run = RunDir(self.directory.path / job["directory"])
            update_from_directory(job, run, here=True)
        self.record.write(self.directory.record)
        cells = Suggested(self.record.search["space"])
        study = Study(self.directory.journal, self.record.search)
        search = Search(self.directory, self.record, study, cells)
        search.catch_up()
        self.record.write(self.directory.record)
        while (waiting := self.waiting()) or search.supply():
            for job in waiting:
                if not end(job):
                    loss = self.loss(job["number"])
                    self.end(job, loss)
                    job["results"] = {"tuned_val_loss": loss}
                search.job_ended(job)
                self.record.write(self.directory.record)
        search.conclude()
        self.record.write(self.directory.record)
        return search

    def waiting(self):
        return [job for job in self.record.jobs if job["state"] == JobState.WAITING]

    def loss(self, number):
        """Return a trial's loss, which is smallest for the rate 1e-3 and the rank 4."""
        assert self.record.search is not None
        params = self.record.search["trials"][number]["params"]
        rate, rank = (float(params[key].partition("=")[2]) for key in ("optim.lr", "lora.r"))
        return (math.log10(rate) + 3) ** 2 + 0.001 * rank

    def fail(self, job, exit_code, **error):
        """End a job like a process that failed."""
        run = RunDir(self.directory.path / job["directory"])
        if error:
            told = {"message": "words", "remedy": None, "exit_code": exit_code or 3, **error}
            self.write(run, Status.FAILED, error=Failure(**told))
        job["state"], job["reason"] = JobState.FAILED, "it failed"
        job["attempts"].append(
            {
                "pid": 2**22 + 1,
                "process_started": 1.0,
                "started_utc": "2026-11-20T05:58:01.123Z",
                "ended_utc": "2026-11-20T05:59:01.123Z",
                "exit_code": exit_code,
                "peak_rss_bytes": None,
            }
        )

    def lasting(self):
        """Return what is on disk, except what a disturbance may change: attempts and notes."""
        read = SweepRecord.read(self.directory.record)
        jobs = [{**job, "attempts": None} for job in read.jobs]
        return jobs, read.search, read.left_out

    @property
    def rows(self):
        assert self.record.search is not None
        return [
            (str(row["state"]), row["job"], row["values"]) for row in self.record.search["trials"]
        ]


@pytest.fixture
def stage(
    tmp_path,
    monkeypatch,
    make_sweep,
    make_search,
    write_manifest,
):
    """Set up a search whose jobs are only records."""
    record = make_sweep({})  # once, since it reads all of the code
    job = record.jobs.pop()

    def job_record(planned):
        made = copy.deepcopy(job)
        made.update(number=planned.cell.number, directory=planned.directory)
        return made

    def freeze(_, place, __):
        run = RunDir(place)
        place.mkdir(exist_ok=True)
        for path in (run.config, run.job, run.report):
            path.touch()

    monkeypatch.setattr(searching, "freeze", freeze)
    monkeypatch.setattr(searching, "job_record", job_record)
    monkeypatch.setattr(searching, "directory_of", lambda cell: f"{cell.number}_job")
    monkeypatch.setattr(searching, "estimate_of", lambda _: {})
    monkeypatch.setattr(searching, "meaning", lambda cell, _: cell.meaning)

    def made(name="search", **more):
        directory = SweepDir(tmp_path / name)
        directory.path.mkdir()
        empty = dataclasses.replace(copy.deepcopy(record), search=make_search(**more))
        return Stage(directory, empty, write_manifest)

    return made


def test_each_trial_is_a_job_and_gets_its_value(stage):
    """Only n_trials are drawn; the best one is updated with each result."""
    it = stage(n_trials=2)
    search = it.open(4, 8)
    for loss in (2.0, 1.0):
        assert search.supply()
        job = it.record.jobs[-1]
        it.end(job, loss)
        search.job_ended(job)
    assert not search.supply()
    assert it.rows == [("complete", 0, [2.0]), ("complete", 1, [1.0])]
    assert it.record.search is not None
    assert it.record.search["best"] == [1]
    assert SweepRecord.read(it.directory.record).jobs[1]["directory"] == "1_job"


def test_a_trial_that_cannot_run_fails_and_the_next_is_drawn(stage):
    """Both records have the reason."""
    it = stage(n_trials=3)
    assert it.open(0, 0, 8).supply()
    assert [row[0] for row in it.rows] == ["failed", "failed", "running"]
    assert [job["number"] for job in it.record.jobs] == [2]
    assert "lora.r: out of range" in it.record.left_out[0]["why"]


def test_trials_that_come_to_the_same_run_once(stage):
    """The later one gets the earlier one's values, at once or when they are available."""
    it = stage(n_trials=4)
    search = it.open(4, 4, 8, 4)
    assert search.supply()
    assert search.supply()  # the second one repeats a running trial
    first, second = it.record.jobs
    assert [row[:2] for row in it.rows] == [("running", 0), ("running", 0), ("running", 2)]
    it.end(first, 2.0)
    search.job_ended(first)
    assert it.rows[:2] == [("complete", 0, [2.0])] * 2
    it.end(second, 3.0)
    search.job_ended(second)
    assert not search.supply()
    assert it.rows[3] == ("complete", 0, [2.0])
    assert [one["same_as"] for one in it.record.left_out] == [0, 0]
    assert it.record.search is not None
    assert it.record.search["best"] == [0]


def test_the_sampler_is_told_of_every_end(stage):
    """Failed, pruned, and succeeded without a value."""
    it = stage(n_trials=3)
    search = it.open(4, 8, 16)
    for loss, state in (
        (1.0, JobState.FAILED),
        (1.0, JobState.PRUNED),
        (None, JobState.SUCCEEDED),
    ):
        search.supply()
        job = it.record.jobs[-1]
        it.end(job, loss, state)
        search.job_ended(job)
    assert [row[0] for row in it.rows] == ["failed", "pruned", "failed"]
    told = [trial.state.name for trial in search._study._study.trials]
    assert told == ["FAIL", "PRUNED", "FAIL"]
    assert it.record.search is not None
    assert "no value of its objective" in str(it.record.search["trials"][2]["reason"])


def test_a_search_stops_when_all_it_starts_fails(stage):
    """Then the draws are not to blame; after resuming, the count starts again."""
    it = stage(n_trials=9)
    ranks = range(1, 10)
    search = it.open(*ranks)
    while search.supply():
        job = it.record.jobs[-1]
        it.end(job, 1.0, JobState.FAILED)
        search.job_ended(job)
    assert len(it.rows) == 5
    assert it.record.notes == ["5 jobs in a row failed: nothing was drawn after trial 4"]
    again = it.open(*ranks)
    again.catch_up()
    assert again.supply()


def test_a_worse_loss_ends_a_trial(stage):
    """Its telemetry is read while it runs."""
    it = stage(n_trials=2, pruner="median", pruner_startup_trials=1, pruner_min_steps=1)
    search = it.open(4, 8)
    told = []
    for loss in (1.0, 2.0):
        search.supply()
        job = it.record.jobs[-1]
        run = RunDir(it.directory.path / job["directory"])
        assert search.watch(job) is None
        search._looked.clear()
        run.telemetry.write_text(
            '{"ts_ms":0,"event":"train_start","payload":{"max_steps":9}}\n'
            '{"ts_ms":0,"event":"validation","payload":'
            f'{{"step":3,"condition":"tuned","val/loss":{loss}}}}}\n',
            encoding="utf-8",
        )
        told.append(search.watch(job))
        assert search.watch(job) is None  # it was read a moment ago
        it.end(job, loss)
        search.job_ended(job)
    assert told == [None, "ended by the search at step 3: validation loss 2.0000 (pruner=median)"]
    assert it.record.search is not None
    assert it.record.search["trials"][1]["intermediate"] == [[3, 2.0]]


def test_several_objectives_have_a_front(stage):
    """Fewer bytes and a lower loss are better; the front omits a trial that is worse in both."""
    it = stage(n_trials=3, objectives=["val_loss", "peak_bytes"], directions=["minimize"] * 2)
    search = it.open(4, 8, 16)
    for loss, size in ((1.0, 300), (2.0, 100), (3.0, 200)):
        search.supply()
        job = it.record.jobs[-1]
        job["state"] = JobState.SUCCEEDED
        run = RunDir(it.directory.path / job["directory"])
        it.write(run, Status.SUCCEEDED, results={"tuned_val_loss": loss, "peak_rss_bytes": size})
        search.job_ended(job)
    search.conclude()
    assert it.record.search is not None
    assert it.record.search["best"] == [0, 1]
    assert it.record.search["importance_unknown"] == "fewer than 10 trials are complete"


def test_record_and_journal_are_brought_together(stage):
    """Unseen ends are told, lost trials are drawn again, and failures stay."""
    it = stage(n_trials=5)
    search = it.open(4, 8, 16, 32)
    for _ in range(3):
        search.supply()
    done, failed, waiting = it.record.jobs
    it.fail(failed, 2, type="DataError")
    search.job_ended(failed)
    search._study.ask(3)  # and the launcher died before it wrote the record
    it.end(done, 2.0)
    failed["state"] = JobState.WAITING  # as resuming does to a job that did not succeed
    search = it.open(4, 8, 16, 32, 64)
    search.catch_up()
    assert [row[0] for row in it.rows] == ["complete", "failed", "running"]
    assert (str(failed["state"]), failed["reason"]) == ("failed", "it failed")
    assert waiting["state"] == JobState.WAITING
    told = [trial.state.name for trial in search._study._study.trials]
    assert told == ["COMPLETE", "FAIL", "RUNNING"]
    for number in (3, 4):
        assert search.supply()
        assert it.record.jobs[-1]["number"] == number
    assert not search.supply()


TPE = {"sampler": "tpe", "startup_trials": 1, "n_trials": 3}


def kill_at(monkeypatch, number, *, torn):
    """Kill the launcher before its n-th write or after half of it; return a write counter."""
    count = 0

    def killing(write, half):
        def disturbed(this, given):
            nonlocal count
            count += 1
            if count == number:
                if torn:
                    half(this, given)
                raise Killed
            return write(this, given)

        return disturbed

    def half_a_line(backend, logs):
        with open(backend._file_path, "ab") as file:
            file.write(b'{"op_code":4,"study')

    whole = JournalFileBackend.append_logs, SweepRecord.write
    monkeypatch.setattr(JournalFileBackend, "append_logs", killing(whole[0], half_a_line))
    monkeypatch.setattr(SweepRecord, "write", killing(whole[1], lambda *_: None))
    return lambda: count


@pytest.mark.parametrize("torn", [False, True], ids=["before", "torn"])
def test_a_search_killed_at_any_write_goes_on_to_the_same_record(stage, monkeypatch, torn):
    """A search killed again while resuming does too; later draws depend on the first result."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the process is killed, not the machine
    whole = stage("whole", **TPE)
    with monkeypatch.context() as patch:
        writes = kill_at(patch, -1, torn=torn)
        whole.go_on()
    assert writes() > 20
    assert [row[0] for row in whole.rows] == ["complete"] * 3
    for number in range(1, writes() + 1):
        it = stage(f"killed_{number}", **TPE)
        for at in (number, 4):
            with monkeypatch.context() as patch:
                kill_at(patch, at, torn=torn)
                with contextlib.suppress(Killed):
                    it.go_on()
        it.go_on()
        assert it.lasting() == whole.lasting(), f"killed at write {number}"


def of_machine(error):
    """Return the error of a run's record for a fault of the machine."""
    fault = machine_fault(error)
    assert fault is not None
    return {"type": type(error).__name__, "remedy": fault.remedy}


FULL = of_machine(OSError(errno.ENOSPC, "No space left on device"))
BROKEN = of_machine(OSError(errno.EIO, "Input/output error"))


@pytest.mark.parametrize(
    ("code", "error"),
    [(3, FULL), (3, BROKEN), (None, FULL), (3, {})],
    ids=["full", "broken", "full, which nobody saw", "too full for a record"],
)
def test_a_trial_that_the_disk_failed_runs_again_before_more_are_drawn(stage, code, error):
    """Later draws depend on its result, so the record equals an undisturbed search's."""
    whole = stage("whole", **TPE)
    whole.go_on()
    it = stage(**TPE)

    def end(job):
        if job["number"] != 1 or job["attempts"]:
            return False
        it.fail(job, code, **error)
        return True

    search = it.go_on(end)
    assert [row[0] for row in it.rows] == ["complete", "failed"]
    assert "trial 1 failed as the disk did" in it.record.notes[-1]
    assert not search.is_finished()
    assert it.go_on(end).is_finished()
    assert it.lasting() == whole.lasting()
    assert [len(job["attempts"]) for job in it.record.jobs] == [0, 1, 0]


MEMORY = of_machine(MemoryError())
CUDA = of_machine(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
EXTRA = {"type": "MissingExtra", "remedy": "pip install it"}


@pytest.mark.parametrize(
    ("code", "error"),
    [(-9, {}), (None, {}), (3, MEMORY), (3, CUDA), (3, EXTRA)],
    ids=["killed", "died unseen", "memory", "memory of a GPU", "extra"],
)
def test_a_trial_that_fails_by_the_machine_alone_runs_again_later(stage, code, error):
    """The others run meanwhile; draws that depend on no result are the same."""
    settings = {"sampler": "random", "n_trials": 4}
    whole = stage("whole", **settings)
    whole.go_on()
    it = stage(**settings)

    def end(job):
        if job["number"] != 1 or job["attempts"]:
            return False
        it.fail(job, code, **error)
        return True

    assert not it.go_on(end).is_finished()
    assert [row[0] for row in it.rows] == ["complete", "failed", "complete", "complete"]
    assert it.go_on(end).is_finished()
    assert it.lasting() == whole.lasting()


def test_a_trial_whose_process_was_killed_after_its_end_has_its_value(stage):
    """Its run's record says succeeded, and that counts when the search is resumed."""
    whole = stage("whole", sampler="random", n_trials=3)
    whole.go_on()
    it = stage(sampler="random", n_trials=3)

    def end(job):
        if job["number"] != 1:
            return False
        it.end(job, it.loss(1))
        it.fail(job, -9)
        return True

    it.go_on(end)
    assert [row[0] for row in it.rows] == ["complete", "failed", "complete"]
    assert it.go_on(lambda job: pytest.fail(f"{job['number']} ran again")).is_finished()
    assert it.lasting() == whole.lasting()


def test_a_trial_whose_process_could_not_be_started_runs_again(stage):
    """It has no attempt; equal trials get its values in the end."""
    it = stage(n_trials=2)
    search = it.open(4, 4)
    search.supply()
    assert not search.supply()
    (job,) = it.record.jobs
    job["state"], job["reason"] = JobState.FAILED, "no process could be started"
    search.job_ended(job)
    assert it.rows == [("failed", 0, None)] * 2
    job["state"] = JobState.WAITING
    search = it.open(4, 4)
    search.catch_up()
    assert it.rows == [("running", 0, None)] * 2
    assert job["state"] == JobState.WAITING
    it.end(job, 2.0)
    search.job_ended(job)
    assert it.rows == [("complete", 0, [2.0])] * 2


@pytest.mark.parametrize(
    ("code", "name"),
    [(2, "DataError"), (4, "GateError"), (1, "TrainingError"), (1, "KeyError")],
)
def test_a_trial_that_fails_by_itself_is_not_run_again(stage, code, name):
    """A wrong request, a gate, a non-finite loss or a bug: the sampler keeps the failure."""
    it = stage(sampler="random", n_trials=3)

    def end(job):
        if job["number"] != 1:
            return False
        it.fail(job, code, type=name)
        return True

    assert it.go_on(end).is_finished()
    before = it.lasting()
    assert [row[0] for row in it.rows] == ["complete", "failed", "complete"]
    assert it.go_on(lambda job: pytest.fail(f"{job['number']} ran again")).is_finished()
    assert it.lasting() == before


def test_a_record_can_be_read_back(stage):
    """Trials, space and states have their declared types."""
    it = stage(n_trials=1)
    it.open(4).supply()
    again = SweepRecord.read(it.directory.record)
    assert again.search is not None
    assert again.search["trials"][0]["state"] == TrialState.RUNNING
    assert again.search["space"][1]["log"] is True
