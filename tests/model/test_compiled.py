"""Compiled decoder layers, compared with layers that run eagerly and with an f32 pass."""

from __future__ import annotations

from functools import partial

import live_adapters
import pytest
import torch
from torch._dynamo.utils import counters

from mens_exp.data.batch import packed_batch
from mens_exp.errors import SetupError
from mens_exp.layout.families import FAMILIES
from mens_exp.lora.keyed import LOWBIAS32
from mens_exp.model import compiled

LENGTHS = (11, 6, 40, 1, 19, 33)
PACKINGS = ([0], [2, 4], [4, 2], [0, 1, 2, 3, 4, 5], [5, 5, 5], [1, 5], [3, 1, 5])


@pytest.fixture
def batches(random_documents):
    """Return packed micro-batches of different lengths and documents; the first has five."""
    documents = random_documents(LENGTHS, [length - 1 for length in LENGTHS])
    chosen = [[0, 1, 2, 3, 4], *PACKINGS]
    return [packed_batch(documents, [one], index=n) for n, one in enumerate(chosen)]


def error(found, truth):
    """Return the relative error of all gradients together."""
    pairs = [(found[name].double(), truth[name].double()) for name in truth]
    off = sum((one - other).square().sum() for one, other in pairs)
    return float((off / sum(other.square().sum() for _, other in pairs)).sqrt())


@pytest.fixture
def strict(monkeypatch):
    """Raise an error where a warm layer would run code that is not compiled."""
    real = torch.compiler.set_stance
    stances = {"eager_on_recompile": "fail_on_recompile"}
    monkeypatch.setattr(torch.compiler, "set_stance", lambda name: real(stances.get(name, name)))


families = [
    pytest.param(name, marks=[] if name == "gemma2" else pytest.mark.soak) for name in FAMILIES
]


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("name", families)
def test_every_family_has_the_gradients_of_eager_layers(name, family_backend, batches):
    """In f32, to 1e-5, in packings of one to six documents, none of which needs a new graph."""
    backend = family_backend(name)
    eager = [live_adapters.training_pass(backend, batch) for batch in batches]
    assert backend.compile_layers(batches[0]) > 0
    graphs = counters["stats"]["unique_graphs"]
    for batch, (loss, gradients) in zip(batches, eager, strict=True):
        found = live_adapters.training_pass(backend, batch)
        assert found[0] == pytest.approx(loss, rel=1e-5)
        assert error(found[1], gradients) < 1e-5
    assert counters["stats"]["unique_graphs"] == graphs


ARMS = {
    "nf4": [],
}
SOAKED = {
    "checkpointing, dora": ["model.gradient_checkpointing='on'", "lora.variant=dora"],
    "full": ["backend=full", "quant=none", "optim.lr=1e-4"],
    "lora": ["backend=lora", "quant=none"],
    "int8": ["quant=int8"],
    "nothing dropped": ["lora.dropout=0"],
    "some layers": ["lora=qv"],
    "ia3": ["lora=ia3"],
    "vera": ["lora=vera"],
    "loha": ["lora=loha"],
    "norms": ["lora=ln_tuning"],
    "prompt": ["lora=prompt_tuning"],
    "checkpointing": ["model.gradient_checkpointing='on'"],
    "dora": ["lora.variant=dora"],
}
arms = [
    *(pytest.param(overrides, id=name) for name, overrides in ARMS.items()),
    *(pytest.param(one, id=name, marks=pytest.mark.soak) for name, one in SOAKED.items()),
]


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("overrides", arms)
def test_bf16_layers_are_as_near_to_an_f32_pass_as_eager_ones(overrides, tiny_backend, batches):
    """With the same dropout masks, errors of loss and gradients are those of rounding."""
    found = {}
    for kind in ("f32", "eager", "compiled"):
        dtype = "f32" if kind == "f32" else "bf16"
        backend = tiny_backend(*overrides, f"quant.compute_dtype={dtype}").train()
        live_adapters.fill_b(backend)
        backend.draw_with(LOWBIAS32)
        if kind == "compiled":
            backend.compile_layers(batches[0])
        found[kind] = [live_adapters.training_pass(backend, batch) for batch in batches[1:5]]
    for truth, eager, ours in zip(*found.values(), strict=True):
        errors = [error(one[1], truth[1]) for one in (eager, ours)]
        assert 0 < errors[1] < 1.25 * errors[0]
        assert max(abs(one[0] / truth[0] - 1) for one in (eager, ours)) < 2e-3


def test_compiling_changes_nothing_but_training_passes(tiny_backend, batches):
    """Evaluation is bitwise the same; no gradient is left, and no global number is drawn."""
    backend = tiny_backend("model.num_hidden_layers=1", live=True).eval()
    with torch.no_grad():
        before = backend(batches[2])
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    backend.train()
    backend.compile_layers(batches[0])
    assert torch.equal(torch.rand(3), expected)
    assert all(one.grad is None for one in backend.trainable().values())
    numerics = backend.facts()["numerics"]
    assert (numerics["layers"], numerics["dropout"]) == (compiled.NUMERICS, LOWBIAS32)
    backend.eval()
    with torch.no_grad():
        assert torch.equal(backend(batches[2]), before)


def test_a_model_that_cannot_be_compiled_is_as_it_was(tiny_backend, batches, monkeypatch):
    """The error names the reason; layers, masks and facts are those of an eager model."""
    backend = tiny_backend(live=True)
    facts, expected = backend.facts(), live_adapters.training_pass(backend, batches[1])

    def fails(*_, **__):
        raise RuntimeError("no such instruction\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda *_, **__: partial(fails))
        with pytest.raises(SetupError, match=r"cannot compile the decoder layers.*no such instr"):
            backend.compile_layers(batches[0])
    assert backend.facts() == facts
    again = live_adapters.training_pass(backend, batches[1])
    assert again[0] == expected[0]
    assert error(again[1], expected[1]) == 0


def test_layers_without_gradients_are_not_compiled(tiny_backend, batches):
    """If the head alone is trained, no training pass would use the graphs."""
    backend = tiny_backend("lora=lm_head", "model.num_hidden_layers=1").train()
    with pytest.raises(SetupError, match="no gradient passes through them"):
        backend.compile_layers(batches[0])
