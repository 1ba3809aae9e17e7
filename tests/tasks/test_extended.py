"""Runs that were resumed with more steps, compared with uninterrupted ones."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events
from mens_exp.planning.contract import recorded_digest

COSINE = ("schedule=cosine", "seed=8", "checkpoint.every_n_steps=1")
LR = 1e-3  # of tiny runs


@pytest.fixture(scope="module")
def extended(train_in, tmp_path_factory):
    """A run of three steps extended to six; do not change it."""
    run = train_in(tmp_path_factory.mktemp("extended") / "run", *COSINE, "trainer.max_steps=3")
    assert cli.main([f"resume={run.path}", "trainer.max_steps=6"]) == 0
    return run


@pytest.fixture(scope="module")
def straight(train_in, tmp_path_factory):
    """An uninterrupted run of six steps; do not change it."""
    return train_in(tmp_path_factory.mktemp("straight") / "run", *COSINE, "trainer.max_steps=6")


def rates(run):
    events = [one["payload"] for one in read_events(run.telemetry) if one["event"] == "step"]
    return [payload["optim/lr"] for payload in events]


def cosine(step, total):
    return LR * (1 + math.cos(math.pi * step / total)) / 2


def adapter(run):
    return (run.adapter / "adapter.safetensors").read_bytes()


def contract(run):
    return Manifest.read(run.manifest).contract


def test_an_extended_run_has_a_contract_of_its_own(extended, straight):
    """Its first three steps had the rates of a three-step run, so its adapter is another."""
    assert rates(straight) == pytest.approx([cosine(step, 6) for step in range(6)])
    first, then = [cosine(step, 3) for step in range(3)], [cosine(step, 6) for step in (3, 4, 5)]
    assert rates(extended) == pytest.approx(first + then)
    assert adapter(extended) != adapter(straight)
    assert contract(extended)["digest"] != contract(straight)["digest"]
    assert contract(extended)["exec"].pop("extensions") == [{"step": 3, "total": 3}]
    plan = json.loads(extended.plan.read_text("utf-8"))
    assert plan["contract_digest"] == contract(extended)["digest"]


def test_an_interrupted_run_keeps_the_contract(broken, straight, tmp_path):
    """A run that was interrupted in its fourth step keeps the schedule of six, and its contract."""
    run = broken(tmp_path / "run", 7, *COSINE, "trainer.max_steps=6")
    assert cli.main([f"resume={run.path}"]) == 0
    assert Manifest.read(run.manifest).attempts[-1]["resumed_from_step"] == 3
    assert adapter(run) == adapter(straight)
    assert contract(run) == contract(straight)


def test_an_extended_run_stays_extended_when_it_is_resumed(broken, tmp_path):
    """A third attempt without a number of steps keeps the extended schedule."""
    run = broken(tmp_path / "run", 5, *COSINE, "trainer.max_steps=3")
    assert cli.main([f"resume={run.path}", "trainer.max_steps=6"]) == 0
    (run.checkpoints / "step_00000006.ckpt").unlink()
    manifest = Manifest.read(run.manifest)
    manifest.status = Status.FAILED
    manifest.write(run.manifest)
    assert contract(run)["exec"]["extensions"] == [{"step": 2, "total": 3}]
    before = contract(run)
    assert cli.main([f"resume={run.path}"]) == 0
    assert contract(run) == before
    assert rates(run)[:3] == pytest.approx([cosine(0, 3), cosine(1, 3), cosine(2, 6)])


def test_an_extended_run_replays_by_its_attempts(extended, inspect):
    """The replay takes the rates of each attempt: the first three of three steps, then of six."""
    found = inspect(extended.path, "inspect.replay=true", "inspect.replay_steps=6").replay
    assert (found["identical_through"], found["first_difference"]) == (6, None)
    assert any("extended from 3 to 6 steps after step 3" in one for one in found["conditions"])


def test_a_replay_is_refused_if_more_than_the_rates_depends_on_the_length(
    finished_with, typed, tmp_path
):
    """AdaLoRA allocates ranks over the whole run, so an extended run cannot be replayed."""
    source = finished_with("lora=adalora", "lora.target_r=4")
    run = RunDir(shutil.copytree(source.path, tmp_path / "run"))
    manifest = Manifest.read(run.manifest)
    manifest.contract["exec"]["extensions"] = [{"step": 2, "total": 2}]
    manifest.contract["digest"] = recorded_digest(manifest.contract)
    manifest.write(run.manifest)
    said = typed("task=inspect", f"path={run.path}", "inspect.replay=true", code=2)
    said = " ".join(said.split())
    assert "extended from 2 to 4 steps after step 2, with lora.variant=adalora" in said
    assert "inspect.verify=true" in said


def test_comparing_an_extended_run_says_so(extended, straight, compare):
    """An extended and an uninterrupted run are not two equal runs of one arm and seed."""
    record = compare(f"'{straight.path},{extended.path}'")
    (contrast,) = record.contrasts
    words = "extended from 3 to 6 steps after step 3"
    assert words in contrast["confounded_by"][0]
    label = f"seed 8 of {contrast['arm']} was {words}, so its schedule differs"
    assert any(one.startswith(label) for one in contrast["environment"])
