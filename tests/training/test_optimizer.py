from __future__ import annotations

import inspect

import bitsandbytes
import numpy as np
import pytest
import torch

from mens_exp.config.overrides import check
from mens_exp.errors import SetupError
from mens_exp.training.optimizer import build_optimizer

LARGE = (128, 64)  # from 4,096 elements on, bitsandbytes keeps moments in 8 bits


def start(shape=LARGE):
    generator = torch.Generator().manual_seed(0)
    return torch.nn.Parameter(torch.randn(shape, generator=generator))


def gradients(count, shape=LARGE):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def trained(config, steps, shape=LARGE):
    parameter = start(shape)
    optimizer = build_optimizer(config.optim, {"l0.q.lora_a": parameter})
    for gradient in gradients(steps, shape):
        parameter.grad = gradient
        optimizer.step()
    return parameter, optimizer


def lion_by_hand(steps, *, lr, betas, decay):
    """Algorithm 2 of arXiv:2302.06675, in f64."""
    theta, average = start().detach().double().numpy(), np.zeros(LARGE)
    for gradient in gradients(steps):
        g = gradient.double().numpy()
        update = np.sign(betas[0] * average + (1 - betas[0]) * g)
        theta = theta - lr * (update + decay * theta)
        average = betas[1] * average + (1 - betas[1]) * g
    return theta


def test_adamw_is_torch_s_own(tiny_config):
    """Every value of the group reaches it, and the option's name does not."""
    config = tiny_config("optim.lr=3e-3", "optim.betas=[0.8,0.9]", "optim.weight_decay=0.1")
    _, optimizer = trained(config, 1)
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert (group["lr"], tuple(group["betas"]), group["eps"]) == (3e-3, (0.8, 0.9), 1e-8)
    assert group["weight_decay"] == 0.1


def test_litgpt_s_rate_is_the_one_that_an_optimizer_has_unnamed(tiny_config):
    """It hands over parameters alone: to torch's AdamW, and to the paged one under a 4-bit base."""
    rate = tiny_config("preset=litgpt_like").optim.lr
    assert torch.optim.AdamW([start()]).defaults["lr"] == rate
    assert inspect.signature(bitsandbytes.optim.PagedAdamW).parameters["lr"].default == rate


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_follows_the_paper(tiny_config, decay):
    """Five steps against the published algorithm; f32 rounding apart."""
    config = tiny_config("optim=lion", "optim.lr=1e-2", f"optim.weight_decay={decay}")
    parameter, optimizer = trained(config, 5)
    expected = lion_by_hand(5, lr=1e-2, betas=(0.9, 0.99), decay=decay)
    assert np.abs(parameter.detach().numpy() - expected).max() < 1e-5
    assert optimizer.state[parameter]["state1"].dtype == torch.float32


def test_lion_has_no_denominator_to_add_to():
    """A key without effect is an unknown one, and the options that have it are named."""
    (problem,) = check(["optim=lion", "optim.eps=1e-6"]).problems
    assert "is no key of the chosen optim" in str(problem)
    assert "optim=adamw" in (problem.expected or "")


def test_adamw_in_8_bits_goes_where_adamw_goes_on_cpu(
    tiny_config,
):
    """Its moments are bytes; ten steps end within a fifth of a step of the f32 ones, on average."""
    exact, _ = trained(tiny_config("optim.lr=1e-2"), 10)
    coarse, optimizer = trained(tiny_config("optim=adamw_8bit", "optim.lr=1e-2"), 10)
    state = optimizer.state[coarse]
    assert (state["state1"].dtype, state["state2"].dtype) == (torch.uint8, torch.uint8)
    assert float((coarse - start()).detach().abs().mean()) > 1e-2
    assert float((coarse - exact).detach().abs().mean()) < 2e-3


def test_small_matrices_keep_f32_moments(tiny_config):
    """Under 4,096 elements 8 bits save nothing; the steps are AdamW's then."""
    small = (16, 64)
    exact, _ = trained(tiny_config("optim.lr=1e-2"), 5, small)
    found, optimizer = trained(tiny_config("optim=adamw_8bit", "optim.lr=1e-2"), 5, small)
    assert optimizer.state[found]["state1"].dtype == torch.float32
    assert torch.allclose(found, exact, atol=1e-6)


def test_a_paged_optimizer_is_refused_on_cpu(tiny_config):
    """To take an unpaged one instead would be another optimizer."""
    with pytest.raises(SetupError, match="paged memory is CUDA's own") as caught:
        build_optimizer(tiny_config("optim=paged_adamw_8bit").optim, {"l0.q.lora_a": start()})
    assert "optim=adamw_8bit" in (caught.value.remedy or "")


@pytest.mark.parametrize("option", ["adamw", "adamw_8bit", "lion"])
def test_state_survives_saving_and_loading(tiny_config, option):
    """Three steps, saved, and two more are the five of an optimizer that was never saved."""
    config = tiny_config(f"optim={option}")
    through, _ = trained(config, 5)
    stopped, before = trained(config, 3)
    after = build_optimizer(config.optim, {"l0.q.lora_a": stopped})
    after.load_state_dict(before.state_dict())
    for gradient in gradients(5)[3:]:
        stopped.grad = gradient
        after.step()
    assert torch.equal(stopped, through)


# LoRA+


def of_peft(model, config, ratio):
    """Return PEFT's own optimizer of LoRA+ over a model of PEFT's."""
    from peft.optimizers import create_loraplus_optimizer

    decay = config.optim.weight_decay
    return create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=config.optim.lr,
        loraplus_lr_ratio=ratio,
        loraplus_weight_decay=decay,
        betas=tuple(config.optim.betas),
        eps=config.optim.eps,
    )


def rates(optimizer):
    """Return rate and decay of each parameter, by its identity."""
    groups = optimizer.param_groups
    return {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_lora_plus_has_the_groups_of_peft(tiny_backend, tiny_config, variant):
    """Every parameter of a real model has PEFT's rate and decay, DoRA's magnitudes too."""
    settings = ("optim.loraplus_lr_ratio=16", "optim.weight_decay=0.1", f"lora.variant={variant}")
    config = tiny_config(*settings)
    backend = tiny_backend(*settings)
    ours = rates(build_optimizer(config.optim, backend.trainable()))
    assert ours == rates(of_peft(backend.model, config, 16))
    assert {rate for rate, _ in ours.values()} == {2e-3, 16 * 2e-3}


def test_lora_plus_takes_the_steps_of_peft(tiny_backend, tiny_config):
    """Three steps with the same gradients end at the same bits."""
    settings = ("optim.loraplus_lr_ratio=4", "optim.weight_decay=0.1")
    config = tiny_config(*settings)
    ends = []
    for build in (
        lambda backend: build_optimizer(config.optim, backend.trainable()),
        lambda backend: of_peft(backend.model, config, 4),
    ):
        backend = tiny_backend(*settings)
        optimizer = build(backend)
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            for parameter in backend.trainable().values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        ends.append([p.detach().clone() for p in backend.trainable().values()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*ends, strict=True))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["backend=full", "optim.loraplus_lr_ratio=16"], "trains no matrices A and B"),
        (["optim.loraplus_lr_ratio=0.5"], "a value >= 1"),
    ],
)
def test_lora_plus_is_refused_where_it_means_nothing(overrides, words):
    """Without A and B, or with a ratio that would slow B down."""
    (problem,) = check(overrides).problems
    assert problem.where == "optim.loraplus_lr_ratio"
    assert words in str(problem)
