"""Check that the adapter in `lora.init_from` fits the run, before anything is loaded."""

from __future__ import annotations

import pytest

from mens_exp.artifacts.adapter_v3 import AdapterManifest, write_adapter
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import chosen
from mens_exp.planning.checks.adapter import check_initial_adapter
from mens_exp.planning.preflight import preflight


@pytest.fixture
def adapter_for(tmp_path):
    """Write a fresh adapter of the shape that a configuration trains."""
    import numpy as np

    def written(config, *, base):
        shape, r = shape_of(config.model), config.lora.r
        tensors = {}
        for one in chosen(config.lora, shape):
            tensors[f"{one.logical}.lora_a"] = np.ones((r, one.width), np.float32)
            tensors[f"{one.logical}.lora_b"] = np.zeros((one.out, r), np.float32)
        layers = [name.removesuffix(".lora_a") for name in tensors if name.endswith("_a")]
        manifest = AdapterManifest(
            adapter_method="qlora",
            quant={"base_quant": "nf4", "double_quant": True},
            base_key_map={layer: f"{layer}.weight" for layer in layers},
            layer_order=layers,
            vocab=shape.vocab_size,
            d_model=shape.hidden_size,
            rank=r,
            alpha=config.lora.alpha,
            mens_exp={"base_weights_sha256": base} if base else None,
        )
        write_adapter(tmp_path / "adapter", manifest, tensors)
        return f"lora.init_from={tmp_path / 'adapter'}"

    return written


def test_an_adapter_that_fits_is_accepted(
    adapter_for,
    tiny_config,
    tiny_base,
):
    """The base, layers and rank are the same; a run without lora.init_from is fine too."""
    start = adapter_for(tiny_config(), base=tiny_base.weights_sha256)
    assert list(check_initial_adapter(tiny_config(start))) == []
    assert list(check_initial_adapter(tiny_config())) == []


@pytest.mark.parametrize(
    ("overrides", "where", "text"),
    [
        (("lora.r=8",), "lora.r", "add lora.r=16"),
        (("lora.alpha=32",), "lora.alpha", "add lora.alpha=16"),
        (("lora.variant=rslora",), "lora.variant", "add lora.variant=lora"),
        (("+lora.alpha_pattern.down_proj=4",), "lora.alpha_pattern", "l0.down"),
        (("+lora.rank_pattern.down_proj=4",), "lora.init_from", "matrices have different shapes"),
        (("lora=mlp",), "lora.init_from", "layers that this run does not train"),
        (("model.intermediate_size=192",), "lora.init_from", "matrices have different shapes"),
        (("model.num_hidden_layers=3",), "lora.init_from", "lacks layers that this run trains"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    adapter_for,
    tiny_config,
    overrides,
    where,
    text,
):
    """`preflight` refuses it with exit code 2 and says what would fit."""
    start = adapter_for(tiny_config(), base=None)
    (problem,) = preflight(tiny_config(start, "data=stdlib", *overrides))
    assert (problem.where, problem.exit_code) == (where, 2)
    assert text in str(problem)


def test_more_layers_than_a_message_holds_are_counted(adapter_for, tiny_config):
    """The message has eight names and the number of the others."""
    start = adapter_for(tiny_config("lora=qv"), base=None)
    (problem,) = check_initial_adapter(tiny_config(start))
    assert "l0.down, l0.gate" in str(problem.found)
    assert str(problem.found).endswith("and 2 more")


def test_another_base_is_refused(
    adapter_for,
    tiny_config,
    tiny_base,
):
    """It is detected once the base is in the cache."""
    assert tiny_base.directory.is_dir()
    start = adapter_for(tiny_config(), base="cd" * 32)
    (problem,) = preflight(tiny_config(start))
    assert "trained on another base model" in str(problem)
    assert "base weights cdcdcdcdcdcd" in str(problem.found)


def test_a_missing_adapter_is_told_beside_everything_else(
    tiny_config,
):
    """It is reported together with the other problems of the command."""
    problems = preflight(tiny_config("lora.init_from=nowhere", "data.seq_len=4096"))
    assert sorted(str(problem.where) for problem in problems) == ["data.seq_len", "lora.init_from"]
