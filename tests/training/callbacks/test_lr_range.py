from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mens_exp import cli
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events
from mens_exp.training.callbacks.lr_range import proposal

RATES = [10.0**exponent for exponent in np.linspace(-6, 0, 61)]


def smoothed(losses):
    """Return exponentially weighted means with a decay of 0.9."""
    found = []
    for last in range(len(losses)):
        weights = 0.9 ** np.arange(last, -1, -1)
        found.append(float(np.average(losses[: last + 1], weights=weights)))
    return found


def test_a_tenth_of_the_rate_of_the_lowest_smoothed_change_is_proposed():
    """The change falls from 1e-6 on and rises from 1e-2 on, with noise between batches."""
    batches = list(3 + np.random.default_rng(0).normal(0, 1, len(RATES)))
    changes = [abs(math.log10(rate) + 2) / 4 - 1 for rate in RATES]
    losses = [one + change for one, change in zip(batches, changes, strict=True)]
    found = proposal(RATES, losses, batches, diverged=False)
    expected = smoothed(changes)
    assert found["smoothed"] == pytest.approx(expected)
    lowest = RATES[int(np.argmin(expected))]
    assert found["lowest_at"] == lowest
    assert 1e-2 < lowest < 1e-1  # smoothing lags behind
    assert found["proposed"] == pytest.approx(lowest / 10)
    assert (found["from_rate"], found["to_rate"]) == (RATES[0], RATES[-1])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([-1.0] * 4, "it has 4 steps"),
        (list(np.linspace(0, 1, 61)), "no rate made the loss lower"),
        (list(np.linspace(0, -1, 61)), "still fell at the highest rate"),
        ([], "it has 0 steps"),
    ],
)
def test_a_test_that_shows_no_rate_proposes_none(changes, why):
    """The outcome gives the reason and what to change."""
    losses = [3 + one for one in changes]
    found = proposal(RATES[: len(losses)], losses, [3.0] * len(losses), diverged=False)
    assert found["proposed"] is None
    assert why in found["why_none"]


def outcome(tiny_run, tmp_path, *words):
    """Run a range test of up to fourteen steps; return its directory and outcome."""
    usual = {word.partition("=")[0]: word for word in tiny_run}
    usual.pop("schedule.warmup_steps")
    chosen = {"schedule": "schedule=lr_range", "trainer.max_steps": "trainer.max_steps=14"}
    place = tmp_path / "run"
    assert cli.main([*(usual | chosen).values(), f"hydra.run.dir={place}", *words]) == 0
    run = RunDir(place)
    return run, json.loads(run.manifest.read_text("utf-8"))["results"]["lr_range"]


@pytest.mark.draws
def test_a_run_records_what_each_rate_did_and_says_what_to_type(tiny_run, tmp_path, capsys):
    """The outcome, which the page plots, has the steps of the telemetry and an override."""
    run, found = outcome(tiny_run, tmp_path, "optim.lr=1e-2", "schedule.highest=1000")
    steps = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]
    rates = [step["optim/lr"] for step in steps]
    assert rates == pytest.approx(np.geomspace(1e-5, 10, 14)[: len(rates)])
    losses = [step["train/loss"] for step in steps]
    base = [step["train/base_loss"] for step in steps]
    assert found == proposal(rates, losses, base, diverged=found["diverged"])
    assert base[0] == pytest.approx(losses[0], rel=1e-5)  # B starts at zero
    assert base[1:] != losses[1:]
    page = run.report.read_text("utf-8")
    assert "Range test of learning rates" in page
    assert "Loss over learning rate" in page
    assert "mathdefault" not in page
    assert "a range test is of no use" in page
    said = capsys.readouterr().out
    if found["proposed"] is not None:
        assert f"optim.lr={found['proposed']:.2g}" in said
        assert "schedule=lr_range" not in said.rpartition("Next")[2]


def test_a_loss_that_diverges_ends_the_test(tiny_run, tmp_path):
    """It stops when the smoothed loss exceeds the multiple, and the run has succeeded."""
    run, found = outcome(tiny_run, tmp_path, "schedule.highest=1e7", "schedule.divergence=1.001")
    assert found["diverged"]
    steps = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]
    means = smoothed([step["train/loss"] for step in steps])
    assert means[-1] > 1.001 * min(means)
    assert all(one <= 1.001 * min(means[: n + 1]) for n, one in enumerate(means[:-1]))
    assert len(means) == len(found["smoothed"]) < 14
    assert json.loads(run.manifest.read_text("utf-8"))["status"] == "succeeded"


@pytest.mark.parametrize(
    "words",
    [
        ("objective.dft=true",),
        ("objective.z_loss=0.05", "objective.label_smoothing=0.3"),
        ("objective.neftune_alpha=15",),
        ("objective=distillation",),
        ("objective=dpo",),
        ("data.packing=false", "objective.weight_field=weight"),
    ],
)
def test_the_first_change_is_zero_under_every_form_of_the_loss(words, tiny_run, tmp_path):
    """The adapter starts at zero, so the model's loss is the base's, with weights and noise too."""
    if "objective=dpo" in words:
        answers = [{"chosen": f"x + {n}", "rejected": f"x - {n}"} for n in range(60)]
    else:
        answers = [{"response": f"x + {n}"} for n in range(60)]
    if "objective.weight_field=weight" in words:
        answers = [{**one, "fields": {"weight": 1 + n % 3}} for n, one in enumerate(answers)]
    rows = [{"prompt": f"Add {n}.", **answer} for n, answer in enumerate(answers)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    usual = [word for word in tiny_run if not word.startswith("data.path=")]
    settings = ("trainer.max_steps=1", "quant.compute_dtype=f32", "lora.dropout=0")
    _, found = outcome(usual, tmp_path, f"data.path={file}", *settings, *words)
    assert found["smoothed"] == pytest.approx([0.0], abs=1e-5)
