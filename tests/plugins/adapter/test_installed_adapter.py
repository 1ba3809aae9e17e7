"""An adapter method from an installed package: one object, one YAML file and this test."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import read_item_events
from mens_exp.config.lora import ADAPTERS
from mens_exp.errors import SetupError
from mens_exp.lora.method import method_of

GAINS = ("lora=gains", "optim.lr=0.02")
LAYERS = {f"l{layer}.{kind}" for layer in (0, 1) for kind in "qkvo"}


def read(path):
    return json.loads(path.read_text("utf-8"))


def gains(run):
    return load_file(run.adapter / "adapter.safetensors")


def test_gains_are_learned_recorded_and_go_on_after_a_stop(trained, typed):
    """A run in two parts is bitwise equal to one in a single part; there is no PEFT form."""
    run = trained(*GAINS, "trainer.max_steps=2")
    early = gains(run)
    typed("resume=run", "trainer.max_steps=4")
    found, whole = gains(run), gains(trained(*GAINS, name="whole"))
    assert {name.removesuffix(".gain") for name in found} == LAYERS
    assert all(np.abs(values - 1).max() > 0.01 for values in found.values())
    assert all(np.array_equal(found[name], whole[name]) for name in whole)
    assert not all(np.array_equal(found[name], early[name]) for name in early)
    manifest = read(run.manifest)
    facts = manifest["facts"]
    assert (facts["lora_variant"], facts["trainable_matrices"]) == ("gains", len(LAYERS))
    assert facts["trainable_parameters"] == sum(values.size for values in found.values())
    compared = manifest["data_contract"]["probe"]["reference"]
    assert 0 < compared["gradient"] < 1e-4
    recorded = read(run.adapter / "adapter_manifest.json")
    assert recorded["mens_exp"]["variant"] == "gains"
    assert recorded["mens_exp"]["tensors"] == {"gain": ["out"]}
    assert not run.peft.exists()


def test_merged_weights_are_the_rows_times_their_gains(trained, typed, tiny_base, tmp_path):
    """The merge is certified; PEFT's form and a merge without the package are refused by name."""
    run = trained(*GAINS, "backend=lora", "quant=none")
    typed("task=merge", "parity.tokens=64", "path=run", "out=merged", "hydra.run.dir=record")
    merged, learned = load_file(tmp_path / "merged" / "model.safetensors"), gains(run)
    base = load_file(tiny_base.directory / "model.safetensors")
    keys = read(run.adapter / "adapter_manifest.json")["base_key_map"]
    for layer, key in keys.items():
        expected = base[key] * learned[f"{layer}.gain"][:, None]
        np.testing.assert_allclose(merged[key], expected, rtol=2**-7)
    assert read(RunDir(tmp_path / "record").parity)["passed"]
    said = typed("task=export", "path=run", "export.format=peft", "out=peft", code=2)
    assert "a PEFT directory of gains cannot be made from an adapter file" in said.stderr
    said = typed("task=merge", "path=run", "out=again", code=2, with_toys=False)
    assert "gains" in said.stderr
    assert not (tmp_path / "again").exists()


def test_a_saved_adapter_answers_as_the_trained_one(trained, typed, untimed, tmp_path):
    """Its gains are loaded into a fresh model."""
    suite = ("suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=40")
    run = trained(*GAINS, *suite, "optim.lr=2")
    typed("task=evaluate", "path=run", *suite, "logger=none", "hydra.run.dir=scored")
    assert untimed(RunDir(tmp_path / "scored")) == untimed(run)
    base, tuned = (event["completion"] for event in read_item_events(run.events)[::2])
    assert base != tuned


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lora.start=0", "lora.start"),
        ("lora.r=8", "with lora.variant=gains, which does not read it"),
        ("lora.init=pissa", "lora.init"),
        ("lora.targets=[lm_head]", "for linear layers of decoder layers alone"),
        ("backend=burn", "lora.variant"),
        ("lora=qkv lora.variant=gains", "lora.variant"),
    ],
)
def test_what_gains_cannot_have_is_refused(trained, word, said):
    """The method's declarations decide, before anything is built."""
    done = trained(*GAINS, *word.split(), "task=plan", code=2)
    assert said in done.stderr


@pytest.mark.parametrize("method", ["no_such_module:IT", "math:pi", "math:no_such_name"])
def test_a_method_without_an_object_is_refused(method):
    """The import path is resolved when a model is built, and must give a method."""
    spec = replace(ADAPTERS.named("lora"), name="nowhere", method=method)
    with pytest.raises(SetupError, match="the adapter method nowhere cannot be used"):
        method_of(spec)
