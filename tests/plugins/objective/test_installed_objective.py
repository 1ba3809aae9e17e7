"""An objective from an installed package: one object, one YAML file and this test."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.numpy import load_file

from mens_exp.config.objective import OBJECTIVES
from mens_exp.errors import SetupError
from mens_exp.objective.causal import Passed
from mens_exp.rows.documents import Labelling

CONTRAST = ("objective=contrast", "data.path=worse.jsonl")


@pytest.fixture(autouse=True)
def worse_rows(tmp_path, rows_file):
    """Write the usual rows, each with a worse answer in its own column."""
    rows = [json.loads(line) for line in rows_file.read_text("utf-8").splitlines()]
    rows = [row | {"bad": "no" * (1 + i % 3)} for i, row in enumerate(rows)]
    path = tmp_path / "worse.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return "data.columns={prompt:prompt,response:response,fields:{worse:bad}}"


def validations(run):
    events = map(json.loads, run.telemetry.read_text("utf-8").splitlines())
    return [event["payload"] for event in events if event["event"] == "validation"]


def test_answers_gain_on_worse_ones(trained, typed, worse_rows):
    """The margin grows from zero; a run in two parts is bitwise equal to one in a single part."""
    run = trained(*CONTRAST, worse_rows, "objective.first=4", "trainer.max_steps=2")
    typed("resume=run", "trainer.max_steps=4")
    whole = trained(*CONTRAST, worse_rows, "objective.first=4", name="whole")
    for name, values in load_file(whole.adapter / "adapter.safetensors").items():
        assert (load_file(run.adapter / "adapter.safetensors")[name] == values).all()
    base, tuned = validations(whole)
    assert (base["val/loss"], base["val/gain"], base["val/wins"]) == (1, 0, 0)
    assert tuned["val/loss"] < 1
    assert 0 < tuned["val/gain"] == pytest.approx(1 - tuned["val/loss"])  # no pair exceeds it
    assert tuned["val/wins"] > 0.5
    steps = [json.loads(line) for line in whole.telemetry.read_text("utf-8").splitlines()]
    assert all("train/gain" in one["payload"] for one in steps if one["event"] == "step")
    manifest = json.loads(whole.manifest.read_text("utf-8"))
    assert manifest["contract"]["settings"]["objective.margin"] == 1
    assert manifest["provenance"]["own_classes"]["targets"] == ["toy_objective.Contrast"]
    assert "may be no likelihood" in manifest["unknown"]["results.tuned_val_bits_per_byte"]
    compared = manifest["data_contract"]["probe"]["reference"]
    assert 0 < compared["gradient"] < 1e-4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.columns={}"], "unknown key 'bad'"),
        (["data.columns={prompt:prompt,response:response}"], "fields that the objective reads"),
        (["objective=assistant"], "data.columns={fields:{name:column}}"),
        (["objective.margin=0"], "objective.margin"),
        (["objective.k=1"], "objective.k"),
        (["backend=full", "quant=none", "optim.lr=1e-4"], "compares with the base at every step"),
    ],
)
def test_what_it_cannot_learn_from_is_refused(trained, worse_rows, words, said, tmp_path):
    """The error comes before training."""
    done = trained(*CONTRAST, worse_rows, *words, code=2)
    assert said in done.stderr
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.fixture
def toy(monkeypatch):
    """Import the package's module from its file."""
    place = Path(__file__).with_name("toy_objective.py")
    spec = importlib.util.spec_from_file_location("toy_objective", place)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_loss_is_what_is_missing_to_the_margin(toy):
    """By hand for two pairs: one has a margin of 0.36, and the other exceeds the required one."""
    head = torch.nn.Identity()
    ours = [[0.2, 0.8], [0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]
    base = [[0.5, 0.5], [0.4, 0.6], [0.1, 0.9], [0.5, 0.5]]
    batch = SimpleNamespace(
        targets_M=torch.tensor([1, 0, 0, 1]),
        document_M=torch.tensor([6, 7, 2, 3]),
        extra={"share": torch.tensor([1.0, 0.5, 1.0, 1.0])},
    )
    hidden = torch.tensor(ours).log().requires_grad_()
    passed = Passed(batch, hidden, head, Passed(batch, torch.tensor(base).log(), head))
    found = toy.Contrast(margin=1.0, chunk_tokens=3).loss(passed)
    first = math.log(0.8 / 0.5) - 0.5 * math.log(0.5 / 0.4)
    second = math.log(0.9 / 0.1)
    assert second > 1 > first > 0
    assert found.count == 2
    assert found.total.item() == pytest.approx(1 - first)
    assert found.metrics["gain"].item() == pytest.approx(first + second)
    assert found.metrics["wins"].item() == 2
    found.total.backward()
    assert hidden.grad[:2].abs().min() > 0
    assert not hidden.grad[2:].any()


@pytest.mark.parametrize("place", ["no_such_module:IT", "math:pi"])
def test_an_objective_without_documents_is_refused(monkeypatch, place):
    """The import path of its documents is resolved when rows are encoded."""
    spec = replace(OBJECTIVES.named("assistant"), name="nowhere", documents=place)
    monkeypatch.setattr(OBJECTIVES, "_known", {"nowhere": spec})
    with pytest.raises(SetupError, match="the objective nowhere cannot be used"):
        Labelling(objective="nowhere", seq_len=8).rows  # noqa: B018  # it is looked up
