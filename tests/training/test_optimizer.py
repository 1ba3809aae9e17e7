from __future__ import annotations

import inspect

import bitsandbytes
import numpy as np
import pytest
import torch

from mens_exp.config.overrides import check
from mens_exp.errors import SetupError
from mens_exp.training.optimizer import build_optimizer, build_scheduler, in_its_order

FREE = ("optim=schedule_free", "schedule=constant")
LARGE = (128, 64)  # bitsandbytes keeps 8-bit moments from 4,096 elements on


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
    """Return the result of algorithm 2 of arXiv:2302.06675 in float64."""
    theta, average = start().detach().double().numpy(), np.zeros(LARGE)
    for gradient in gradients(steps):
        g = gradient.double().numpy()
        update = np.sign(betas[0] * average + (1 - betas[0]) * g)
        theta = theta - lr * (update + decay * theta)
        average = betas[1] * average + (1 - betas[1]) * g
    return theta


def test_adamw_is_torch_s_own(tiny_config):
    """Every setting of the group is passed on, except the option's name."""
    config = tiny_config("optim.lr=3e-3", "optim.betas=[0.8,0.9]", "optim.weight_decay=0.1")
    _, optimizer = trained(config, 1)
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert (group["lr"], tuple(group["betas"]), group["eps"]) == (3e-3, (0.8, 0.9), 1e-8)
    assert group["weight_decay"] == 0.1


def test_litgpt_s_rate_is_the_one_that_an_optimizer_has_unnamed(tiny_config):
    """LitGPT passes only parameters: to torch's AdamW, or PagedAdamW for a 4-bit base."""
    rate = tiny_config("preset=litgpt_like").optim.lr
    assert torch.optim.AdamW([start()]).defaults["lr"] == rate
    assert inspect.signature(bitsandbytes.optim.PagedAdamW).parameters["lr"].default == rate


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_follows_the_paper(tiny_config, decay):
    """Five steps agree with the published algorithm up to float32 rounding."""
    config = tiny_config("optim=lion", "optim.lr=1e-2", f"optim.weight_decay={decay}")
    parameter, optimizer = trained(config, 5)
    expected = lion_by_hand(5, lr=1e-2, betas=(0.9, 0.99), decay=decay)
    assert np.abs(parameter.detach().numpy() - expected).max() < 1e-5
    assert optimizer.state[parameter]["state1"].dtype == torch.float32


def test_lion_has_no_denominator_to_add_to():
    """Lion has no eps; the error names the optimizers that have one."""
    (problem,) = check(["optim=lion", "optim.eps=1e-6"]).problems
    assert "is not a key of the chosen optim" in str(problem)
    assert "optim=adamw" in (problem.expected or "")


def test_adamw_in_8_bits_goes_where_adamw_goes_on_cpu(
    tiny_config,
):
    """After ten steps with 8-bit moments the mean deviation is below a fifth of a step."""
    exact, _ = trained(tiny_config("optim.lr=1e-2"), 10)
    coarse, optimizer = trained(tiny_config("optim=adamw_8bit", "optim.lr=1e-2"), 10)
    state = optimizer.state[coarse]
    assert (state["state1"].dtype, state["state2"].dtype) == (torch.uint8, torch.uint8)
    assert float((coarse - start()).detach().abs().mean()) > 1e-2
    assert float((coarse - exact).detach().abs().mean()) < 2e-3


def test_small_matrices_keep_f32_moments(tiny_config):
    """Under 4,096 elements moments are float32, and the steps equal AdamW's."""
    small = (16, 64)
    exact, _ = trained(tiny_config("optim.lr=1e-2"), 5, small)
    found, optimizer = trained(tiny_config("optim=adamw_8bit", "optim.lr=1e-2"), 5, small)
    assert optimizer.state[found]["state1"].dtype == torch.float32
    assert torch.allclose(found, exact, atol=1e-6)


def test_a_paged_optimizer_is_refused_on_cpu(tiny_config):
    """An unpaged optimizer would be another one."""
    with pytest.raises(SetupError, match="paged memory needs CUDA") as caught:
        build_optimizer(tiny_config("optim=paged_adamw_8bit").optim, {"l0.q.lora_a": start()})
    assert "optim=adamw_8bit" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    "option",
    ["adamw", "adamw_8bit", "lion", "muon", "schedule_free", "prodigy", "adafactor", "sgd"],
)
def test_state_survives_saving_and_loading(tiny_config, option):
    """Three steps, saving, loading and two more steps equal five steps."""
    config = tiny_config(f"optim={option}")
    through, _ = trained(config, 5)
    stopped, before = trained(config, 3)
    after = build_optimizer(config.optim, {"l0.q.lora_a": stopped})
    after.load_state_dict(before.state_dict())
    for gradient in gradients(5)[3:]:
        stopped.grad = gradient
        after.step()
    assert torch.equal(stopped, through)


# torch's own optimizers, and those of schedulefree.


@pytest.mark.parametrize(
    ("option", "overrides", "theirs", "arguments"),
    [
        ("sgd", ("optim.nesterov=true",), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("sgd", ("optim.momentum=0",), torch.optim.SGD, {}),
        ("adafactor", ("optim.d=2",), torch.optim.Adafactor, {"d": 2.0, "beta2_decay": -0.8}),
    ],
)
def test_an_optimizer_of_torch_takes_torch_s_steps(
    tiny_config, option, overrides, theirs, arguments
):
    """Five steps are bitwise equal, and no other setting is passed."""
    config = tiny_config(f"optim={option}", "optim.lr=1e-2", "optim.weight_decay=0.1", *overrides)
    found, _ = trained(config, 5)
    expected = start()
    reference = theirs([expected], lr=1e-2, weight_decay=0.1, **arguments)
    for gradient in gradients(5):
        expected.grad = gradient
        reference.step()
    assert torch.equal(found, expected)


def orthogonal(values, steps=5):
    """Return the iteration of https://kellerjordan.github.io/posts/muon in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = values.T if values.shape[0] > values.shape[1] else values
    x = x / np.linalg.norm(x)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if values.shape[0] > values.shape[1] else x


def test_muon_follows_its_definition(tiny_config):
    """One step by hand: Nesterov momentum, orthogonalized and scaled to AdamW's update.

    torch iterates in bf16, which leaves a hundredth.
    """
    config = tiny_config("optim=muon", "optim.lr=1e-2", "optim.weight_decay=0.1")
    found, _ = trained(config, 1)
    (gradient,) = (one.double().numpy() for one in gradients(1))
    ahead = (1 + 0.95) * 0.05 * gradient
    size = 0.2 * np.sqrt(max(LARGE))
    before = start().detach().double().numpy()
    expected = before * (1 - 1e-2 * 0.1) - 1e-2 * size * orthogonal(ahead)
    moved = np.linalg.norm(expected - before)
    assert np.linalg.norm(found.detach().numpy() - expected) / moved < 0.02


def test_muon_leaves_vectors_to_adamw(tiny_config):
    """Matrices step as in torch's Muon, vectors as in torch's AdamW, bit for bit."""
    config = tiny_config("optim=muon", "optim.lr=1e-2", "optim.weight_decay=0.1")
    shapes = {"l0.q.lora_a": (8, 64), "l0.q.lora_magnitude": (64,)}
    ours = {name: start(shape) for name, shape in shapes.items()}
    theirs = {name: start(shape) for name, shape in shapes.items()}
    matrix, vector = theirs.values()
    optimizer = build_optimizer(config.optim, ours)
    references = (
        torch.optim.Muon(
            [matrix], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([vector], lr=1e-2, weight_decay=0.1),
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(ours.values(), theirs.values(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for one in (optimizer, *references):
            one.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in shapes)


def test_muon_s_two_parts_follow_one_schedule_after_loading(tiny_config):
    """A rate set on a group applies to its own part, also after loading."""
    config = tiny_config("optim=muon", "optim.lr=1e-2")
    named = {"l0.q.lora_a": start((8, 64)), "l0.q.lora_magnitude": start((64,))}
    optimizer = build_optimizer(config.optim, named)
    for one in named.values():
        one.grad = torch.ones_like(one)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [one.detach().clone() for one in named.values()]
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, named.values(), strict=True))


def test_schedule_free_steps_are_those_of_the_package(tiny_config):
    """Over ten steps the model holds the package's average, the state its training point."""
    from schedulefree import AdamWScheduleFree

    config = tiny_config("optim=schedule_free", "schedule=constant", "optim.lr=1e-2")
    found, optimizer = trained(config, 10)
    expected = start()
    reference = AdamWScheduleFree([expected], lr=1e-2)
    reference.train()
    for gradient in gradients(10):
        expected.grad = gradient.clone()  # the package divides in place
        reference.step()
    optimizer.to_gradient_point()
    assert torch.equal(found, expected)
    reference.eval()
    optimizer.to_average()
    assert torch.equal(found, expected)


def test_a_look_at_the_average_changes_no_bit_of_what_follows(tiny_config):
    """The package's switch rounds; ours restores the exact training point."""
    config = tiny_config("optim=schedule_free", "schedule=constant", "optim.lr=1e-2")
    found, optimizer = trained(config, 3)
    optimizer.to_gradient_point()
    point = found.detach().clone()
    for _ in range(50):
        optimizer.to_average()
        average = found.detach().clone()
        optimizer.to_gradient_point()
    assert torch.equal(found, point)
    assert not torch.equal(average, point)


def test_a_warm_up_of_ours_is_the_package_s_own(tiny_config):
    """Four warm-up steps, with less weight in the average, and six at the peak agree."""
    from schedulefree import AdamWScheduleFree

    config = tiny_config(*FREE, "optim.lr=1e-2", "schedule.warmup_steps=4")
    found, expected = start(), start()
    optimizer = build_optimizer(config.optim, {"l0.q.lora_a": found})
    scheduler = build_scheduler(config.schedule, optimizer, total_steps=10)
    reference = AdamWScheduleFree([expected], lr=1e-2, warmup_steps=4)
    reference.train()
    for gradient in gradients(10):
        found.grad, expected.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        scheduler.step()
        reference.step()
    reference.eval()
    assert (found - expected).abs().max() < 1e-8


def prodigy_by_hand(steps, *, decay):
    """Run algorithm 4 of arXiv:2306.06101 towards zero in float64; return estimates and point."""
    beta1, beta2, d, d0, r = 0.9, 0.999, 1e-4, 1e-4, 0.0
    beta3 = np.sqrt(beta2)
    x = start().detach().double().numpy()
    x0, m, v, s, estimates = x.copy(), 0 * x, 0 * x, 0 * x, []
    for _ in range(steps):
        g = x  # of |x|^2 / 2
        m = beta1 * m + (1 - beta1) * d * g
        v = beta2 * v + (1 - beta2) * d**2 * g**2
        r = beta3 * r + d**2 / d0 * np.vdot(g, x0 - x)
        s = beta3 * s + d**2 / d0 * g
        after = max(d, r / np.abs(s).sum())
        x = x * (1 - d * decay) - d * m / (np.sqrt(v) + after * 1e-8)
        d = after
        estimates.append(d)
    return estimates, x


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_prodigy_follows_the_paper(tiny_config, decay):
    """The estimate grows, and the steps agree with the paper up to float32 rounding."""
    config = tiny_config("optim=prodigy", "optim.d0=1e-4", f"optim.weight_decay={decay}")
    parameter = start()
    optimizer = build_optimizer(config.optim, {"l0.q.lora_a": parameter})
    found = []
    for _ in range(12):
        parameter.grad = parameter.detach().clone()
        optimizer.step()
        found.append(optimizer.param_groups[0]["d"])
    estimates, expected = prodigy_by_hand(12, decay=decay)
    assert estimates[-1] > 10 * estimates[0]
    assert found == pytest.approx(estimates, rel=1e-3)
    moved = np.abs(expected - start().detach().numpy()).mean()
    assert moved > 0.1
    assert np.abs(parameter.detach().numpy() - expected).mean() < 1e-4 * moved


@pytest.mark.parametrize(
    ("overrides", "where", "words"),
    [
        (["optim=prodigy", "schedule=lr_range"], "schedule", "estimates its rate"),
        (["schedule=lr_range", "backend=full"], "schedule", "the base is trained"),
        (["schedule=lr_range", "schedule.lowest=100"], "schedule.lowest", "must rise"),
        (
            ["schedule=lr_range", "schedule.warmup_steps=2"],
            "schedule.warmup_steps",
            "with schedule=lr_range",
        ),
        (["optim=prodigy", "optim.betas=[0.9]"], "optim.betas", "two decay rates"),
        (["optim=prodigy", "optim.slice_p=0"], "optim.slice_p", "a value >= 1"),
        (["optim=muon", "backend=full"], "optim", "matrices of adapters"),
        (["optim=schedule_free", "schedule=cosine"], "schedule", "averages its steps"),
        (
            ["optim=schedule_free", "schedule=constant", "optim.betas=[0,0.9]"],
            "optim.betas",
            "last",
        ),
        (["optim=muon", "optim.betas=[0.9]"], "optim.betas", "two decay rates"),
        (["optim=sgd", "optim.momentum=0", "optim.nesterov=true"], "optim.nesterov", "momentum=0"),
        (["optim=muon", "optim.ns_steps=0"], "optim.ns_steps", "a value >= 1"),
    ],
)
def test_a_setting_that_an_optimizer_cannot_have_is_refused(overrides, where, words):
    """The error comes before any work and names the setting."""
    (problem,) = check(overrides).problems
    assert problem.where == where
    assert words in str(problem)


# LoRA+.


def of_peft(model, config, ratio):
    """Return PEFT's LoRA+ optimizer over a PEFT model."""
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
    """Return rate and weight decay by parameter identity."""
    groups = optimizer.param_groups
    return {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_lora_plus_has_the_groups_of_peft(tiny_backend, tiny_config, variant):
    """Rate and decay of every parameter agree, DoRA's magnitudes included."""
    settings = ("optim.loraplus_lr_ratio=16", "optim.weight_decay=0.1", f"lora.variant={variant}")
    config = tiny_config(*settings)
    backend = tiny_backend(*settings)
    ours = rates(build_optimizer(config.optim, backend.trainable()))
    assert ours == rates(of_peft(backend.model, config, 16))
    assert {rate for rate, _ in ours.values()} == {2e-3, 16 * 2e-3}


def test_lora_plus_takes_the_steps_of_peft(tiny_backend, tiny_config):
    """Three steps with the same gradients are bitwise equal."""
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
        (["backend=full", "optim.loraplus_lr_ratio=16"], "do not train matrices A and B alone"),
        (["lora=ia3", "optim.loraplus_lr_ratio=16"], "do not train matrices A and B alone"),
        (
            ["backend=burn", "model=tiny_llama", "optim.loraplus_lr_ratio=16"],
            "do not train matrices A and B alone",
        ),
        (["optim.loraplus_lr_ratio=0.5"], "a value >= 1"),
    ],
)
def test_lora_plus_is_refused_where_it_means_nothing(overrides, words):
    """Without A and B it has no effect; a ratio below 1 would slow B down."""
    (problem,) = check(overrides).problems
    assert problem.where == "optim.loraplus_lr_ratio"
    assert words in str(problem)


def test_the_state_of_two_groups_is_named_in_their_order(tiny_config):
    """All A come first in the state, whatever the order of the layers."""
    config = tiny_config("optim.loraplus_lr_ratio=4")
    names = [f"{layer}.lora_{half}" for layer in ("l0.q", "l1.q") for half in "ab"]
    parameters = {name: start((2, 2)) for name in names}
    optimizer = build_optimizer(config.optim, parameters)
    found = in_its_order(optimizer, parameters)
    assert list(found) == ["l0.q.lora_a", "l1.q.lora_a", "l0.q.lora_b", "l1.q.lora_b"]
    assert all(found[name] is parameters[name] for name in names)
