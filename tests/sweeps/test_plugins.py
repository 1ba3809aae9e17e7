"""Hydra's plugins: hydra-submitit-launcher, hydra-list-sweeper and others.

hydra-joblib-launcher's launcher goes through every event of test_survival.py.
"""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import SweepDir, SweepRecord
from mens_exp.config import override_values
from mens_exp.config.overrides import check

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals; run it on Linux")

# As on hydra-list-sweeper's page, in an experiment.
PAIRS = """# @package _global_
defaults:
  - override /hydra/sweeper: list
hydra:
  sweeper:
    list_params:
      lora.r: 2, 4
      lora.alpha: [4, 8]
"""


def record_of(place):
    return SweepRecord.read(SweepDir(place).record)


def runs_of(place):
    return [RunDir(place / job["directory"]) for job in record_of(place).jobs]


def adapters(place):
    return [weights(run.path) for run in runs_of(place)]


def weights(run):
    return [path.read_bytes() for path in sorted(run.glob("adapter/**/*.safetensors"))]


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """A working directory with an experiment whose cells a plugin lists."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "conf" / "experiment" / "pairs.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(PAIRS, "utf-8")
    return path


def test_plugins_run_what_local_runs(pairs, tiny_run, tmp_path, capsys):
    """hydra-list-sweeper pairs the values, and hydra-submitit-launcher starts the jobs.

    The oracle is a run of each of the two cells. The sweep is resumed by asking its sweeper again;
    a sweeper that then lists other cells is refused.
    """
    usual = [text for text in tiny_run if not text.startswith("lora.")]
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    given = ["-m", "experiment=pairs", "hydra/launcher=submitit_local", *usual]
    assert cli.main([*given, f"hydra.sweep.dir={theirs}"]) == 0
    for r, alpha in ((2, 4), (4, 8)):
        cell = [f"lora.r={r}", f"lora.alpha={alpha}", f"hydra.run.dir={ours}/{r}"]
        assert cli.main([*usual, *cell]) == 0
    singles = [weights(ours / r) for r in "24"]
    assert adapters(theirs) == singles
    assert all(singles)
    jobs = record_of(theirs).jobs
    assert [job["differs"] for job in jobs] == [
        ["lora.r=2", "lora.alpha=4"],
        ["lora.r=4", "lora.alpha=8"],
    ]
    for job in jobs:
        (attempt,) = job["attempts"]
        assert attempt["queue_id"].startswith("submitit_local:1:")
        assert attempt["exit_code"] == 0

    assert cli.main([f"sweep.resume={theirs}"]) == 0
    assert [len(job["attempts"]) for job in record_of(theirs).jobs] == [1, 1]
    pairs.write_text(PAIRS.replace("[4, 8]", "[4, 16]"), "utf-8")
    capsys.readouterr()
    assert cli.main([f"sweep.resume={theirs}"]) == 2
    assert "another cell 1 than at its launch" in capsys.readouterr().err
    assert adapters(theirs) == singles


class Halving(Sweeper):
    """A sweeper of two rounds, of which the second is about the first one's better cell."""

    def __init__(self):
        self.returned = []

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        first = self.ask(arguments, [1e-6, 1e-2])
        better = [1e-6, 1e-2][first.index(min(first))]
        self.ask(arguments, [better, better / 2])

    def ask(self, arguments, rates):
        lists = [[*arguments, f"optim.lr={rate}"] for rate in rates]
        returned = self.launcher.launch(lists, initial_job_idx=0)  # each round counts from zero
        self.returned += returned
        return [one.return_value for one in returned if one.status is JobStatus.COMPLETED]


@pytest.fixture
def asking(monkeypatch, tmp_path):
    """Use the given sweeper in place of the plugin `list`."""
    monkeypatch.chdir(tmp_path)

    def made(sweeper):
        def instantiate(*, hydra_context, task_function, config):
            sweeper.setup(hydra_context=hydra_context, task_function=task_function, config=config)
            return sweeper

        monkeypatch.setattr(Plugins.instance(), "instantiate_sweeper", instantiate, raising=False)
        return sweeper

    return made


def test_a_sweeper_gets_the_losses_round_by_round(asking, tiny_run, tmp_path):
    """Each is the recorded loss; a rate that is proposed again runs again with its own number."""
    place, sweeper = tmp_path / "sweep", asking(Halving())
    words = ["-m", "hydra/sweeper=list", "hydra.launcher.n_jobs=2", f"hydra.sweep.dir={place}"]
    assert cli.main([*words, *tiny_run]) == 0
    losses = [Manifest.read(run.manifest).results["tuned_val_loss"] for run in runs_of(place)]
    assert [one.return_value for one in sweeper.returned] == losses
    assert losses[1] == losses[2] < losses[0]
    assert [job["differs"] for job in record_of(place).jobs] == [
        [f"optim.lr={rate}"] for rate in (1e-06, 0.01, 0.01, 0.005)
    ]
    assert [job["number"] for job in record_of(place).jobs] == [0, 1, 2, 3]

    again = asking(Halving())
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert [one.return_value for one in again.returned] == losses
    assert [len(job["attempts"]) for job in record_of(place).jobs] == [1, 1, 1, 1]


class Listed(Sweeper):
    """A sweeper of one round."""

    def __init__(self, *cells, error=None):
        self.cells, self.error = cells, error

    setup = Halving.setup

    def sweep(self, arguments):
        lists = [[*arguments, *cell] for cell in self.cells]
        self.returned = self.launcher.launch(lists, initial_job_idx=0)
        if self.error is not None:
            raise self.error


def test_cells_that_cannot_run_are_refused_or_left_out(asking, tmp_path, capsys):
    """By default all are refused; with sweep.invalid=skip, each one's result is the reason."""
    place = tmp_path / "sweep"
    words = ["-m", "hydra/sweeper=list", "task=plan", "model=tiny_llama", "trainer=cpu"]
    words += [f"hydra.sweep.dir={place}"]
    asking(Listed(["lora.r=0"], ["lora.r=4"]))
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "lora.r: out of range" in said
    assert "1 of 2 cells cannot run, so none was started" in said
    assert record_of(place).jobs == []

    sweeper = asking(Listed(["lora.r=0"], ["lora.r=-1"]))
    skipping = [*words[:-1], f"{words[-1]}_2", "sweep.invalid=skip"]
    assert cli.main(skipping) == 0
    assert [one.status for one in sweeper.returned] == [JobStatus.FAILED] * 2
    with pytest.raises(Exception, match=r"cell 1 cannot run: .*lora\.r: out of range"):
        _ = sweeper.returned[1].return_value


def test_a_sweeper_that_fails_is_named(asking, tmp_path, capsys):
    """The message has the sweeper's own error, and the command to resume."""
    asking(Listed(error=ZeroDivisionError("no volume is left")))
    place = tmp_path / "sweep"
    words = ["-m", "hydra/sweeper=list", "task=plan", "model=tiny_llama", "trainer=cpu"]
    assert cli.main([*words, f"hydra.sweep.dir={place}"]) == 3
    said = capsys.readouterr().err
    assert "the sweeper list failed" in said
    assert "ZeroDivisionError: no volume is left (" in said
    assert f"sweep.resume={place}" in said.replace("\n", "").replace(" ", "")


def test_a_plugin_that_starts_nothing_is_quoted(tmp_path, monkeypatch):
    """The reason of each job is the plugin's error."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "sweep"
    words = ["-m", "task=plan", "model=tiny_llama", "trainer=cpu", "seed=1,2"]
    words += ["hydra/launcher=submitit_local", "hydra.launcher.submitit_folder=/dev/null/jobs"]
    words += [f"hydra.sweep.dir={place}"]
    assert cli.main(words) == 1
    reasons = {job["reason"] for job in record_of(place).jobs}
    (reason,) = reasons
    assert reason.startswith("submitit_local did not start it: NotADirectoryError")


def test_a_round_of_one_cell_that_cannot_run_is_left_out_too(asking, tmp_path):
    """With sweep.invalid=skip, as for a search that proposes one cell at a time."""
    words = ["-m", "hydra/sweeper=list", "task=plan", "model=tiny_llama", "trainer=cpu"]
    words += ["sweep.invalid=skip", f"hydra.sweep.dir={tmp_path}/sweep"]
    sweeper = asking(Listed(["lora.r=0"]))
    assert cli.main(words) == 0
    (returned,) = sweeper.returned
    with pytest.raises(Exception, match=r"cell 0 cannot run: .*lora\.r: out of range"):
        _ = returned.return_value
    assert [one["why"] for one in record_of(tmp_path / "sweep").left_out] == [
        "lora.r: out of range · found 0 · expected a value >= 1"
    ]


class Stubborn(Listed):
    """A sweeper that continues whatever happens to a round."""

    def sweep(self, arguments):
        self.went_on = False
        with suppress(Exception):
            super().sweep(arguments)
        self.went_on = True


def test_a_refusal_ends_a_sweeper_that_catches_errors(asking, tmp_path, capsys):
    """Otherwise it would propose cells that nobody will run."""
    sweeper = asking(Stubborn(["lora.r=0"]))
    words = ["-m", "hydra/sweeper=list", "task=plan", "model=tiny_llama", "trainer=cpu"]
    assert cli.main([*words, f"hydra.sweep.dir={tmp_path}/sweep"]) == 2
    assert "lora.r: out of range" in capsys.readouterr().err
    assert not sweeper.went_on


def refused(*texts):
    return check(texts, multirun=True).problems


def test_what_no_plugin_has_is_refused(monkeypatch):
    """For Hydra's own plugins, the message names the package to install."""
    (problem,) = refused("seed=1,2", "hydra/launcher=rq")
    assert problem.remedy == "pip install hydra-rq-launcher"
    (problem,) = refused("seed=1,2", "hydra/sweeper=nothing")
    assert problem.expected.startswith("basic, optuna")
    monkeypatch.setattr(override_values, "hydra_options", lambda kind: frozenset())
    (problem,) = refused("seed=1,2", "hydra/launcher=submitit_local")
    assert problem.remedy == "pip install hydra-submitit-launcher"


def test_objectives_are_a_plugins(tmp_path, capsys):
    """Otherwise they have no effect; unknown KPIs are refused before anything runs."""
    (problem,) = refused("seed=1,2", "sweep.objectives=[val_loss]")
    assert "has no effect with hydra/sweeper=basic" in str(problem)
    (problem,) = refused("lora.r=2,4", "hydra/sweeper=optuna", "sweep.objectives=[val_loss]")
    assert problem.remedy == "give hydra.sweeper.objectives"
    place = tmp_path / "sweep"
    words = ["-m", "hydra/sweeper=list", "model=tiny_llama", "trainer=cpu"]
    words += ["sweep.objectives=[val_los]", f"hydra.sweep.dir={place}"]
    assert cli.main(words) == 2
    assert "unknown KPI" in capsys.readouterr().err
    assert not place.exists()


def test_a_job_that_measures_no_objective_returns_why(asking, tmp_path):
    """A plan has no loss."""
    place, sweeper = tmp_path / "sweep", asking(Listed(["seed=1"]))
    words = ["-m", "hydra/sweeper=list", "task=plan", "model=tiny_llama", "trainer=cpu"]
    assert cli.main([*words, f"hydra.sweep.dir={place}"]) == 0
    (returned,) = sweeper.returned
    assert returned.status is JobStatus.FAILED
    with pytest.raises(Exception, match="cell 0 has no result: val_loss"):
        _ = returned.return_value
