"""A quantizer from an installed package: one object, one YAML file and this test."""

from __future__ import annotations

import json

import pytest

from mens_exp.config.quant import QuantizerSpec
from mens_exp.errors import SetupError
from mens_exp.quant.binding import binding_of


def test_a_run_trains_on_an_installed_quantizer(trained):
    """The base is quantized, matches transformers with its values, and is recorded by name."""
    run = trained("quant=steps")
    manifest = json.loads(run.manifest.read_text("utf-8"))
    facts = manifest["facts"]
    assert (facts["quant"], facts["levels"]) == ("steps", 15)
    assert facts["quantized_linears"] == 14  # seven in each of two layers
    compared = manifest["data_contract"]["probe"]["reference"]
    assert 0 < compared["gradient"] < 1e-4
    adapter = json.loads((run.adapter / "adapter_manifest.json").read_text("utf-8"))
    assert adapter["quant"] == {"base_quant": "steps", "double_quant": False}


def test_its_settings_are_those_that_it_reads(trained):
    """Rows share a step, so quant.block_size is refused as for int8."""
    done = trained("quant=steps", "quant.block_size=128", "task=plan", code=2)
    assert "quant.block_size" in done.stderr
    assert "with quant.quant_type=steps" in done.stderr


@pytest.mark.parametrize("binding", ["no_such_module:IT", "math:pi", "math:no_such_name"])
def test_a_quantizer_without_a_binding_is_refused(binding):
    """The import path is resolved when a base is loaded, and must give a binding."""
    spec = QuantizerSpec(name="nowhere", binding=binding, code_bits=8)
    with pytest.raises(SetupError, match="the quantizer nowhere cannot be used"):
        binding_of(spec)
