"""Controls for the comparison with the reference trainer: other losses, masks, schedules."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import independent
import pytest
import reference_trainer as reference
import torch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run on rows of unequal lengths, two micro-batches a step, and its first adapter."""
    place = tmp_path_factory.mktemp("trained")
    probe = independent.probe_of("plain")
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.chdir(place)
        independent.prepare(probe)
        ours = independent.trained_by_mens_exp(probe)
        return place, probe, ours, independent.adapter_in(Path("first"))


def mean_of_micro_batches(several, micro_batches):
    """Return the mean of the micro-batches' means, which differs from that over all tokens."""
    token_mean = reference.mean_of_tokens(reference.cross_entropy)
    return torch.stack([token_mean(several, [one]) for one in micro_batches]).mean()


def with_prompts(several, micro_batches):
    """Return the loss over whole texts."""
    whole = [
        [one._replace(learned=list(range(1, len(one.ids)))) for one in micro_batch]
        for micro_batch in micro_batches
    ]
    return reference.mean_of_tokens(reference.cross_entropy)(several, whole)


@pytest.mark.parametrize(
    ("wrong", "seen_in"),
    [
        ({}, set()),
        ({"loss": mean_of_micro_batches}, {"loss", "gradient norm", "validation loss", "adapter"}),
        ({"loss": with_prompts}, {"loss", "gradient norm", "validation loss", "adapter"}),
        ({"rate": lambda step, steps: 1 - step / steps}, {"learning rate", "adapter"}),
        (
            {"optimizer": lambda some: torch.optim.AdamW(some, lr=independent.RATE, eps=1e-4)},
            {"adapter"},  # torch's default decay of 0.01
        ),
    ],
    ids=["right", "mean of micro-batches", "prompts learned", "another schedule", "another decay"],
)
def test_a_wrong_trainer_is_beyond_the_tolerances(trained, monkeypatch, wrong, seen_in):
    """The correct trainer is within all tolerances."""
    place, probe, ours, first = trained
    monkeypatch.chdir(place)
    theirs = independent.trained_by_reference(replace(probe, **wrong))
    found = independent.differences(ours, theirs, first)
    beyond = {name for name, value in found.items() if value > independent.TOLERANCES[name]}
    assert beyond >= seen_in
    assert bool(beyond) == bool(seen_in)


def test_a_difference_ends_the_script_with_1(monkeypatch, tmp_path):
    """The probe is named, and its figure is recorded."""
    wrong = independent.probe_of("wrong mean", loss=mean_of_micro_batches)
    monkeypatch.setattr(independent, "smallest", lambda: [wrong])
    monkeypatch.setattr(sys, "argv", ["independent.py", "--smallest", "--results", str(tmp_path)])
    with torch.random.fork_rng(), pytest.raises(SystemExit, match="wrong mean"):
        independent.main()
    (run,) = independent.record.Results.read(tmp_path / "independent.json").runs
    assert run["figures"][0]["ratio"] > 1


def test_the_reference_imports_nothing_of_mens_exp():
    """An oracle shares no code with what it judges."""
    tree = ast.parse(Path(reference.__file__).read_text("utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [one.name for one in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {"torch", "transformers", "peft"} < imported
    standard = sys.stdlib_module_names | {"__future__"}
    assert imported - standard == {"torch", "transformers", "peft", "safetensors"}
