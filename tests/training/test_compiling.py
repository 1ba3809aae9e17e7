"""trainer.compile, from the command line to the record."""

from __future__ import annotations

import json

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.backends.qlora import QloraBackend
from mens_exp.errors import SetupError
from mens_exp.lora.keyed import LOWBIAS32, SFC64
from mens_exp.model.compiled import NUMERICS
from mens_exp.planning import compiling
from mens_exp.planning.compiling import Rate

TRUE = ("trainer.compile=true", "model.num_hidden_layers=1", "data.contract.probe=false")


def adapter(run):
    return (run.adapter / "adapter.safetensors").read_bytes()


def facts(run):
    return Manifest.read(run.manifest).facts


def planned(run):
    return json.loads(run.plan.read_text("utf-8"))["compile"]


@pytest.fixture
def pays(monkeypatch):
    """Pretend that compiling saves half of every step, and takes no time."""
    monkeypatch.setitem(compiling.RATES, "cpu", Rate(saved_frac=0.5, compile_s=0.0))


@pytest.fixture
def no_compiler(monkeypatch):
    """Pretend that this machine has no C++ compiler."""
    monkeypatch.setattr(compiling, "has_compiler", lambda: False)


def test_a_compiled_run_in_two_parts_is_the_run_in_one(whole_and_parts, monkeypatch):
    """Resuming gives the same bytes, with every layer in compiled code all the time."""
    import torch

    real = torch.compiler.set_stance
    stances = {"eager_on_recompile": "fail_on_recompile"}
    monkeypatch.setattr(torch.compiler, "set_stance", lambda name: real(stances.get(name, name)))
    whole, parts = whole_and_parts(*TRUE)
    assert adapter(whole) == adapter(parts)
    for run in (whole, parts):
        found = facts(run)
        decision = found["compile"]
        assert (decision["layers"], decision["reason"]) == ("compiled", "trainer.compile=true")
        assert decision["graphs"] > 0
        assert planned(run) == {name: decision[name] for name in ("layers", "reason")}
        assert found["numerics"]["layers"] == NUMERICS
        assert found["numerics"]["dropout"] == LOWBIAS32
        assert not [one for one in Manifest.read(run.manifest).notes if "other forms" in one]


def test_auto_runs_eagerly_on_a_cpu_and_says_why(finished):
    """The record has the measured rate; numerics are those of earlier releases."""
    found = facts(finished)
    assert found["compile"]["layers"] == "eager"
    assert planned(finished) == found["compile"]
    assert found["compile"]["reason"].startswith("it saves 1.4% of a step on cpu, as measured")
    assert "layers" not in found["numerics"]
    assert found["numerics"]["dropout"] == SFC64


@pytest.mark.usefixtures("pays")
def test_auto_compiles_where_that_pays_and_keeps_to_it(train_in, tmp_path, monkeypatch):
    """A resumed run compiles as it had, whatever the rates are then."""
    made = []

    def compile_layers(self, batch):
        made.append(batch.index)
        return 1

    monkeypatch.setattr(QloraBackend, "compile_layers", compile_layers)
    run = train_in(tmp_path / "run", "trainer.max_steps=2")
    assert facts(run)["compile"]["reason"] == "it pays, by the measured rates"
    monkeypatch.setitem(compiling.RATES, "cpu", Rate(saved_frac=0.0, compile_s=0.0))
    assert cli.main([f"resume={run.path}", "trainer.max_steps=3"]) == 0
    assert facts(run)["compile"]["layers"] == "compiled"
    assert made == [0, 0]


def test_a_resumed_run_stays_eager(train_in, tmp_path, monkeypatch):
    """So does that of an earlier release, which has recorded no decision."""
    run = train_in(tmp_path / "run", "trainer.max_steps=2")
    monkeypatch.setitem(compiling.RATES, "cpu", Rate(saved_frac=0.5, compile_s=0.0))
    reason = facts(run)["compile"]["reason"]
    assert cli.main([f"resume={run.path}", "trainer.max_steps=3"]) == 0
    assert facts(run)["compile"] == {"layers": "eager", "reason": reason}
    manifest = json.loads(run.manifest.read_text("utf-8"))
    del manifest["facts"]["compile"]
    run.manifest.write_text(json.dumps(manifest), "utf-8")
    assert cli.main([f"resume={run.path}", "trainer.max_steps=4"]) == 0
    assert facts(run)["compile"] == {
        "layers": "eager",
        "reason": "the run was started by a release that compiled none",
    }


def test_a_resumed_run_draws_masks_from_the_generator_that_it_recorded(train_in, tmp_path):
    """A run with masks of lowbias32 continues with them where nothing is compiled."""
    ends = []
    for generator in (SFC64, LOWBIAS32):
        run = train_in(tmp_path / generator[:3], "trainer.max_steps=2")
        manifest = json.loads(run.manifest.read_text("utf-8"))
        assert manifest["facts"]["numerics"]["dropout"] == SFC64
        manifest["facts"]["numerics"]["dropout"] = generator
        run.manifest.write_text(json.dumps(manifest), "utf-8")
        assert cli.main([f"resume={run.path}", "trainer.max_steps=3"]) == 0
        assert facts(run)["numerics"]["dropout"] == generator
        ends.append(adapter(run))
    assert ends[0] == adapter(train_in(tmp_path / "through", "trainer.max_steps=3"))
    assert ends[0] != ends[1]


@pytest.mark.usefixtures("pays")
def test_auto_falls_back_where_torch_cannot_compile(train_in, tmp_path, monkeypatch):
    """The reason is a fact; with true, it is an error."""

    def compile_layers(self, batch):
        raise SetupError("torch cannot compile the decoder layers", found="no such instruction")

    monkeypatch.setattr(QloraBackend, "compile_layers", compile_layers)
    run = train_in(tmp_path / "run", "trainer.max_steps=1")
    reason = "torch cannot compile the decoder layers: no such instruction"
    assert facts(run)["compile"] == {"layers": "eager", "reason": reason}
    train_in(tmp_path / "refused", *TRUE, "trainer.max_steps=1", code=3)


def test_false_compiles_nothing(train_in, tmp_path):
    """The bytes are those of auto on a CPU."""
    found = train_in(tmp_path / "run", "trainer.compile=false", "trainer.max_steps=1")
    assert facts(found)["compile"] == {"layers": "eager", "reason": "trainer.compile=false"}
