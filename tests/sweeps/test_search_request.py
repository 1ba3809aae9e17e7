from __future__ import annotations

import pytest

from mens_exp.errors import MensError, SetupError
from mens_exp.sweeps.process import jobs_at_a_time
from mens_exp.sweeps.search_request import read_request


@pytest.fixture
def asked(tiny_run, tmp_path, monkeypatch):
    """Request a search over the rank of `tiny_run` in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def made(*overrides):
        usual = [*tiny_run, "hydra/sweeper=optuna", "lora.r=4,8"]
        by_key = {text.partition("=")[0]: text for text in [*usual, *overrides]}
        return read_request(list(by_key.values()))

    return made


def refusal(asked, *overrides):
    with pytest.raises(MensError) as caught:
        asked(*overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_directions_are_those_of_the_kpis(asked, tmp_path):
    """Loss and memory are minimized; nothing is written yet."""
    request = asked(
        "hydra.sweeper.objectives=[val_loss,peak_bytes,tokens_per_s]",
        "hydra.sweeper.sampler=random",
        "hydra.launcher.n_jobs=2",
    )
    search = request.search
    assert search["directions"] == ["minimize", "minimize", "maximize"]
    assert (search["sampler"], search["n_trials"], search["pruner"]) == ("random", 20, "none")
    assert search["pruner_startup_trials"] is None
    assert "hydra/sweeper=optuna" in search["fixed"]
    assert [one["key"] for one in search["space"]] == ["lora.r"]
    assert (jobs_at_a_time(request.launcher), request.notes) == (2, ())
    assert list(tmp_path.iterdir()) == []


def test_all_that_is_wrong_with_the_settings_is_told_at_once(asked):
    """Each problem has its place."""
    said = refusal(
        asked,
        "hydra.sweeper.n_trials=0",
        "hydra.sweeper.objectives=[val_los,tokens,task_success,tokens]",
        "hydra.sweeper.sampler=random",
        "hydra.sweeper.startup_trials=3",
        "hydra.sweeper.pruner_min_steps=3",
        "task=plan",
    )
    for part in (
        "task: measures no objective · found plan",
        "n_trials: out of range",
        "unknown KPI · found val_los",
        "the nearest is val_loss",
        "more tokens is neither better nor worse",
        "objectives: names one twice",
        "startup_trials: has no effect with sampler=random",
        "pruner_min_steps: has no effect with pruner=none",
    ):
        assert part in said, said


def test_a_kpi_of_a_suite_needs_one(asked):
    """suite=none has no scores."""
    said = refusal(asked, "hydra.sweeper.objectives=[task_success]")
    assert "is measured by a suite, but none is chosen · found task_success" in said


def test_directions_stand_beside_objectives(asked):
    """There must be as many as objectives, with valid names."""
    said = refusal(asked, "hydra.sweeper.directions=[minimize,up]")
    assert "directions: needs a direction for each objective" in said
    given = asked("hydra.sweeper.objectives=[tokens]", "hydra.sweeper.directions=[maximize]")
    assert given.search["directions"] == ["maximize"]


def test_pruning_needs_validations_and_the_loss_alone(asked):
    """Otherwise it would have no effect, or would prune the wrong trials."""
    said = refusal(
        asked, "hydra.sweeper.pruner=median", "hydra.sweeper.objectives=[val_loss,peak_bytes]"
    )
    assert "pruner: has no effect because nothing is validated before training ends" in said
    assert "which is not the objective" in said
    request = asked("hydra.sweeper.pruner=median", "trainer.val_check_interval=4")
    assert request.search["pruner_startup_trials"] == 5


def test_tpe_needs_results_while_it_draws(asked):
    """If all trials are drawn before one has ended, TPE has nothing to model."""
    tpe = ["hydra.launcher.n_jobs=3", "hydra.sweeper.n_trials=3", "hydra.sweeper.startup_trials=2"]
    said = refusal(asked, *tpe)
    assert "hydra.launcher.n_jobs: leaves sampler=tpe nothing to model" in said
    assert "3 trials at a time, 3 in all" in said
    at_random = [tpe[0], tpe[1], "hydra.sweeper.sampler=random"]
    assert asked(*at_random).search["sampler"] == "random"
    assert asked(*tpe, "hydra.sweeper.n_trials=4").search["n_trials"] == 4
    said = refusal(asked, "hydra/launcher=slurm")
    assert "hydra.launcher.array_parallelism: leaves sampler=tpe nothing to model" in said
    assert "256 trials at a time, 20 in all" in said
    few = asked(*tpe, "hydra.sweeper.n_trials=2")  # all of them are startup trials, drawn at random
    assert few.search["startup_trials"] == 2


def test_what_keeps_a_launcher_from_working_keeps_a_search_from_it(asked, monkeypatch, tmp_path):
    """Zero jobs at a time, or a machine without Slurm."""
    assert "n_jobs: out of range" in refusal(asked, "hydra.launcher.n_jobs=0")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="Slurm's commands were not found"):
        asked("hydra/launcher=slurm", "hydra.launcher.array_parallelism=2")


def test_nothing_to_draw_is_no_search(asked):
    """With one value for each key it is a sweep of one job."""
    assert "there is nothing to draw" in refusal(asked, "lora.r=4")


def test_a_space_may_stand_in_an_experiment(asked, tmp_path):
    """In the form of Hydra's Optuna sweeper; a value on the command line takes precedence."""
    file = tmp_path / "conf" / "experiment" / "drawn.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/sweeper: optuna\n"
        "hydra:\n  sweeper:\n    n_trials: 3\n    params:\n"
        "      lora.r: choice(1, 2)\n      seed: range(1, 4)\n"
        "      optim.weight_decay: tag(log, interval(1e-5, 1e-3))\n      lora.alpha: 8\n",
        "utf-8",
    )
    search = asked("experiment=drawn").search
    drawn = {one["key"]: (one["kind"], one["values"], one["low"]) for one in search["space"]}
    assert drawn == {
        "lora.r": ("choice", ["4", "8"], None),
        "seed": ("int", [], 1.0),
        "optim.weight_decay": ("float", [], 1e-5),
    }
    assert search["n_trials"] == 3
    assert "lora.alpha=8" in search["fixed"]


def test_what_can_never_run_stops_a_search_unless_told(asked):
    """With sweep.invalid=skip it becomes a note, and such draws fail."""
    said = refusal(asked, "lora.r=4,0")
    assert "lora.r: out of range" in said
    assert "sweep.invalid=skip" in said
    (note,) = asked("lora.r=4,0", "sweep.invalid=skip").notes
    assert note.startswith("cannot run: lora.r=0: lora.r: out of range")


def test_an_unknown_setting_is_refused(asked):
    """Hydra's own schema of the sweeper refuses unknown settings."""
    assert "trials" in refusal(asked, "hydra.sweeper.trials=3")


def test_a_search_does_not_write_over_a_sweep(asked, tmp_path):
    """The message suggests to resume it or to choose another directory."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.json").write_text("{}", encoding="utf-8")
    said = refusal(asked, f"hydra.sweep.dir={tmp_path / 's'}")
    assert "a sweep already exists here" in said
