"""GaLore and APOLLO, compared with papers and packages; their state can be saved."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch

from mens_exp.config.overrides import check
from mens_exp.layout.modules import linear_weights
from mens_exp.layout.shape import shape_of
from mens_exp.training.optimizer import build_optimizer

FULL = ("backend=full", "quant=none")
GALORE = (*FULL, "optim=galore", "optim.rank=4", "optim.lr=1e-2", "optim.weight_decay=0.1")
APOLLO = (*FULL, "optim=apollo", "optim.lr=1e-2", "optim.weight_decay=0.1")
OPTIONS = ("galore", "apollo")


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPES = {"tall.weight": (24, 12), "wide.weight": (12, 24), "small.weight": (4, 24), "norm": (24,)}
LINEAR = [name for name in SHAPES if name != "norm"]


def start():
    return {n: torch.nn.Parameter(drawn(*s, seed=k)) for k, (n, s) in enumerate(SHAPES.items())}


def steps(optimizer, parameters, numbers):
    for number in numbers:
        for index, parameter in enumerate(parameters.values()):
            parameter.grad = drawn(*parameter.shape, seed=100 * number + index)
        optimizer.step()


def ours(config, parameters, seed=7):
    return build_optimizer(config.optim, parameters, linear=LINEAR, seed=seed)


def same(one, other):
    return [name for name in one if torch.equal(one[name], other[name])]


@pytest.mark.parametrize("side", ["std", "reverse_std"])
def test_galore_s_steps_are_those_of_the_package(tiny_config, side):
    """Four steps are bitwise equal; small weights use AdamW. Gap 9 leaves the first projection."""
    from pytorch_optimizer import GaLore

    config = tiny_config(*GALORE, f"optim.proj_type={side}", "optim.update_proj_gap=9")
    found, expected = start(), start()
    steps(ours(config, found), found, range(4))
    projected = {"rank": 4, "update_proj_gap": 9, "scale": 0.25, "projection_type": side}
    large = [expected["tall.weight"], expected["wide.weight"]]
    others = [expected["small.weight"], expected["norm"]]
    groups = [{"params": large, **projected}, {"params": others}]
    steps(GaLore(groups, lr=1e-2, weight_decay=0.1, eps=1e-6), expected, range(4))
    assert same(found, expected) == [*SHAPES]


@pytest.mark.parametrize("stop", [None, 4, 5, 6])
def test_galore_decomposes_at_multiples_of_the_gap(tiny_config, stop, monkeypatch):
    """Steps are numbered from 0, as in algorithm 2 of the paper; a loaded state goes on so."""
    config = tiny_config(*GALORE, "optim.update_proj_gap=5")
    parameters, counted, now = start(), [], [0]
    svd = torch.linalg.svd
    monkeypatch.setattr(
        torch.linalg, "svd", lambda *a, **k: (counted.append(now[0]), svd(*a, **k))[1]
    )
    optimizer = ours(config, parameters)
    for step in range(16):
        if step == stop:
            state = optimizer.state_dict()
            optimizer = ours(config, parameters)
            optimizer.load_state_dict(state)
        now[0] = step
        steps(optimizer, parameters, [step])
    assert sorted(counted) == [step for step in (0, 5, 10, 15) for _ in ("tall", "wide")]


@pytest.mark.usefixtures("apollo")
@pytest.mark.parametrize(("scale_type", "proj"), [("tensor", "random"), ("channel", "svd")])
def test_apollo_s_steps_are_those_of_the_package(tiny_config, scale_type, proj):
    """Four steps, with a new projection in the third, use the seeds that the run drew."""
    from apollo_torch import APOLLOAdamW

    chosen = ("optim.rank=4", f"optim.scale_type={scale_type}", f"optim.proj={proj}")
    config = tiny_config(*APOLLO, *chosen, "optim.update_proj_gap=3")
    found, expected = start(), start()
    optimizer = ours(config, found)
    projected = {"rank": 4, "update_proj_gap": 3, "scale": 128.0, "proj_type": "std"}
    large = [expected["tall.weight"], expected["wide.weight"]]
    others = [expected["small.weight"], expected["norm"]]
    groups = [
        {"params": large, **projected, "proj": proj, "scale_type": scale_type},
        {"params": others},
    ]
    reference = APOLLOAdamW(groups, lr=1e-2, weight_decay=0.1)
    for name, parameter in expected.items():
        reference.state[parameter]["seed"] = optimizer.state[found[name]]["seed"]
    steps(optimizer, found, range(4))
    steps(reference, expected, range(4))
    assert same(found, expected) == [*SHAPES]


def test_galore_follows_the_paper(tiny_config):
    """One step by hand in float64: algorithm 2 of arXiv:2403.03507 with decoupled decay.

    With bias correction, the first update of Adam is the sign of its gradient, but for epsilon,
    which the package adds before the correction.
    """
    config = tiny_config(*GALORE)
    parameters = start()
    optimizer = ours(config, parameters)
    before = {name: one.detach().double().clone() for name, one in parameters.items()}
    steps(optimizer, parameters, [0])
    eps = 1e-6 / math.sqrt(1 - 0.999)
    for name in ("tall.weight", "wide.weight"):
        gradient = parameters[name].grad.double()
        u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
        tall = name == "tall.weight"
        low = gradient @ vh[:4].T if tall else u[:, :4].T @ gradient
        update = low / (low.abs() + eps)
        back = update @ vh[:4] if tall else u[:, :4] @ update
        expected = (before[name] - 1e-2 * 0.25 * back) * (1 - 1e-2 * 0.1)
        moved = (expected - before[name]).norm()
        assert (parameters[name].detach() - expected).norm() < 1e-4 * moved


@pytest.mark.usefixtures("apollo")
def test_apollo_follows_the_paper(tiny_config):
    """One step by hand: algorithm 1 of arXiv:2412.05270, with the projection that was drawn.

    The whole gradient moves the weight, so its update has full rank.
    """
    config = tiny_config(*APOLLO, "optim.rank=4", "optim.scale_type=channel", "optim.scale=4")
    parameters = start()
    optimizer = ours(config, parameters)
    before = {name: one.detach().double().numpy() for name, one in start().items()}
    steps(optimizer, parameters, [0])
    eps = 1e-6 / math.sqrt(1 - 0.999)
    for name, axis in (("tall.weight", 1), ("wide.weight", 0)):
        gradient = parameters[name].grad.double().numpy()
        state = optimizer.state[parameters[name]]
        matrix = state["projector"].ortho_matrix.double().numpy()
        low = gradient @ matrix.T if axis else matrix.T @ gradient
        update = low / (np.abs(low) + eps)
        factor = np.linalg.norm(update, axis=axis) / np.linalg.norm(low, axis=axis)
        scaled = gradient * (factor[:, None] if axis else factor) * math.sqrt(4)
        expected = (before[name] - 1e-2 * scaled) * (1 - 1e-2 * 0.1)
        moved = np.linalg.norm(expected - before[name])
        found = parameters[name].detach().numpy()
        assert np.linalg.norm(found - expected) < 1e-4 * moved
        assert np.linalg.matrix_rank(found - before[name] * (1 - 1e-2 * 0.1)) == 12


@pytest.mark.parametrize("option", OPTIONS)
def test_state_survives_a_file_that_executes_nothing(tiny_config, request, option):
    """Three steps, a file read with weights_only, and three more steps equal six steps."""
    if option == "apollo":
        request.getfixturevalue("apollo")
    settings = (*FULL, f"optim={option}", "optim.rank=4", "optim.update_proj_gap=5")
    config = tiny_config(*settings, "optim.lr=1e-2")
    through, stopped = start(), start()
    steps(ours(config, through), through, range(6))
    before = ours(config, stopped)
    steps(before, stopped, range(3))
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = ours(config, stopped, seed=99)
    after.load_state_dict(torch.load(file, weights_only=True))
    steps(after, stopped, range(3, 6))
    assert same(stopped, through) == [*SHAPES]
    steps(before, stopped, [6])  # saving does not change the optimizer's state


@pytest.mark.usefixtures("apollo")
def test_projections_are_drawn_from_the_run_s_seed(tiny_config):
    """Projections depend on the run's seed only, not on the global generator."""
    config = tiny_config(*APOLLO)
    ends = []
    for seed, noise in ((7, 0), (7, 1), (8, 0)):
        torch.manual_seed(noise)
        parameters = start()
        stream = torch.get_rng_state()
        steps(ours(config, parameters, seed), parameters, range(2))
        assert torch.equal(torch.get_rng_state(), stream)
        ends.append(parameters)
    assert same(ends[0], ends[1]) == [*SHAPES]
    assert same(ends[0], ends[2]) == ["norm"]


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gpt2", "tiny_qwen2"])
def test_the_decoder_s_linear_weights_are_projected(tiny_config, tiny_backend, model):
    """Embedding, head, norms and biases are not projected."""
    overrides = (*FULL, f"model={model}", "optim=galore", "optim.rank=8")
    config, parameters = tiny_config(*overrides), tiny_backend(*overrides).trainable()
    linear = linear_weights(shape_of(config.model))
    optimizer = build_optimizer(config.optim, parameters, linear=linear)
    projected, others = (group["params"] for group in optimizer.param_groups)
    names = {id(parameter): name for name, parameter in parameters.items()}
    assert {names[id(one)] for one in projected} == set(linear)
    assert len(projected) + len(others) == len(parameters)
    said = [names[id(one)] for one in others]
    assert all("emb" in n or "wte" in n or "wpe" in n or parameters[n].ndim == 1 for n in said)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", ["qlora", "lora", "proxy", "burn"])
def test_a_backend_with_an_adapter_is_refused(option, backend):
    """The error names the optimizer and says that adapter matrices already have a low rank."""
    more = ["quant=none"] if backend == "lora" else []
    more += ["model=tiny_llama"] if backend == "burn" else []
    (problem,) = check([f"optim={option}", f"backend={backend}", *more]).problems
    assert problem.where == "optim"
    assert "already have one" in str(problem)
    assert "optim=adamw" in (problem.remedy or "")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.rank=0", "a value >= 1"),
        ("optim.update_proj_gap=0", "a value >= 1"),
        ("optim.scale=0", "a value > 0"),
        ("optim.betas=[0.9]", "two decay rates"),
        ("optim.eps=0", "a value > 0"),
        ("optim.weight_decay=-1", "a value >= 0"),
    ],
)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_value_out_of_range_is_refused(option, override, words):
    """The error comes before any work and names the setting."""
    (problem,) = check([f"optim={option}", "backend=full", override]).problems
    assert problem.where == override.partition("=")[0]
    assert words in str(problem)


def test_the_apollo_of_pytorch_optimizer_is_another_method():
    """Its update has only the rank of the projection, so it cannot replace the paper's."""
    from pytorch_optimizer import APOLLO

    parameter, before = (torch.nn.Parameter(drawn(24, 12, seed=0)) for _ in range(2))
    group = {"rank": 4, "update_proj_gap": 200, "scale": 1.0, "projection_type": "std"}
    parameter.grad = drawn(24, 12, seed=1)
    APOLLO([{"params": [parameter], **group}], scale_type="channel").step()
    assert torch.linalg.matrix_rank(before - parameter) == 4
