from __future__ import annotations

import pytest

from mens_exp.artifacts.sweep import JobState, SweepRecord
from mens_exp.report import html, search_view
from mens_exp.report.search_view import best_parts, drawn_from, search_drawings, space_parts

pytestmark = pytest.mark.draws


def trial(number, **more):
    made = {
        "number": number,
        "state": "complete",
        "params": {"lora.r": f"lora.r={number}"},
        "values": None,
        "intermediate": [],
        "reason": None,
        "job": number,
        "meaning": None,
    }
    return {**made, **more}


def searched(**more):
    """Return a search of two objectives: two trials on the front, one worse, one pruned."""
    dimension = {"key": "lora.r", "kind": "int", "values": [], "low": 1.0, "high": 8.0}
    search = {
        "sampler": "tpe",
        "seed": 3,
        "startup_trials": 10,
        "n_trials": 5,
        "pruner": "median",
        "pruner_startup_trials": 5,
        "pruner_min_steps": 1,
        "objectives": ["val_loss", "peak_bytes"],
        "directions": ["minimize", "minimize"],
        "fixed": [],
        "space": [{**dimension, "step": None, "log": True}],
        "trials": [
            trial(0, values=[1.0, 300.0], intermediate=[[10, 1.5], [20, 1.2]]),
            trial(1, values=[2.0, 100.0]),
            trial(2, values=[3.0, 200.0]),
            trial(3, state="pruned", reason="ended <early>", intermediate=[[10, 9.0]]),
            trial(4, values=[1.0, 300.0], job=0),
        ],
        "best": [0, 1],
        "importance": {"val_loss": {"lora.r": 1.0}},
        "importance_unknown": None,
        **more,
    }
    job = {
        "number": 0,
        "directory": "0_job",
        "differs": ["lora.r=0"],
        "state": JobState.SUCCEEDED,
        "reason": None,
        "config_digest": "c" * 64,
        "contract": None,
        "estimate": {},
        "results": {},
        "notes": [],
        "attempts": [],
    }
    return SweepRecord(
        sweep_id="<s>",
        created_utc="2026-11-20T05:58:01.123Z",
        command=["hydra/sweeper=optuna"],
        code_sha256="a" * 64,
        n_jobs=1,
        threads=1,
        retries=0,
        changes="refuse",
        jobs=[job],
        notes=["cannot run: lora.r=0"],
        search=search,
    )


def search_page(record):
    return html.page(search_view.document(record))


def test_the_page_shows_trials_best_and_drawings():
    """Each trial links to its report, and text is escaped."""
    text = search_page(searched())
    assert text == search_page(searched())
    assert '<a href="0_job/report.html">0</a>' in text
    assert "ended &lt;early&gt;" in text
    assert "&lt;s&gt;" in text
    assert "the same run as trial 0." in text
    assert "5 of 5 trials: 4 complete, 1 pruned; 1 came to the same run" in text
    assert "peak_bytes against val_loss" in text
    assert "<script" not in text


def test_two_objectives_have_progress_importance_and_a_front():
    """Learning curves are drawn if trials can be pruned; unknown plots give a reason."""
    assert searched().search is not None
    found = {plot.name: plot for plot in search_drawings(searched().search)}
    assert list(found) == [
        *("progress_0", "progress_1"),
        *("importance_val_loss", "importance_peak_bytes"),
        *("front_0_1", "curves"),
    ]
    assert found["importance_peak_bytes"].absent == "no key was drawn"
    assert all("<svg" in plot.svg for plot in found.values() if not plot.absent)


def test_the_best_trial_is_repeated_with_all_that_was_fixed():
    """The command omits the search's settings and a drawn seed, and adds other seeds."""
    fixed = ["model=tiny_llama", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=5"]
    fixed += ["hydra.sweep.dir=found", "hydra.launcher.n_jobs=2"]
    best = {**trial(0, values=[1.0, 2.0]), "params": {"seed": "seed=7", "lora.r": "lora.r=4"}}
    record = searched(fixed=fixed, trials=[best], best=[0])
    (step,) = search_view.document(record).steps
    kept = "model=tiny_llama hydra.launcher.n_jobs=2"
    assert step.command == f"python -m mens_exp -m {kept} seed=1,2,3 lora.r=4"


def test_a_search_whose_experiment_chose_the_sweeper_has_no_next_command():
    """That experiment would start the search again."""
    record = searched(fixed=["experiment=mine"])
    record.command = ["experiment=mine"]
    assert not search_view.document(record).steps


def test_a_search_without_results_says_so():
    """Each plot has a reason, and an empty front is not an error."""
    record = searched(trials=[], best=[], importance={}, importance_unknown="too few")
    assert record.search is not None
    reasons = {plot.absent for plot in search_drawings(record.search)}
    assert reasons == {"no trial is complete", "too few", "no trial validated in training"}
    assert "No trial is complete." in search_page(record)


def test_the_terminal_says_what_is_drawn_and_what_is_best(screen):
    """It is shown before the first trial and after the last."""
    before = screen(space_parts(searched()), 120)
    assert "1 to 8, whole numbers, even in the logarithm" in before
    assert "minimize val_loss, minimize peak_bytes; sampler tpe, seed 3, pruner median" in before
    assert "note: cannot run: lora.r=0" in before
    assert "lora.r=1" in screen(best_parts(searched()))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"kind": "choice", "values": ["a", "b"]}, "a, b"),
        ({"kind": "float", "low": 0.0, "high": 0.5, "step": 0.1}, "0 to 0.5 in steps of 0.1"),
        ({"kind": "float", "low": 1e-5, "high": 0.1}, "1e-05 to 0.1"),
    ],
)
def test_a_key_says_what_it_is_drawn_from(more, text):
    """Choices, bounds and steps are shown."""
    usual = {"key": "k", "values": [], "low": None, "high": None, "step": None, "log": False}
    assert drawn_from({**usual, **more}) == text


@pytest.mark.parametrize(
    ("directions", "between"),
    [
        (["minimize", "maximize"], 0.5),  # the better trial needs x > 2
        (["maximize", "maximize"], 0.9),
        (["maximize", "minimize"], 0.9),
        (["minimize", "minimize"], 0.5),
    ],
)
def test_a_front_claims_no_more_than_its_trials(monkeypatch, directions, between):
    """Between two trials the line keeps the value that is feasible there."""
    from matplotlib.figure import Figure

    lines = {}

    def drawn(name, _title, _caption, _inches, paint):
        axes = Figure().add_subplot()
        paint(axes)
        lines[name] = axes.lines

    monkeypatch.setattr(search_view, "drawn", drawn)
    trials = [trial(0, values=[1.0, 0.5]), trial(1, values=[2.0, 0.9])]
    search = searched(directions=directions, trials=trials).search
    assert search is not None
    search_drawings(search)
    (front,) = lines["front_0_1"]
    assert front.get_drawstyle() == {0.5: "steps-post", 0.9: "steps-pre"}[between]
