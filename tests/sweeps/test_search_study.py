from __future__ import annotations

import math
import sys
import warnings

import pytest

from mens_exp.artifacts.sweep import TrialState
from mens_exp.errors import MissingExtra
from mens_exp.sweeps.search_study import Study


def loss_of(params):
    """Return a loss that depends mainly on the learning rate; 1e-3 is best."""
    return (math.log10(params["optim.lr"]) + 3) ** 2 + 0.001 * int(params["lora.r"])


def drawn(study, search, first, trials):
    """Draw trials, and tell each one's loss."""
    found = []
    for number in range(first, first + trials):
        trial = study.ask(number)
        params = {one["key"]: study.suggest(trial, one) for one in search["space"]}
        study.tell(number, TrialState.COMPLETE, [loss_of(params)])
        found.append(params)
    return found


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_search_that_goes_on_draws_what_it_would_have(make_search, tmp_path, sampler):
    """A draw depends on the seed, the trial's number and the results so far."""
    search = make_search(sampler=sampler, startup_trials=3)
    whole = drawn(Study(tmp_path / "whole", search), search, 0, 12)
    first = drawn(Study(tmp_path / "parts", search), search, 0, 5)
    again = Study(tmp_path / "parts", search)
    assert len(again) == 5
    assert first + drawn(again, search, 5, 7) == whole
    assert len({one["optim.lr"] for one in whole}) == 12
    other = make_search(sampler=sampler, startup_trials=3, seed=1)
    assert drawn(Study(tmp_path / "other", other), other, 0, 5) != first


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_search_that_goes_back_draws_what_it_would_have(make_search, tmp_path, sampler):
    """A lost trial and a withdrawn failure leave no trace."""
    search = make_search(sampler=sampler, startup_trials=3)
    whole = drawn(Study(tmp_path / "whole", search), search, 0, 10)
    study = Study(tmp_path / "parts", search)
    first = drawn(study, search, 0, 5)
    trial = study.ask(5)
    failed = {one["key"]: study.suggest(trial, one) for one in search["space"]}
    study.should_end(5, [(10, 9.0)])
    study.tell(5, TrialState.FAILED)
    study.suggest(study.ask(6), search["space"][0])
    again = Study(tmp_path / "parts", search)
    again.go_back(6, {5})
    assert len(again) == 6
    again = Study(tmp_path / "parts", search)
    assert [one.state.name for one in again._study.trials] == ["COMPLETE"] * 5 + ["RUNNING"]
    assert again._study.trials[5].intermediate_values == {10: 9.0}
    again.tell(5, TrialState.COMPLETE, [loss_of(failed)])
    assert [*first, failed, *drawn(again, search, 6, 4)] == whole


def test_a_search_that_has_nothing_to_take_back_is_left_as_it_is(make_search, tmp_path):
    """The bytes of its journal stay."""
    search = make_search()
    study = Study(tmp_path / "j", search)
    drawn(study, search, 0, 2)
    study.ask(2)
    before = (tmp_path / "j").read_bytes()
    study.go_back(3, {2})
    assert (tmp_path / "j").read_bytes() == before


def test_tpe_comes_closer_than_chance(make_search, tmp_path):
    """The median loss of the last ten of forty draws is less than half of random sampling's."""
    median = {}
    for sampler in ("tpe", "random"):
        search = make_search(sampler=sampler)
        found = drawn(Study(tmp_path / sampler, search), search, 0, 40)
        median[sampler] = sorted(map(loss_of, found[-10:]))[5]
    assert median["tpe"] < median["random"] / 2


def test_values_stay_between_their_ends(make_search, tmp_path):
    """Integers in steps, and floats in steps."""
    usual = {"values": [], "log": False}
    space = [
        {"key": "a", "kind": "int", "low": 4.0, "high": 12.0, "step": 4.0, **usual},
        {"key": "b", "kind": "float", "low": 0.0, "high": 0.2, "step": 0.1, **usual},
    ]
    search = make_search(space=space)
    study = Study(tmp_path / "j", search)
    trials = [study.ask(number) for number in range(20)]
    assert {study.suggest(trial, search["space"][0]) for trial in trials} == {4, 8, 12}
    found = {round(float(study.suggest(trial, search["space"][1])), 9) for trial in trials}
    assert found == {0.0, 0.1, 0.2}


def test_the_median_ends_a_trial_that_is_worse(make_search, tmp_path):
    """Only after enough complete trials, and enough steps of the trial."""
    search = make_search(pruner="median", pruner_startup_trials=2, pruner_min_steps=20)
    study = Study(tmp_path / "j", search)
    for number, loss in enumerate((1.0, 2.0)):
        study.ask(number)
        assert not study.should_end(number, [(10, loss), (20, loss)])
        study.tell(number, TrialState.COMPLETE, [loss])
    study.ask(2)
    with warnings.catch_warnings(action="error"):  # optuna's, of a step that is reported twice
        assert not study.should_end(2, [(10, 9.0), (10, 9.0)])
    assert study.should_end(2, [(10, 9.0), (20, 9.0)])
    assert not study.should_end(2, [(10, 9.0), (20, 9.0)])  # nothing new was reported
    study.tell(2, TrialState.PRUNED)
    study.ask(3)
    assert not study.should_end(3, [(10, 1.2), (20, 1.2)])


def test_hyperband_ends_trials_too(make_search, tmp_path):
    """Of thirty trials whose losses never cross, some worse ones are pruned and never the best."""
    search = make_search(pruner="hyperband")
    study = Study(tmp_path / "j", search)
    ended = []
    for number in range(30):
        study.ask(number)
        loss = 1.0 + number % 10
        cut = False
        for step in (1, 3, 9, 27):
            points = [(each, loss) for each in (1, 3, 9, 27) if each <= step]
            cut = cut or study.should_end(number, points)
        ended += [loss] if cut else []
        study.tell(
            number, TrialState.PRUNED if cut else TrialState.COMPLETE, None if cut else [loss]
        )
    assert ended
    assert 1.0 not in ended


def test_importance_names_what_decides(make_search, tmp_path):
    """It is unknown below ten complete trials."""
    search = make_search()
    study = Study(tmp_path / "j", search)
    drawn(study, search, 0, 9)
    assert study.importance() == {}
    assert study.why_no_importance() == "fewer than 10 trials are complete"
    drawn(study, search, 9, 31)
    shares = study.importance()["val_loss"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["optim.lr"] > 0.7


def test_half_a_line_and_a_lock_left_behind_are_no_obstacle(make_search, tmp_path):
    """A killed process leaves both."""
    search, journal = make_search(), tmp_path / "search.journal"
    drawn(Study(journal, search), search, 0, 2)
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"wor')
    (tmp_path / "search.journal.lock").symlink_to(journal)
    again = Study(journal, search)
    assert len(again) == 2
    drawn(again, search, 2, 1)
    assert len(Study(journal, search)) == 3


def test_a_trial_that_has_ended_stays_as_it_is(make_search, tmp_path):
    """Catching up may tell a result twice."""
    search = make_search()
    study = Study(tmp_path / "j", search)
    drawn(study, search, 0, 1)
    study.tell(0, TrialState.FAILED)
    again = Study(tmp_path / "j", search)
    assert [trial.state.name for trial in again._study.trials] == ["COMPLETE"]


def test_without_optuna_the_extra_is_named(make_search, tmp_path, monkeypatch):
    """Exit code 3, since the machine lacks a package."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"mens-exp\[search\]") as caught:
        Study(tmp_path / "j", make_search())
    assert caught.value.exit_code == 3
