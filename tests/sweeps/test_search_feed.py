"""A search between its launcher and its sampler, with stand-ins for cells and runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mens_exp.artifacts.manifest import Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.search import TrialState
from mens_exp.artifacts.sweep import JobState, SweepRecord
from mens_exp.artifacts.sweep_dir import SweepDir
from mens_exp.errors import ConfigError
from mens_exp.sweeps import search_feed
from mens_exp.sweeps.search_cells import Drawn
from mens_exp.sweeps.search_feed import Search
from mens_exp.sweeps.search_study import Study


class Draws:
    """Draws the ranks it is told, and means by 0 one that cannot run."""

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


class Stage:
    """One search, and what becomes of its jobs."""

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
    """Set a search up; its jobs are records alone."""

    def job_record(planned):
        made = make_sweep({}).jobs[0]
        made.update(number=planned.cell.number, directory=planned.directory)
        return made

    monkeypatch.setattr(search_feed, "freeze", lambda *_: None)
    monkeypatch.setattr(search_feed, "job_record", job_record)
    monkeypatch.setattr(search_feed, "directory_of", lambda cell: f"{cell.number}_job")
    monkeypatch.setattr(search_feed, "estimate_of", lambda _: {})
    monkeypatch.setattr(search_feed, "meaning", lambda cell, _: cell.meaning)

    def made(**more):
        directory = SweepDir(tmp_path / "search")
        directory.path.mkdir()
        return Stage(directory, make_sweep(search=make_search(**more)), write_manifest)

    return made


def test_each_trial_is_a_job_and_gets_its_value(stage):
    """So many, and no more; the best is named as results come in."""
    it = stage(n_trials=2)
    search = it.open(4, 8)
    for loss in (2.0, 1.0):
        assert search.supply()
        job = it.record.jobs[-1]
        it.end(job, loss)
        search.settle(job)
    assert not search.supply()
    assert it.rows == [("complete", 0, [2.0]), ("complete", 1, [1.0])]
    assert it.record.search is not None
    assert it.record.search["best"] == [1]
    assert SweepRecord.read(it.directory.record).jobs[1]["directory"] == "1_job"


def test_a_trial_that_cannot_run_fails_and_the_next_is_drawn(stage):
    """With the reason, on both lists."""
    it = stage(n_trials=3)
    assert it.open(0, 0, 8).supply()
    assert [row[0] for row in it.rows] == ["failed", "failed", "running"]
    assert [job["number"] for job in it.record.jobs] == [2]
    assert "lora.r: out of range" in it.record.left_out[0]["why"]


def test_trials_that_come_to_the_same_run_once(stage):
    """The later one takes the values of the earlier, at once or as soon as they are there."""
    it = stage(n_trials=4)
    search = it.open(4, 4, 8, 4)
    assert search.supply()
    assert search.supply()  # the second was a repeat of what is still at work
    first, second = it.record.jobs
    assert [row[:2] for row in it.rows] == [("running", 0), ("running", 0), ("running", 2)]
    it.end(first, 2.0)
    search.settle(first)
    assert it.rows[:2] == [("complete", 0, [2.0])] * 2
    it.end(second, 3.0)
    search.settle(second)
    assert not search.supply()
    assert it.rows[3] == ("complete", 0, [2.0])
    assert [one["same_as"] for one in it.record.left_out] == [0, 0]
    assert it.record.search is not None
    assert it.record.search["best"] == [0]


def test_the_sampler_is_told_of_every_end(stage):
    """Failed, pruned, and a success without a value."""
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
        search.settle(job)
    assert [row[0] for row in it.rows] == ["failed", "pruned", "failed"]
    told = [trial.state.name for trial in search._study._study.trials]
    assert told == ["FAIL", "PRUNED", "FAIL"]
    assert it.record.search is not None
    assert "no value of its objective" in str(it.record.search["trials"][2]["reason"])


def test_a_search_stops_when_all_it_starts_fails(stage):
    """The fault is no draw's then; going on begins to count anew."""
    it = stage(n_trials=9)
    ranks = range(1, 10)
    search = it.open(*ranks)
    while search.supply():
        job = it.record.jobs[-1]
        it.end(job, 1.0, JobState.FAILED)
        search.settle(job)
    assert len(it.rows) == 5
    assert it.record.notes == ["5 jobs in a row failed: nothing was drawn after trial 4"]
    again = it.open(*ranks)
    again.catch_up()
    assert again.supply()


def test_a_worse_loss_ends_a_trial(stage):
    """By what its telemetry says while it runs."""
    it = stage(n_trials=2, pruner="median", pruner_startup_trials=1, pruner_min_steps=1)
    search = it.open(4, 8)
    told = []
    for loss in (1.0, 2.0):
        search.supply()
        job = it.record.jobs[-1]
        run = RunDir(it.directory.path / job["directory"])
        run.path.mkdir()
        assert search.watch(job) is None
        search._looked.clear()
        run.telemetry.write_text(
            '{"ts_ms":0,"event":"train_start","payload":{"max_steps":9}}\n'
            '{"ts_ms":0,"event":"validation","payload":'
            f'{{"step":3,"condition":"tuned","val/loss":{loss}}}}}\n',
            encoding="utf-8",
        )
        told.append(search.watch(job))
        assert search.watch(job) is None  # looked at a moment ago
        it.end(job, loss)
        search.settle(job)
    assert told == [None, "ended by the search at step 3: validation loss 2.0000 (pruner=median)"]
    assert it.record.search is not None
    assert it.record.search["trials"][1]["intermediate"] == [[3, 2.0]]


def test_several_objectives_have_a_front(stage):
    """Fewer bytes and a lower loss; what is worse in both is not on it."""
    it = stage(n_trials=3, objectives=["val_loss", "peak_bytes"], directions=["minimize"] * 2)
    search = it.open(4, 8, 16)
    for loss, size in ((1.0, 300), (2.0, 100), (3.0, 200)):
        search.supply()
        job = it.record.jobs[-1]
        job["state"] = JobState.SUCCEEDED
        run = RunDir(it.directory.path / job["directory"])
        it.write(run, Status.SUCCEEDED, results={"tuned_val_loss": loss, "peak_rss_bytes": size})
        search.settle(job)
    search.conclude()
    assert it.record.search is not None
    assert it.record.search["best"] == [0, 1]
    assert it.record.search["importance_unknown"] == "fewer than 10 trials are complete"


def test_record_and_journal_are_brought_together(stage):
    """What ended unseen is told, what was lost is failed, and what failed stays so."""
    it = stage(n_trials=5)
    search = it.open(4, 8, 16, 32)
    for _ in range(3):
        search.supply()
    done, failed, waiting = it.record.jobs
    it.end(failed, 1.0, JobState.FAILED)
    search.settle(failed)
    search._study.ask(3)  # and the launcher died before the record had it
    it.end(done, 2.0)
    failed["state"] = JobState.WAITING  # as going on takes a job that did not succeed
    search = it.open(4, 8, 16, 32, 64)
    search.catch_up()
    assert [row[0] for row in it.rows] == ["complete", "failed", "running", "failed"]
    assert (str(failed["state"]), failed["reason"]) == ("failed", "a reason")
    assert waiting["state"] == JobState.WAITING
    told = [trial.state.name for trial in search._study._study.trials]
    assert told == ["COMPLETE", "FAIL", "RUNNING", "FAIL"]
    assert search.supply()
    assert it.record.jobs[-1]["number"] == 4
    assert not search.supply()


def test_a_record_can_be_read_back(stage):
    """Trials, space and states are of their declared types."""
    it = stage(n_trials=1)
    it.open(4).supply()
    again = SweepRecord.read(it.directory.record)
    assert again.search is not None
    assert again.search["trials"][0]["state"] == TrialState.RUNNING
    assert again.search["space"][1]["log"] is True
