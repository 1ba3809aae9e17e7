"""The contract of every backend with an adapter, on tiny models and each kind of base."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mens_exp.artifacts.adapter_v3 import read_adapter, write_adapter
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.errors import ConfigError
from mens_exp.objective.causal import CrossEntropy

F32 = "quant.compute_dtype=f32"
STILL = "lora.dropout=0"
# Four heads of a quarter of the width make the projections square, as the proxy needs.
HEADS = ["model.head_dim=16", "model.tie_word_embeddings=true"]
GEMMA = ["model=random", "model.name=gemma2", "model.family=gemma2", *HEADS]
ARMS = {
    "bf16": [],
    "f32": [F32],
    "fp4": ["quant=fp4", F32],
    "int8": ["quant=int8", F32],
    "int8 in bf16": ["quant=int8"],
    "int8 on gpt2": ["quant=int8", "model=tiny_gpt2", F32],
    "single quantization": ["quant.double_quant=false", F32],
    "query and value": ["lora=qv", F32],
    "gpt2": ["model=tiny_gpt2", F32],
    "qwen2": ["model=tiny_qwen2", F32],
    "proxy": ["backend=proxy", F32],
    "proxy in bf16": ["backend=proxy"],
    "proxy on gpt2": ["backend=proxy", "model=tiny_gpt2", F32],
    "lora": ["backend=lora", F32],
    "lora in bf16": ["backend=lora"],
    "lora on gpt2": ["backend=lora", "model=tiny_gpt2", F32],
    "burn": ["backend=burn", "backend.train_base=false"],
    # Norms scale by 1 + weight, embeddings by the root of the width; logits and scores are capped.
    "gemma2": [*GEMMA, F32],
    "gemma2 in bf16": GEMMA,
    "proxy on gemma2": ["backend=proxy", *GEMMA, F32],
    "lora on gemma2": ["backend=lora", *GEMMA, F32],
    "burn on gemma2": ["backend=burn", "backend.train_base=false", *GEMMA],
    "gemma3": ["model=random", "model.name=gemma3", "model.family=gemma3_text", *HEADS, F32],
}
arms = pytest.mark.parametrize("overrides", ARMS.values(), ids=ARMS.keys())
LENGTHS, SUPERVISED = [11, 6, 17, 9], [3, 1, 12, 0]


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS, SUPERVISED)


@pytest.fixture
def batch(documents):
    return packed_batch(documents, [[0, 1, 2, 3]], index=0)


def logits_of(backend, batch):
    """Return logits in evaluation mode, without gradients."""
    backend.eval()
    with torch.no_grad():
        return backend.head(backend(batch))


def loss_of(backend, batch):
    backend.begin(batch.index)
    return CrossEntropy("causal", 4)(backend(batch), batch.targets_M, backend.head).total


def gradients_of(backend, batch):
    """Return the gradients of one micro-batch in training mode."""
    backend.train()
    backend.zero_grad()
    loss_of(backend, batch).backward()
    found = {name: p.grad for name, p in backend.trainable().items()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


@arms
def test_a_fresh_adapter_leaves_the_logits_as_they_are(tiny_backend, batch, overrides):
    """With B = 0, switching the adapter off leaves the logits bitwise equal."""
    backend = tiny_backend(*overrides)
    tuned = logits_of(backend, batch)
    with backend.base_only():
        base = logits_of(backend, batch)
    assert tuned.abs().sum() > 0
    assert torch.equal(tuned, base)


@arms
def test_a_live_adapter_changes_the_logits_until_it_is_switched_off(tiny_backend, batch, overrides):
    """With B filled, switching off gives the base, and switching on the adapter."""
    base = logits_of(tiny_backend(*overrides), batch)
    backend = tiny_backend(*overrides, live=True)
    tuned = logits_of(backend, batch)
    assert not torch.equal(tuned, base)
    with backend.base_only():
        assert torch.equal(logits_of(backend, batch), base)
    assert torch.equal(logits_of(backend, batch), tuned)
    assert all(p.requires_grad for p in backend.trainable().values())


@arms
def test_every_adapter_matrix_learns_and_nothing_else_does(tiny_backend, batch, overrides):
    """With B filled, each adapter matrix has a gradient after one backward pass; the base none."""
    backend = tiny_backend(*overrides, live=True)
    gradients = gradients_of(backend, batch)
    assert all(bool(gradient.abs().sum() > 0) for gradient in gradients.values())
    ours = {id(parameter) for parameter in backend.trainable().values()}
    others = [p for p in backend.parameters() if id(p) not in ours]
    assert others or "backend=proxy" in overrides  # this backend's base weights are no parameters
    assert all(p.grad is None and not p.requires_grad for p in others)


@arms
def test_adapters_are_f32_whatever_computes(tiny_backend, batch, overrides):
    """Parameters and gradients are float32, so that small updates are not rounded away."""
    backend = tiny_backend(*overrides, live=True)
    assert {p.dtype for p in backend.trainable().values()} == {torch.float32}
    assert {g.dtype for g in gradients_of(backend, batch).values()} == {torch.float32}


@arms
def test_train_validate_train_gives_the_same_gradients(tiny_backend, batch, overrides):
    """A validation pass in between leaves every gradient bitwise equal."""
    backend = tiny_backend(*overrides, live=True)
    before = gradients_of(backend, batch)
    backend.eval()
    with torch.inference_mode():
        backend.head(backend(batch))
    after = gradients_of(backend, batch)
    assert all(torch.equal(before[name], after[name]) for name in before)


@arms
def test_dropout_follows_the_micro_batch_and_nothing_else(tiny_backend, batch, overrides):
    """In training the same index gives the same hidden states, and another index others."""
    backend = tiny_backend(*overrides, "lora.dropout=0.3", live=True).train()

    def hidden(index):
        backend.begin(index)
        with torch.no_grad():
            return backend(batch)

    first = hidden(4)
    torch.rand(7)
    assert not torch.equal(hidden(5), first)
    assert torch.equal(hidden(4), first)
    backend.eval()
    assert torch.equal(hidden(4), hidden(5))


@arms
def test_an_adapter_on_disk_gives_the_same_logits_in_a_fresh_graph(
    tiny_backend,
    tiny_config,
    batch,
    overrides,
    tmp_path,
):
    """An adapter written as schema v3 and read back gives bitwise equal logits."""
    backend = tiny_backend(*overrides, live=True)
    manifest, tensors = backend.adapter(tiny_config(*overrides))
    write_adapter(tmp_path, manifest, tensors)
    fresh = tiny_backend(*overrides)
    _, read = read_adapter(tmp_path)
    fresh.load_adapter(read)
    assert torch.equal(logits_of(fresh, batch), logits_of(backend, batch))


def test_an_exported_adapter_is_a_copy(tiny_backend, tiny_config):
    """Further training does not change an exported adapter."""
    backend = tiny_backend(live=True)
    _, tensors = backend.adapter(tiny_config())
    before = {name: values.copy() for name, values in tensors.items()}
    with torch.no_grad():
        for parameter in backend.trainable().values():
            parameter.add_(1)
    assert all(np.array_equal(tensors[name], before[name]) for name in before)


@pytest.mark.parametrize("change", ["missing", "extra", "rank", "transposed"])
def test_an_adapter_of_another_graph_is_refused(tiny_backend, tiny_config, change):
    """The message names the matrix; a lower rank is not padded."""
    backend = tiny_backend(live=True)
    _, tensors = backend.adapter(tiny_config())
    before = {name: p.detach().clone() for name, p in backend.trainable().items()}
    if change == "missing":
        del tensors["l1.up.lora_a"]
    elif change == "extra":
        tensors["l9.up.lora_a"] = tensors["l1.up.lora_a"]
    elif change == "rank":
        tensors["l1.up.lora_a"] = tensors["l1.up.lora_a"][:1]
    else:
        tensors["l1.up.lora_a"] = tensors["l1.up.lora_a"].T
    with pytest.raises(ConfigError, match=r"l[19]\.up\.lora_a"):
        backend.load_adapter(tensors)
    assert all(torch.equal(before[name], p) for name, p in backend.trainable().items())


def test_initialisation_is_shared_by_arms_that_differ_in_something_else(
    tiny_backend,
):
    """With other quantization, format or targets, a shared layer starts with the same A."""
    reference = tiny_backend().trainable()
    for overrides in ARMS.values():
        backend = tiny_backend(*overrides)
        shared = [name for name in backend.trainable() if name in reference]
        assert shared or "backend=proxy" in overrides or "model=tiny_gpt2" in overrides
        for name in shared:
            parameter = backend.trainable()[name]
            assert parameter.shape != reference[name].shape or torch.equal(
                parameter, reference[name]
            )


def test_initialisation_follows_the_seed(tiny_backend):
    """Another seed changes every A and leaves every B at zero."""
    first, second = tiny_backend("seed=1").trainable(), tiny_backend("seed=2").trainable()
    for name in first:
        assert torch.equal(first[name], second[name]) is name.endswith("lora_b"), name


@pytest.mark.parametrize("overrides", [[F32], [F32, "quant=fp4"], [F32, "lora=qv"]])
def test_a_document_has_the_same_logits_packed_and_alone(tiny_backend, documents, overrides):
    """Logits of base and adapter agree in float32 to 1e-5."""
    backend = tiny_backend(*overrides, live=True)
    together = logits_of(backend, packed_batch(documents, [[0, 1, 2, 3]], index=0))
    alone = [logits_of(backend, packed_batch(documents, [[i]], index=0)) for i in range(3)]
    assert (together - torch.cat(alone)).abs().max() <= 1e-5


def test_padded_and_packed_give_the_same_loss_and_gradients(tiny_backend, documents):
    """They agree in float32 for any pad id."""
    backend = tiny_backend(F32, STILL, live=True)
    packed = packed_batch(documents, [[0, 1, 2, 3]], index=0)
    expected, gradients = loss_of(backend.train(), packed), gradients_of(backend, packed)
    for pad_id in (0, 2, 77):
        padded = padded_batch(documents, [[0], [1], [2], [3]], index=0, pad_id=pad_id)
        assert torch.allclose(loss_of(backend, padded), expected, rtol=1e-6)
        for name, gradient in gradients_of(backend, padded).items():
            assert torch.allclose(gradient, gradients[name], rtol=1e-4, atol=1e-5), name


def test_changing_a_document_changes_nothing_in_the_others(tiny_backend, documents):
    """The logits of the others stay bitwise equal in bf16."""
    backend = tiny_backend(live=True)
    before = logits_of(backend, packed_batch(documents, [[0, 1, 2, 3]], index=0))
    documents.ids[LENGTHS[0] : LENGTHS[0] + LENGTHS[1]] = 5  # document 1 has one target
    after = logits_of(backend, packed_batch(documents, [[0, 1, 2, 3]], index=0))
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3], after[3])
    assert torch.equal(before[4:], after[4:])


def test_hidden_states_are_those_of_supervised_positions_alone(tiny_backend, batch):
    """16 supervised tokens give 16 rows of 64, and 16 of 320 logits."""
    backend = tiny_backend()
    hidden = backend(batch)
    assert hidden.shape == (16, 64)
    assert backend.head(hidden).shape == (16, 320)


@arms
def test_three_micro_batches_are_one_batch_of_three(tiny_backend, documents, overrides):
    """Gradients of the loss sum equal the sum over documents, up to rounding."""
    backend = tiny_backend(*overrides, STILL, live=True)
    rounding = 1e-4 if F32 in overrides or "backend=burn" in overrides else 3e-2
    whole = gradients_of(backend, packed_batch(documents, [[0, 1, 2]], index=0))
    parts = [gradients_of(backend, packed_batch(documents, [[i]], index=0)) for i in range(3)]
    for name, gradient in whole.items():
        total = sum((part[name] for part in parts), torch.zeros(()))
        assert (gradient - total).norm() <= rounding * gradient.norm(), name


@pytest.mark.parametrize("overrides", [[], ["backend=proxy"]])
@pytest.mark.parametrize(
    ("licence", "required"), [("apache-2.0", True), ("cc0-1.0", False), ("own", None), (None, None)]
)
def test_an_adapter_names_the_origin_of_its_base_where_that_is_known(
    tiny_backend,
    tiny_config,
    overrides,
    licence,
    required,
):
    """These are family, name, licence and obligations; unknown obligations are left out."""
    backend = tiny_backend(*overrides)
    backend.base = dataclasses.replace(backend.base, license=licence)
    manifest, _ = backend.adapter(tiny_config(*overrides))
    known = {
        "base_family": "llama",
        "upstream_model_id": "tiny_llama",
        "license_class": licence,
        "attribution_required": required,
    }
    assert manifest.provenance == (None if required is None else known)
