"""Initialization from weight gradients, compared with PEFT's LoRA-GA on the same rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mens_exp.config.validate import problems_of
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.model.quiet import quiet
from mens_exp.planning.preflight import preflight
from mens_exp.quant.bnb import dequantized
from mens_exp.training.data_driven_init import pair_of, start_from_gradients

R = 16
GA = ("lora.init=lora_ga", f"lora.r={R}", "quant.compute_dtype=f32", "data.micro_batch_size=2")
LENGTHS = (40, 31, 57, 44, 60, 38)
CLOSE = 1e-4  # relative, for float32 gradients including small singular values


def stream(documents, *, packing):
    """Return the micro-batches, of two documents each, in order."""
    make = packed_batch if packing else padded_batch
    extra = {} if packing else {"pad_id": 0}
    many = len(documents.offsets) // 2
    blocks = [[[2 * n], [2 * n + 1]] for n in range(many)]
    return SimpleNamespace(
        total=many, batch=lambda index: make(documents, blocks[index], index, **extra)
    )


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS)


def of_peft(backend, tiny_base, documents, many):
    """Return PEFT's layers after its own initialization on dequantized weights.

    PEFT divides the gradient by the number of backward passes, one for each document here.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraGAConfig, preprocess_loraga
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(tiny_base.directory, dtype=torch.float32)
    for one in backend.modules_chosen:
        plain = backend.residuals.layers[one.logical].plain
        model.get_submodule(one.path).weight.data = dequantized(plain).clone()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = LoraConfig(
        r=R,
        lora_alpha=16,
        target_modules=names,
        init_lora_weights="lora_ga",
        lora_ga_config=LoraGAConfig(),
    )
    spans = list(zip(documents.offsets[:-1], documents.offsets[1:], strict=True))[: 2 * many]

    def rows():
        for start, end in spans:
            ids = torch.from_numpy(documents.ids[start:end]).long()[None]
            learned = torch.from_numpy(documents.supervised[start:end].copy())[None]
            yield ids, ids.masked_fill(~learned, -100)

    learned = sum(int((labels != -100).sum()) for _, labels in rows())

    def train_step():
        for ids, labels in rows():
            share = int((labels != -100).sum()) / learned
            (model(input_ids=ids, labels=labels).loss * share * len(spans)).backward()

    preprocess_loraga(model, settings, train_step)
    return dict(get_peft_model(model, settings).named_modules())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # PEFT's key
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("many", "checkpointing"), [(1, "off"), (3, "on")])
def test_matrices_are_those_of_peft_s_lora_ga(
    packing, many, checkpointing, tiny_backend, tiny_config, tiny_base, documents
):
    """They agree up to the signs of singular vectors; the base has the remainder."""
    words = (*GA, f"trainer.accumulate_grad_batches={many}")
    words += (f"model.gradient_checkpointing={checkpointing}",)
    backend = tiny_backend(*words)
    facts = start_from_gradients(tiny_config(*words), backend, stream(documents, packing=packing))
    theirs = of_peft(backend, tiny_base, documents, many)
    for one in backend.modules_chosen:
        layer = theirs[f"base_model.model.{one.path}"]
        A, B = (backend.trainable()[f"{one.logical}.lora_{which}"].detach() for which in "ab")
        their_A, their_B = (getattr(layer, f"lora_{which}")["default"].weight for which in "AB")
        for ours, expected in ((A, their_A), (B.T, their_B.T)):
            assert (ours.abs() - expected.abs()).norm() < 10 * CLOSE * expected.norm(), one.path
            products = (ours @ expected.T).diagonal().abs()
            squares = expected.square().sum(dim=1)
            torch.testing.assert_close(products, squares, rtol=CLOSE, atol=1e-12)
        kept = backend.residuals.layers[one.logical]
        assert all(torch.equal(*pair) for pair in zip(kept.taken, (A, B), strict=True))
        assert backend.layers[one.logical].get_base_layer().weight is kept.residual
    assert facts == {"init_micro_batches": many}
    assert all(parameter.grad is None for parameter in backend.trainable().values())


def test_a_pair_is_of_the_exact_decomposition():
    """The oracle is torch's float64 SVD with PEFT's factors: A has first rows, B next columns."""
    gradient = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    A, B = pair_of(gradient, r=8, layer="l0.q")
    U, S, V = torch.linalg.svd(gradient.double(), full_matrices=False)
    expected_B = U[:, 8:16] * S[8:16] * 96**0.25 / 4
    for ours, expected in ((A, V[:8]), (B.T, expected_B.T)):
        products = (ours.double() @ expected.T).diagonal().abs()
        torch.testing.assert_close(products, expected.square().sum(dim=1), rtol=1e-5, atol=1e-8)


def test_a_layer_without_gradient_starts_with_b_at_zero():
    """An example is an expert that received no token."""
    A, B = pair_of(torch.zeros(32, 64), r=4, layer="l0.q")
    assert A.isfinite().all()
    assert not B.any()


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["lora=ia3"], "lora.init"),
        (["lora.init_from=x"], "lora.init"),
        (["backend=proxy"], "lora.init"),
        (["backend=lora", "quant=none"], "lora.init"),
        (["quant=int8"], "lora.init"),
        (["objective=distillation"], "objective"),
        (["objective=dpo"], "objective"),
        (["trainer=ddp", "trainer.devices=2"], "trainer.devices"),
    ],
)
def test_what_has_no_such_start_is_refused(overrides, where, tiny_config):
    """The error comes before anything is loaded."""
    config = tiny_config("lora.init=lora_ga", "lora.r=4", *overrides)
    assert where in {one.where for one in problems_of(config)}
    assert problems_of(tiny_config("lora.init=lora_ga", "lora.r=4")) == []


@pytest.mark.parametrize(
    ("overrides", "where"),
    [(["lora.r=17"], "lora.r"), (["lora.r=4", "lora.targets=[lm_head]"], "lora.init")],
)
def test_layers_that_cannot_start_so_are_refused(overrides, where, tiny_config):
    """The head is refused, and so is a rank above half of the narrower side of 32."""
    found = preflight(tiny_config("lora.init=lora_ga", *overrides))
    assert where in {one.where for one in found}
    assert where not in {
        one.where for one in preflight(tiny_config("lora.init=lora_ga", "lora.r=16"))
    }
