"""LoRA layers in training and PEFT's forward pass, each compared with the float64 formula."""

from __future__ import annotations

import hashlib
import math
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import pytest
import torch
from peft.utils.integrations import dequantize_module_weight

from mens_exp.backends.lora import ADAPTER
from mens_exp.data.batch import packed_batch
from mens_exp.layout.families import FAMILIES
from mens_exp.lora import linear
from mens_exp.model import kernels
from mens_exp.objective.causal import CrossEntropy

F32 = "quant.compute_dtype=f32"
DROP = "lora.dropout=0.3"
ARMS = {
    "nf4": [DROP],
    "nf4, nothing dropped": ["lora.dropout=0"],
    "single quantization": [DROP, "quant.double_quant=false", "quant.block_size=128"],
    "rslora": [DROP, "lora.variant=rslora", "lora.r=4"],
    "dora": [DROP, "lora.variant=dora"],
    "dora, nothing dropped": ["lora.dropout=0", "lora.variant=dora"],
    "patterns": [DROP, "lora.rank_pattern={q_proj:3}", "lora.alpha_pattern={v_proj:7}"],
    "dora, patterns": [DROP, "lora.variant=dora", "lora.rank_pattern={v_proj:2}"],
    "some of an input's": [DROP, "lora=qv"],
    "int8": [DROP, "quant=int8"],
    "codebook": [DROP, "quant=mxfp4"],
    "dora, codebook": [DROP, "quant=nf3", "lora.variant=dora"],
    "biases": [DROP, "model=tiny_qwen2"],
    "dora, biases": [DROP, "model=tiny_qwen2", "lora.variant=dora"],
    "transposed": [DROP, "model=tiny_gpt2"],
    "unquantized": [DROP, "backend=lora"],
    "unquantized, transposed": [DROP, "backend=lora", "model=tiny_gpt2"],
    "unquantized, transposed, dora": [
        *(DROP, "backend=lora", "model=tiny_gpt2", "lora.variant=dora"),
    ],
    "head": [DROP, "lora=lm_head"],
}
arms = pytest.mark.parametrize("overrides", ARMS.values(), ids=ARMS.keys())
TOKENS = 48


def inputs_of(backend):
    """Return the adapted modules of the first layer and the head, grouped by their input."""
    chosen = [one for one in backend.modules_chosen if one.layer in {None, 0}]
    return {reads: list(ones) for reads, ones in groupby(chosen, lambda one: one.reads)}


def drawn(*shape, seed):
    """Return random numbers that are exact in bf16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def kept(backend, reads, shape, micro_batch):
    """Return the mask by definition, as float64 factors of the input."""
    p = backend.lora.dropout
    if p == 0:
        return 1.0
    key = f"42/dropout/base_model.model.{reads}/{micro_batch}" + (
        "/0" if reads == "lm_head" else ""
    )
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
    count, threshold = math.prod(shape), round(p * 32768)
    words = np.random.SFC64(seed).random_raw(-(-count // 4))
    keep = (words.view(np.int16)[:count] & 32767) >= threshold
    return torch.from_numpy(keep).view(shape) * (32768 / (32768 - threshold))


def parts_of(backend, one):
    """Return float64 leaves of a layer: weight ``[O, I]``, bias, A, B, magnitude; and its scale."""
    layer = backend.layers[one.logical]
    base = layer.get_base_layer()
    weight = dequantize_module_weight(base).detach().double()
    found = backend.trainable()
    leaves = {
        which: found[f"{one.logical}.{which}"].detach().double().requires_grad_()
        for which in ("lora_a", "lora_b", "lora_magnitude")
        if f"{one.logical}.{which}" in found
    }
    r, alpha = layer.r[ADAPTER], layer.lora_alpha[ADAPTER]
    scale = alpha / (math.sqrt(r) if "rslora" in str(backend.lora.variant) else r)
    bias = 0 if base.bias is None else base.bias.detach().double()
    is_like = weight.shape == (one.out, one.width) and type(base).__name__ != "Conv1D"
    return (weight if is_like else weight.T), bias, leaves, scale


def by_formula(backend, reads, ones, x, upstream):
    """Return outputs and gradients of LoRA (arXiv:2106.09685) or DoRA (arXiv:2402.09353)."""
    x = x.double().requires_grad_()
    dropped = x * kept(backend, reads, x.shape, 3)
    outputs, every = [], {"x": x}
    for one in ones:
        weight, bias, leaves, scale = parts_of(backend, one)
        added = scale * dropped @ leaves["lora_a"].T @ leaves["lora_b"].T
        if "lora_magnitude" in leaves:
            whole = (weight + scale * leaves["lora_b"] @ leaves["lora_a"]).detach()
            ratio = leaves["lora_magnitude"] / whole.norm(dim=1)
            added = (ratio - 1) * (dropped @ weight.T) + ratio * added
        outputs.append(x @ weight.T + bias + added)
        every |= {f"{one.logical}.{which}": leaf for which, leaf in leaves.items()}
    return _found(outputs, every, upstream)


def by_layers(backend, ones, x, upstream):
    """Return outputs and gradients of the layers as called in training."""
    x = x.clone().requires_grad_()
    backend.begin(3)
    with backend._compute():
        outputs = [backend.layers[one.logical](x) for one in ones]
    names = tuple(f"{one.logical}." for one in ones)
    every = {n: p for n, p in backend.trainable().items() if n.startswith(names)}
    return _found(outputs, {"x": x} | every, upstream)


def _found(outputs, leaves, upstream):
    upstream = [u.to(y.dtype) for u, y in zip(upstream, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    results = {f"output {n}": y.detach().double() for n, y in enumerate(outputs)}
    return results | {n: g.double() for n, g in zip(leaves, gradients, strict=True)}


@contextmanager
def by_peft(backend):
    """Let PEFT compute inside the context."""
    ours = {layer: layer.__dict__.pop("forward") for layer in backend.layers.values()}
    try:
        yield
    finally:
        for layer, forward in ours.items():
            layer.forward = forward


def errors(found, truth):
    assert found.keys() == truth.keys()
    return {n: float((found[n] - truth[n]).norm() / truth[n].norm()) for n in truth}


def live(tiny_backend, *overrides):
    backend = tiny_backend(*overrides, live=True).train()
    with torch.no_grad():
        for name, parameter in backend.trainable().items():
            if name.endswith("magnitude"):
                parameter.mul_(1.2)
    return backend


@arms
def test_in_f32_outputs_and_gradients_are_those_of_the_formula(tiny_backend, overrides):
    """Every projection of every input agrees to float32 rounding."""
    backend = live(tiny_backend, F32, *overrides)
    for reads, ones in inputs_of(backend).items():
        x = drawn(1, TOKENS, ones[0].width, seed=0).float()
        upstream = [drawn(1, TOKENS, one.out, seed=n) for n, one in enumerate(ones)]
        truth = by_formula(backend, reads, ones, x, upstream)
        found = errors(by_layers(backend, ones, x, upstream), truth)
        assert max(found.values()) <= 2e-6, found


@arms
def test_in_bf16_the_formula_is_as_near_as_to_peft(tiny_backend, overrides):
    """No error against float64 exceeds PEFT's by more than its rounding."""
    backend = live(tiny_backend, *overrides)
    for reads, ones in inputs_of(backend).items():
        x = drawn(1, TOKENS, ones[0].width, seed=0)
        upstream = [drawn(1, TOKENS, one.out, seed=n) for n, one in enumerate(ones)]
        truth = by_formula(backend, reads, ones, x, upstream)
        ours = errors(by_layers(backend, ones, x, upstream), truth)
        with by_peft(backend):
            theirs = errors(by_layers(backend, ones, x, upstream), truth)
        assert max(theirs.values()) <= 0.02, theirs
        worse = {name: (ours[name], theirs[name]) for name in ours if ours[name] > theirs[name]}
        assert all(mine <= 1.25 * other + 5e-4 for mine, other in worse.values()), worse


# When it applies.


@pytest.fixture
def computed(monkeypatch):
    """Record the groups that are computed, by their number of projections."""
    counts, compute = [], linear.SharedInput._computed

    def counted(self, x, dtype):
        counts.append(len(self.projections))
        return compute(self, x, dtype)

    monkeypatch.setattr(linear.SharedInput, "_computed", counted)
    return counts


@pytest.mark.parametrize("name", FAMILIES)
def test_projections_of_an_input_are_computed_once_in_every_family(
    name, family_backend, packed_documents, computed
):
    """This fails if a family's projections read copies of their input."""
    backend = family_backend(name).train()
    backend.begin(0)
    assert backend(packed_documents).requires_grad
    inputs = [one.reads for one in backend.modules_chosen if one.stack is None]
    assert sum(computed) == len(inputs)
    assert len(computed) == len(set(inputs))


def test_in_a_family_that_is_not_known_each_projection_is_alone(tiny_backend, computed):
    """Its projections may read different tensors; the masks are the same."""
    backend = tiny_backend(DROP, live=True).train()
    together = [shared for shared in backend.inputs if len(shared.projections) > 1]
    assert len(together) == 4
    layers = [(one, backend.layers[one.logical]) for one in backend.modules_chosen]
    weights = together[0].weights
    ones = inputs_of(backend)["model.layers.0.self_attn.qkv"]
    x = drawn(1, TOKENS, 64, seed=0)
    upstream = [drawn(1, TOKENS, one.out, seed=n) for n, one in enumerate(ones)]
    before = by_layers(backend, ones, x, upstream)
    with by_peft(backend):
        linear.take_over(layers, adapter=ADAPTER, weights=weights, together=False)
        computed.clear()
        after = by_layers(backend, ones, x, upstream)
    assert computed == [1, 1, 1]
    assert all(torch.equal(after[name], before[name]) for name in before if name != "x")
    assert (after["x"] - before["x"]).norm() <= 0.01 * before["x"].norm()


def step(backend, batch):
    backend.zero_grad()
    backend.begin(0)
    objective = CrossEntropy("causal", 8)
    objective(backend(batch), batch.targets_M, backend.head).total.backward()


@pytest.fixture
def batch(random_documents):
    return packed_batch(random_documents([9, 23]), [[0, 1]], index=0)


@pytest.mark.parametrize("change", ["frozen parts learn", "hook", "merged", "another adapter"])
def test_what_is_not_known_is_left_to_peft(tiny_backend, batch, computed, change):
    """Cases: a trained base, a hook, a merged adapter, and a second adapter."""
    backend = tiny_backend("backend=lora", "lora=qv", live=True).train()
    step(backend, batch)
    assert computed == [2, 2]
    computed.clear()
    layer = backend.layers["l0.q"]
    if change == "frozen parts learn":
        layer.get_base_layer().weight.requires_grad_()
    elif change == "hook":
        layer.get_base_layer().register_forward_hook(lambda *_: None)
    elif change == "merged":
        layer.merge()
    else:
        layer.update_layer("other", 2, 2, backend.model.peft_config[ADAPTER])
        layer.set_adapter([ADAPTER, "other"])
    step(backend, batch)
    assert computed == [2, 2]  # the other projection of this input, and the other layer


def test_an_adapter_with_additions_is_left_to_peft(tiny_backend):
    """A bias of B or a variant other than DoRA is not computed here."""
    backend = tiny_backend("lora=qv")
    module = backend.layers["l0.q"]
    assert linear._is_known(module, ADAPTER)
    module.lora_bias[ADAPTER] = True
    assert not linear._is_known(module, ADAPTER)
    module.lora_bias[ADAPTER] = False
    module.lora_variant[ADAPTER] = object()
    assert not linear._is_known(module, ADAPTER)


def test_without_gradients_peft_computes(tiny_backend, batch, computed):
    """Validation, scoring and generation use the code that users of the adapter run."""
    backend = tiny_backend(live=True).train()
    with torch.no_grad():
        backend(batch)
    backend.eval()
    with torch.inference_mode():
        backend(batch)
    assert computed == []


# Copies of parameters.


@pytest.mark.parametrize("overrides", [[], ["lora.variant=dora"]])
@pytest.mark.parametrize("way", ["in place", "through data", "optimizer", "8-bit optimizer"])
def test_a_changed_parameter_is_seen(tiny_backend, batch, overrides, way):
    """The next micro-batch has the loss of a fresh model with the changed parameter."""
    import bitsandbytes

    backend = tiny_backend(*overrides, live=True).train()
    parameters = backend.trainable()
    step(backend, batch)
    if way == "in place":
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(1.5)
    elif way == "through data":
        for parameter in parameters.values():
            parameter.data.mul_(1.5)
    elif way == "optimizer":
        torch.optim.AdamW(parameters.values(), lr=0.05).step()
    else:
        bitsandbytes.optim.AdamW8bit(parameters.values(), lr=0.05, min_8bit_size=1).step()
    fresh = tiny_backend(*overrides).train()
    for name, parameter in fresh.trainable().items():
        parameter.data.copy_(parameters[name])
    for one in (backend, fresh):
        one.begin(1)
    hidden, expected = backend(batch), fresh(batch)
    backend.begin(0)
    assert torch.equal(hidden, expected)
    assert not torch.equal(hidden, tiny_backend(*overrides, live=True).train()(batch))


def test_matrices_are_copied_once_a_micro_batch(tiny_backend, batch, monkeypatch):
    """This holds for any number of head chunks, and with recomputed activations."""
    counts, copy = [], linear.SharedInput._copied

    def counted(self, *arguments):
        counts.append(self)
        return copy(self, *arguments)

    monkeypatch.setattr(linear.SharedInput, "_copied", counted)
    overrides = ["lora.targets=[all_linear,lm_head]", "model.gradient_checkpointing=on", DROP]
    backend = tiny_backend(*overrides, live=True).train()
    step(backend, batch)
    assert len(counts) == len(set(counts)) == len(backend.inputs) == 9


# Memory.


def test_what_is_kept_of_an_input_is_its_dropped_values_and_a_bit_each(tiny_backend):
    """Kept are dropped values, a bit each, and A's outputs of rank 16; not input and output."""
    backend = tiny_backend(DROP, live=True).train()
    ones = inputs_of(backend)["model.layers.0.self_attn.qkv"]
    x = drawn(1, TOKENS, 64, seed=0).requires_grad_()
    kept = []
    backend.begin(0)
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with keep, backend._compute():
        outputs = [backend.layers[one.logical](x) for one in ones]
    assert outputs
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert sum(sizes.values()) == TOKENS * (64 * 2 + 64 // 8 + 3 * 16 * 2)


def test_results_that_nobody_takes_are_dropped_with_the_micro_batch(tiny_backend):
    """This matters for a model that skips a projection."""
    backend = tiny_backend(live=True).train()
    shared = next(one for one in backend.inputs if len(one.projections) > 1)
    with backend._compute():
        backend.layers["l0.q"](drawn(1, TOKENS, 64, seed=0))
    assert len(shared._results) == 2
    backend.begin(1)
    assert (shared._input, shared._results) == (None, {})


# A CPU without bf16.


@pytest.fixture
def without_bf16(monkeypatch):
    monkeypatch.setattr(kernels, "has_bf16", lambda kind: False)


@pytest.mark.parametrize("overrides", [[DROP], [DROP, "lora.variant=dora"], [DROP, "lora=qv"]])
def test_without_bf16_instructions_no_product_is_in_bf16(
    tiny_backend, batch, without_bf16, monkeypatch, overrides
):
    """This covers both passes, and projections and a head without an adapter."""
    expected_backend = tiny_backend(*overrides, live=True).train()
    formats = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__.strip("_") in {"mm", "bmm", "addmm", "baddbmm"}:
                formats.update(x.dtype for x in args if isinstance(x, torch.Tensor))
            return func(*args, **kwargs or {})

    with Watch():
        step(expected_backend, batch)
    assert formats == {torch.float32}


@pytest.mark.parametrize("overrides", [[DROP], [DROP, "lora.variant=dora"], [DROP, "lora=qv"]])
def test_without_bf16_instructions_gradients_are_as_near_the_truth(
    tiny_backend, batch, monkeypatch, overrides
):
    """Rounded float32 products lose no more than bf16 products."""
    found = []
    for has_bf16, dtype in ((True, "f32"), (True, "bf16"), (False, "bf16")):
        monkeypatch.setattr(kernels, "has_bf16", lambda kind, answer=has_bf16: answer)
        backend = tiny_backend(*overrides, f"quant.compute_dtype={dtype}", live=True).train()
        step(backend, batch)
        found.append(torch.cat([p.grad.flatten() for p in backend.trainable().values()]))
    truth, with_bf16, without = found
    assert (without - truth).norm() <= 1.1 * (with_bf16 - truth).norm()
    assert (with_bf16 - truth).norm() <= 0.05 * truth.norm()
