"""Liger's kernels in Triton's interpreter, compared with torch and transformers.

test_liger.py runs this file in a process of its own: Triton decides when it is imported whether it
interprets, and bitsandbytes imports Triton where it is installed.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from mens_exp.data.batch import packed_batch
from mens_exp.model.liger import FusedHead, LigerKernels
from mens_exp.model.quiet import quiet
from mens_exp.objective.causal import CrossEntropy, Passed, token_losses
from mens_exp.planning.kernels import Part
from mens_exp.rows.documents import WEIGHT

WANTED = dict.fromkeys(Part)
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Triton's interpreter with two repairs, by which it does what compiled kernels do.

    A Python number that is passed to a kernel is an f32 there; and functions of CUDA's library,
    which it cannot call, are made of Triton's own.
    """
    import triton.language as tl
    from liger_kernel.ops import cross_entropy, rms_norm
    from triton.runtime import interpreter as triton_interpreter

    usual = triton_interpreter._implicit_cvt

    def converted(value):
        if not isinstance(value, float):
            return usual(value)
        handle = triton_interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(triton_interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))  # noqa: PLW0108  # patched late
    monkeypatch.setattr(cross_entropy, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)


def assert_alike(ours, theirs, bound=2e-5):
    """Compare two tensors by their difference relative to the second."""
    assert torch.isfinite(ours).all()
    ours, theirs = ours.detach(), theirs.detach()
    assert float((ours - theirs).norm()) <= bound * float(theirs.norm())


def head_of(*, bias=False, softcap=None):
    torch.manual_seed(1)
    layer = torch.nn.Linear(64, 320, bias=bias).requires_grad_(requires_grad=False)
    return FusedHead(layer, softcap=softcap, dtype=torch.float32)


def by_torch(head, hidden_MD, targets_M, label_smoothing=0.0, z_loss=0.0):
    """Return the loss of each token by torch's own cross entropy."""
    logits_MV = head.layer(hidden_MD)
    if head.softcap is not None:
        logits_MV = head.softcap * torch.tanh(logits_MV / head.softcap)
    losses_M = torch.nn.functional.cross_entropy(
        logits_MV, targets_M, reduction="none", label_smoothing=label_smoothing
    )
    return losses_M + z_loss * logits_MV.logsumexp(-1).square()


@pytest.mark.parametrize("changes", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}])
@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"softcap": 3.0}])
def test_the_head_has_the_loss_of_torchs_cross_entropy(kind, changes):
    """The sum, the weighted losses of tokens, and both gradients agree."""
    head = head_of(**kind)
    hidden_MD = torch.randn(13, 64, requires_grad=True)
    targets_M, weights_M = torch.randint(320, (13,)), torch.rand(13)
    expected_M = by_torch(head, hidden_MD, targets_M, **changes)
    each_M = head.each(hidden_MD, targets_M, **changes)
    assert_alike(each_M, expected_M)
    for ours, theirs in (
        (head.summed(hidden_MD, targets_M, **changes), expected_M.sum()),
        ((each_M * weights_M).sum(), (expected_M * weights_M).sum()),
    ):
        assert_alike(ours, theirs)
        gradients = [
            torch.autograd.grad(3 * one, hidden_MD, retain_graph=True)[0] for one in (ours, theirs)
        ]
        assert_alike(*gradients)


def model_of(family, **settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with quiet():
        config = AutoConfig.for_model(family, **SIZES, **settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.1)
    return model.requires_grad_(requires_grad=False).eval()


def kernels_on(model, reasons=WANTED):
    def logits(hidden_MD):
        plain = copy.copy(model.lm_head)
        return model_logits(model, plain(hidden_MD))

    return LigerKernels(model, logits, reasons, dtype=torch.float32, kind="cpu")


def model_logits(model, logits_MV):
    """Return what transformers' code makes of the head's output."""
    config = model.config
    logits_MV = logits_MV / getattr(config, "logits_scaling", 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return logits_MV if softcap is None else softcap * torch.tanh(logits_MV / softcap)


ALL = {*Part}
FAMILIES = {
    "llama": ALL,
    "mistral": ALL,
    "qwen2": ALL,
    "qwen3": ALL,
    "granite": ALL - {Part.HEAD},  # scaled logits
    "gemma2": {Part.HEAD, Part.ROPE},  # capped logits; norms with 1 + w; GELU
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_loss_and_the_gradient_of_transformers(family):
    """The oracle is an unpatched model; the record names the kernels that Liger replaces."""
    scaled = {"logits_scaling": 4.0} if family == "granite" else {}
    theirs = model_of(family, **scaled)
    ours = copy.deepcopy(theirs)
    kernels = kernels_on(ours)
    found = {Part(name) for name, by in kernels.facts().items() if by.startswith("liger-kernel")}
    assert found == FAMILIES[family]
    ids_BT = torch.randint(320, (2, 7))
    embedded_BTD = theirs.get_input_embeddings()(ids_BT).detach()
    leaves = [embedded_BTD.clone().requires_grad_() for _ in range(2)]
    expected = theirs(inputs_embeds=leaves[0], labels=ids_BT).loss
    hidden_BTD = ours.model(inputs_embeds=leaves[1]).last_hidden_state
    hidden_MD, targets_M = hidden_BTD[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()
    if kernels.head is None:
        logits_MV = model_logits(ours, ours.lm_head(hidden_MD))
        loss = torch.nn.functional.cross_entropy(logits_MV, targets_M)
    else:
        loss = kernels.head.summed(hidden_MD, targets_M) / len(targets_M)
    assert_alike(loss, expected)
    expected.backward()
    loss.backward()
    assert_alike(leaves[1].grad, leaves[0].grad, bound=1e-4)


def test_other_models_and_other_devices_are_left_alone():
    """A second model gives the same bits, and so does ours if no kernel runs."""
    first, second = model_of("llama"), model_of("llama")
    ids_BT = torch.randint(320, (1, 9))
    with torch.no_grad():
        expected = second(ids_BT).logits
        kernels = LigerKernels(first, first.lm_head, WANTED, dtype=torch.float32, kind="cuda")
        assert kernels.numerics() == {"kernels": "head and loss, RoPE, RMSNorm, SwiGLU by Liger 1"}
        assert torch.equal(second(ids_BT).logits, expected)
        assert torch.equal(first(ids_BT).logits, expected)


def test_a_gelu_and_a_quantized_or_trained_head_stay_with_torch():
    """The reason is recorded."""
    model = model_of("llama", hidden_act="gelu")
    model.lm_head.requires_grad_(requires_grad=True)
    facts = kernels_on(model).facts()
    assert facts[Part.MLP] == "torch: the model's code is not Llama's, with SiLU"
    assert facts[Part.HEAD] == "torch: the head is trained"
    model.lm_head = torch.nn.Identity()
    assert kernels_on(model).facts()[Part.HEAD] == "torch: the head has the class Identity"


def gradients_of(backend, batch, loss_of):
    for parameter in backend.trainable().values():
        parameter.grad = None
    backend.begin(0)
    passed = Passed(batch, backend(batch), backend.head, fused_head=backend.fused_head)
    total = loss_of(passed)
    total.backward()
    return total.detach(), {n: p.grad.clone() for n, p in backend.trainable().items()}


LOSSES = {
    "plain": lambda passed: CrossEntropy("causal", 16).loss(passed).total,
    "regularised": lambda passed: (
        CrossEntropy("causal", 16, label_smoothing=0.1, z_loss=0.01).loss(passed).total
    ),
    "squares": lambda passed: token_losses(passed, 16).square().sum(),
}


@pytest.mark.parametrize("recomputes", ["'on'", "'off'"])
def test_qlora_learns_the_same(tiny_backend, random_documents, recomputes):
    """Every gradient agrees on packed documents with dropout and weights."""
    settings = ("quant.compute_dtype=f32", f"model.gradient_checkpointing={recomputes}")
    backend = tiny_backend(*settings, "lora.dropout=0.1", live=True).train()
    batch = packed_batch(random_documents([5, 3, 8]), [[0, 1, 2]], index=0)
    weights_M = torch.rand(len(batch.targets_M))
    batch.extra[WEIGHT] = weights_M
    batch.host.extra[WEIGHT] = weights_M
    torch_alone = {name: gradients_of(backend, batch, loss) for name, loss in LOSSES.items()}
    assert all(by.startswith("torch: ") for by in backend.facts()["kernels"].values())
    backend.use_kernels(WANTED, kind="cpu")
    assert all(by.startswith("liger-kernel ") for by in backend.facts()["kernels"].values())
    assert backend.facts()["numerics"]["kernels"].endswith("by Liger 1")
    for name, loss in LOSSES.items():
        (expected, theirs), (found, ours) = torch_alone[name], gradients_of(backend, batch, loss)
        assert_alike(found, expected)
        assert any(float(one.norm()) > 0 for one in theirs.values())
        for matrix, gradient in theirs.items():
            assert_alike(ours[matrix], gradient, bound=1e-4)
