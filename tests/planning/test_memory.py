from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mens_exp.config.compose import compose, typed
from mens_exp.config.objective import OBJECTIVES
from mens_exp.config.optim import OptimizerConfig
from mens_exp.config.quant import QuantConfig
from mens_exp.data.batch import packed_batch
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.shape import Shape, shape_of
from mens_exp.planning.activations import Documents
from mens_exp.planning.memory import (
    OFFLOADED,
    bits_per_weight,
    memory,
    optimizer_bytes,
    trained_parameters,
)

LLAMA_8B = Shape(
    family=FAMILIES["llama"],
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
    tied=False,
)
TINY = Shape(
    family=FAMILIES["llama"],
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=320,
    max_position_embeddings=2048,
    tied=True,
)
FULL = Documents(longest=100_000, typical=100_000)


def of(config, shape=TINY, documents=FULL, **how):
    return memory(config, shape, documents, kind=how.pop("kind", "cpu"), **how)


def test_bits_of_a_weight_are_the_papers():
    """Scales take half a bit, or 8/64 + 32/(64 * 256) if they are quantized (section 3)."""
    assert bits_per_weight(QuantConfig(double_quant=False)) == 4.5
    assert bits_per_weight(QuantConfig(double_quant=True)) == pytest.approx(4.127, abs=5e-4)


def test_eight_bits_and_a_scale_a_row(tiny_config):
    """By hand; int8 also keeps the inputs of projections that have no adapter."""
    eight, four = (of(tiny_config(*more)).components for more in (["quant=int8"], []))
    rows = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    weights = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128)
    assert eight["base weights"] == weights + 4 * rows
    assert eight["activations"] == four["activations"]
    tokens = 512  # data.seq_len
    eight, four = (of(tiny_config("lora=qv", *more)).components for more in (["quant=int8"], []))
    # k's input, shared with q and v only after dropout, and those of the other projections.
    assert eight["activations"] - four["activations"] == tokens * 2 * 2 * (64 + 64 + 64 + 128)


def test_an_offloaded_base_leaves_scales_and_two_layers(tiny_config):
    """By hand for NF4 with double quantization: 0.127 bits per weight, and 14336 · 4096 codes."""
    here, there = (
        of(tiny_config(f"model.offload={one}", "trainer=gpu"), LLAMA_8B, kind="cuda")
        for one in ("false", "true")
    )
    assert there.components["base weights"] == pytest.approx(6.979e9 * 0.127 / 8, rel=1e-3)
    assert there.components[OFFLOADED] == 2 * 4096 * 14336 // 2
    codes = LLAMA_8B.linear_parameters // 2
    saved = sum(here.components.values()) - sum(there.components.values())
    assert saved == codes - there.components[OFFLOADED]
    assert "; 3.2 GiB of codes are in host memory" in there.basis
    on_cpu = of(tiny_config("model.offload=true", "trainer=gpu"), LLAMA_8B)
    assert OFFLOADED not in on_cpu.components


def test_llama_8b_on_a_gpu(tiny_config):
    """By hand for r 16, seven projections, batch 2 * 2048, NF4 with double quantization."""
    sizes = ["data.seq_len=2048", "data.micro_batch_size=2", "lora.r=16"]
    config = tiny_config(*sizes, "model.gradient_checkpointing=off")
    parts = of(config, LLAMA_8B, kind="cuda").components
    # 32 · (2·4096² + 2·4096·1024 + 3·4096·14336) weights.
    assert LLAMA_8B.linear_parameters == 6_979_321_856
    assert parts["base weights"] == pytest.approx(6.979e9 * 4.127 / 8, rel=1e-4)  # 3.60 GB
    # 128,256 · 4096 in each of embedding and head, two bytes each.
    assert parts["embedding and head"] == 2 * 525_336_576 * 2  # 2.10 GB
    # 16 · 32 · (2·8192 + 2·5120 + 3·18432) parameters: f32 and a bf16 copy, gradients, two moments.
    parameters = 41_943_040
    assert parts["adapter"] == 6 * parameters
    assert parts["gradients"] == 4 * parameters
    assert parts["optimizer"] == 8 * parameters
    # Per token and layer: two f32 residuals; q, k, v and the output; gate, up and their product;
    # three inputs of width 4096 and one of 14336, whose masks are drawn again; seven outputs of A.
    kept = 2 * 4 * 4096 + 2 * (4096 + 2 * 1024 + 4096) + 2 * 3 * 14336
    kept += 2 * (3 * 4096 + 14336) + 7 * 16 * 2
    assert parts["activations"] == 4096 * 32 * kept  # 25.3 GB
    assert parts["attention scores"] == 0
    total = of(config, LLAMA_8B, kind="cuda").estimate
    assert total == pytest.approx(36.2e9, rel=0.01)


def test_recomputing_keeps_one_layer(tiny_config):
    """Inputs of all layers and one whole layer are kept: 8B at batch 2 * 2048 fits in 16 GiB."""
    sizes = ["data.seq_len=2048", "data.micro_batch_size=2"]
    kept = tiny_config(*sizes, "model.gradient_checkpointing=off")
    whole = of(kept, LLAMA_8B, kind="cuda").components["activations"] / 32
    made = of(tiny_config(*sizes), LLAMA_8B, kind="cuda")  # auto is on for 8B on a GPU
    assert made.components["activations"] == 4096 * 32 * 4096 * 2 + whole
    assert made.estimate < 16 * 2**30


@pytest.mark.parametrize(
    ("target", "expected", "paged"),
    [
        ("torch.optim.AdamW", 8, False),
        ("torch.optim.SGD", 4, False),
        ("bitsandbytes.optim.AdamW8bit", 2 + 8 / 256, False),
        ("bitsandbytes.optim.PagedAdamW8bit", 2 + 8 / 256, True),
        ("mine.Unknown", 8, False),
    ],
)
def test_moments_by_the_class_of_an_option_of_ones_own(tiny_config, target, expected, paged):
    """Per parameter: float32 moments, or two bytes and two scales per 256 elements."""
    config = tiny_config()
    config.optim = OptimizerConfig(_target_=target, lr=1e-3)
    shape = shape_of(config.model)
    parameters = trained_parameters(config, shape)
    assert optimizer_bytes(config, shape) == (round(expected * parameters), paged)


def test_paged_moments_leave_a_gpu_but_not_a_cpu(tiny_config):
    """They are paged to host memory."""
    config = tiny_config()
    config.optim._target_ = "bitsandbytes.optim.PagedAdamW8bit"  # Hydra's own key
    assert of(config, kind="cuda").components["optimizer"] == 0
    assert of(config, kind="cpu").components["optimizer"] > 0


def test_longest_document_decides_attention(tiny_config):
    """2 sequences of 256: a document of 100 tokens, and 412 tokens in documents of 30; 4 heads.

    Lengths are rounded up to 32; from 128 queries on, a block skips later keys.
    """
    config = tiny_config("data.seq_len=256", "data.micro_batch_size=2")
    short = of(config, documents=Documents(longest=100, typical=30)).components
    assert short["attention scores"] == round(2 * 4 * (128**2 + 412 / 30 * 32**2) * 2)
    full = of(config).components
    assert full["attention scores"] == 2 * 4 * (2 * 128 * (128 + 256)) * 2
    assert short["activations"] == full["activations"]


def test_an_answer_that_shares_its_prompt_attends_to_it(tiny_config):
    """Documents of 64 tokens, half of them prompt; keys are counted as triangles.

    Apart, a query has 64² / 2 / 64 keys. Of the 96 tokens of a pair, 64 have the same triangle; 32
    have the 32 keys of the prompt and a triangle of 32.
    """
    config = tiny_config("data.seq_len=192")
    apart, once = (
        of(config, documents=Documents(longest=64, typical=64, shared_frac=frac)).components
        for frac in (0.0, 0.25)
    )
    expected = (64**2 / 2 + 32 * 32 + 32**2 / 2) / 96 / 32
    found = once["attention scores"] / apart["attention scores"]
    assert found == pytest.approx(expected, rel=1e-3)
    assert once["activations"] == apart["activations"]


def test_padding_to_the_longest_document_keeps_no_scores(
    tiny_config,
):
    """Sequences are as short as possible, and attention uses a fused kernel."""
    padded = tiny_config("data.seq_len=256", "data.packing=false")
    packed = tiny_config("data.seq_len=256")
    documents = Documents(longest=64, typical=30)
    parts = of(padded, documents=documents).components
    assert parts["attention scores"] == 0
    assert 4 * parts["activations"] == of(packed, documents=documents).components["activations"]


@pytest.mark.parametrize(
    ("more", "component", "grows"),
    [
        ("quant.compute_dtype=f32", "activations", True),
        ("quant.double_quant=false", "base weights", True),
        ("lora.r=64", "gradients", True),
        ("lora=attention", "activations", False),
        ("lora.dropout=0", "activations", False),
        ("objective.chunk_tokens=64", "head chunk", False),
        ("data.micro_batch_size=2", "activations", True),
    ],
)
def test_components_move_with_what_they_depend_on(tiny_config, more, component, grows):
    """One component grows or shrinks, and the estimate with it."""
    base, changed = of(tiny_config()), of(tiny_config(more))
    assert (changed.components[component] > base.components[component]) == grows
    assert changed.components[component] != base.components[component]
    assert (changed.estimate > base.estimate) == grows


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["lora.dropout=0"],
        ["lora=qv"],
        ["lora.variant=dora"],
        ["quant=int8"],
        ["quant.compute_dtype=f32"],
        ["model=tiny_qwen2"],
        ["lora=ln_tuning"],
        ["lora=ln_tuning", "quant.compute_dtype=f32"],
    ],
)
def test_what_a_graph_keeps_is_what_is_planned(
    tiny_config, tiny_backend, random_documents, overrides
):
    """The oracle is each tensor that autograd saves, for documents of 128 and 384 tokens; to 5%."""
    config = tiny_config("data.seq_len=512", *overrides)
    found = kept_by(tiny_backend(*overrides, live=True).train(), random_documents([128, 384]))
    planned = of(config, shape_of(config.model), Documents(longest=384, typical=128)).components
    assert found == pytest.approx(planned["activations"] + planned["attention scores"], rel=0.05)


def test_a_norm_that_keeps_its_input_anyway_keeps_no_more_when_it_is_tuned(
    tiny_config, tiny_backend, random_documents
):
    """So does torch's LayerNorm; the oracle is autograd's hooks, with two norms tuned and with all.

    The first norm is tuned in both, so that both graphs begin there. A copy of each vector in bf16
    comes on top.
    """
    both = [("model=tiny_gpt2", "lora=ln_tuning", f"lora.targets=[{t}]") for t in ("ln_1", "norms")]
    documents = random_documents([128, 384])
    two, every = (kept_by(tiny_backend(*overrides).train(), documents) for overrides in both)
    assert every == two + 3 * 2 * 64 * 2  # three norms more, of a weight and a bias
    planned = [
        of(config, shape_of(config.model)).components["activations"]
        for config in (tiny_config(*overrides) for overrides in both)
    ]
    assert planned[0] == planned[1]


def kept_by(backend, documents):
    """Return the bytes that autograd saves for two documents, without weights."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    backend.begin(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = backend(packed_batch(documents, [[0, 1]], index=0))
    assert hidden.requires_grad
    frozen = {p.untyped_storage().data_ptr() for p in backend.parameters()}
    return sum(size for place, size in kept.items() if place not in frozen)


def test_default_job_is_predicted_as_measured():
    """Records of the main job, with two threads and sixty steps, have 2.30 and 2.77 GB."""
    config = typed(compose([["trainer=cpu"]])[0].values)
    made = memory(config, shape_of(config.model), Documents(longest=512, typical=330), kind="cpu")
    for measured in (2.30e9, 2.77e9):
        assert made.low < measured < made.high


def test_an_objective_with_a_reference_keeps_the_base_s_states(tiny_config, monkeypatch):
    """512 positions of width 64 in bf16; the two passes do not overlap."""
    config = tiny_config()
    usual = of(config).components
    spec = replace(config.objective.spec, needs_reference=True)
    monkeypatch.setattr(OBJECTIVES, "_known", {"assistant": spec})
    components = of(config).components
    assert components.pop("reference") == 512 * 64 * 2
    assert components == usual


@pytest.mark.parametrize(
    ("overrides", "has_bf16", "bytes_of"),
    [
        (["backend=qlora"], True, (2, 0)),
        (["backend=qlora"], False, (4, 4)),
        (["backend=qlora"], None, (2, 0)),
        (["backend=lora"], True, (0, 0)),
        (["backend=lora"], False, (4, 4)),
        (["backend=qlora", "quant.compute_dtype=f32"], False, (4, 0)),
    ],
)
def test_completions_keep_the_base_in_the_format_of_products(
    tiny_config, overrides, has_bf16, bytes_of
):
    """Weights of linear layers and of the head, 2 or 4 bytes each; test_greedy has the backend."""
    config = tiny_config("suite=mini_python", *overrides)
    found = of(config, has_bf16=has_bf16).components.get("base, converted for completions", 0)
    linears = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert found == bytes_of[0] * linears + bytes_of[1] * 320 * 64
