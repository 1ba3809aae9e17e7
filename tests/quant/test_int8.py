from __future__ import annotations

import logging

import pytest
import torch
from bitsandbytes.nn import Int8Params, Linear8bitLt

from mens_exp.config.quant import QuantConfig, QuantType
from mens_exp.planning.memory import bits_per_weight
from mens_exp.quant.bnb import dequantized, quantization_config
from mens_exp.quant.layers import (
    as_published,
    differs_in_evaluation,
    keep_trainable,
    quantization_facts,
    quantized_linears,
)

INT8 = QuantConfig(quant_type=QuantType.int8, double_quant=False)
INPUTS, OUTPUTS = 96, 64  # no multiple of 64, since int8 scales rows


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unguarded():
    """Return a quantized layer with a bias as transformers' loader makes it."""
    layer = Linear8bitLt(INPUTS, OUTPUTS, has_fp16_weights=False, threshold=6.0)
    layer.weight = Int8Params(drawn(OUTPUTS, INPUTS), requires_grad=False)
    layer.bias.data = drawn(OUTPUTS, seed=1)
    return torch.nn.Sequential(layer.to("cpu")).requires_grad_(requires_grad=False)


@pytest.fixture
def model():
    made = unguarded()
    keep_trainable(made)
    return made


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def gradient_of(model):
    """Return the gradient of a sum of squares by the input, in training."""
    x = drawn(3, INPUTS, seed=2).requires_grad_()
    (gradient,) = torch.autograd.grad(model.train()(x).square().sum(), x)
    return gradient


def evaluated(model):
    with torch.no_grad():
        return model.eval()(drawn(3, INPUTS, seed=2))


def test_the_group_reaches_the_loader_under_its_own_names():
    """They are 8 bits, the paper's threshold, and the head among the skipped modules."""
    config, usual = quantization_config(INT8, ["model.layers.0.mlp"]), quantization_config(INT8)
    assert config is not None
    assert usual is not None
    assert (config.load_in_8bit, config.load_in_4bit) == (True, False)
    assert config.llm_int8_threshold == 6.0
    assert config.llm_int8_skip_modules == ["model.layers.0.mlp", "lm_head"]
    assert usual.llm_int8_skip_modules is None


def test_codes_are_the_nearest_of_a_row_s_even_steps(model):
    """127 is a row's largest magnitude; weights are float16, computed here in float64."""
    weight = drawn(OUTPUTS, INPUTS).half().double()
    largest = weight.abs().amax(1)
    steps = weight * 127 / largest[:, None]
    found = model[0].weight
    assert torch.equal(found.SCB.double(), largest)
    assert found.data.dtype == torch.int8
    assert (found.data.double() - steps).abs().max() <= 0.501  # ties may round either way
    assert (dequantized(found).double() - weight).abs().max() <= 0.501 * largest.max() / 127


def test_a_weight_and_its_share_of_the_scale_are_counted(model):
    """By hand: with 96 weights a row, 8 + 32/96 bits, as in the plan."""
    weight = model[0].weight
    stored = weight.data.numel() + 4 * weight.SCB.numel()
    bits = 8 * stored / (OUTPUTS * INPUTS)
    assert bits == pytest.approx(8 + 32 / INPUTS)
    assert bits_per_weight(INT8, 1 / INPUTS) == pytest.approx(bits)


@pytest.mark.parametrize("training", [True, False])
def test_it_multiplies_with_dequantized_weights_in_both_modes(model, training):
    """Output and input gradient agree with torch's products in float32 to 1e-6."""
    weight, x = dequantized(model[0].weight), drawn(3, INPUTS, seed=2).requires_grad_()
    output = model.train(training)(x)
    upstream = drawn(3, OUTPUTS, seed=3)
    (gradient,) = torch.autograd.grad(output, x, upstream)
    assert relative(output.detach(), x.detach() @ weight.T + drawn(OUTPUTS, seed=1)) <= 1e-6
    assert relative(gradient, upstream @ weight) <= 1e-6


def test_without_the_guard_the_two_modes_are_apart():
    """Control: without the guard they differ by 0.3 % to 3 % on the CPU."""
    model = unguarded()
    with torch.no_grad():
        learning = model.train()(drawn(3, INPUTS, seed=2))
    assert 0.003 < relative(evaluated(model), learning) < 0.03


def test_gradients_are_the_same_after_a_validation_pass(model):
    """After train, validate, train they are bitwise equal."""
    before = gradient_of(model)
    evaluated(model)
    assert torch.equal(gradient_of(model), before)
    assert model.eval()[0].training is False


def test_inside_the_block_it_is_what_others_load(model):
    """Inside the context the library's own layer runs silently; then ours, even after an error."""
    ours = evaluated(model)
    theirs = evaluated(unguarded())
    with as_published(model):
        assert torch.equal(evaluated(model), theirs)
    with pytest.raises(RuntimeError, match="planned"), as_published(model):
        raise RuntimeError("planned")
    assert torch.equal(evaluated(model), ours)
    assert not torch.equal(ours, theirs)


def test_the_library_s_notice_at_every_call_is_silenced(model, caplog):
    """The notice says that inputs are rounded to float16, which LLM.int8 intends."""
    with caplog.at_level(logging.WARNING), as_published(model):
        evaluated(model)
    assert not [record for record in caplog.records if "MatMul8bitLt" in record.message]


def test_codes_and_scales_move_together(model):
    """Torch moves only the parameter, so the layer would use outdated scales."""
    before, layer = evaluated(model), model[0]
    weight = layer.weight
    old = (weight.data.data_ptr(), weight.SCB.data_ptr())
    model._apply(lambda tensor: tensor.clone())  # .to(device) does this with each tensor
    state = layer.state
    assert state.CB.data_ptr() == layer.weight.data.data_ptr() != old[0]
    assert state.SCB.data_ptr() != old[1]
    assert torch.equal(evaluated(model), before)


def test_it_is_found_and_described(model):
    """An unquantized layer is not counted; on the CPU it differs from plain evaluation."""
    both = torch.nn.ModuleDict({"eight": model, "plain": torch.nn.Linear(4, 4)})
    assert list(quantized_linears(both)) == ["eight.0"]
    assert quantization_facts(both) == {
        "quantized_linears": 1,
        "quant": "int8",
        "double_quant": False,
        "int8_inputs": "as computed",
    }
    assert differs_in_evaluation(both)
    assert not differs_in_evaluation(torch.nn.ModuleDict({"plain": torch.nn.Linear(4, 4)}))
