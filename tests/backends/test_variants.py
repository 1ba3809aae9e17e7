"""Variants, patterns and head adapters on tiny_llama, compared with PEFT's reader."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mens_exp.artifacts.adapter_v3 import read_adapter, write_adapter
from mens_exp.backends.lora import ADAPTER
from mens_exp.data.batch import packed_batch
from mens_exp.model.quiet import quiet
from mens_exp.objective.causal import CrossEntropy
from mens_exp.quant.bnb import quantization_config
from mens_exp.quant.layers import keep_trainable

F32 = "quant.compute_dtype=f32"
ARMS = {
    "rslora": ["lora.variant=rslora", "lora.r=4"],
    "dora": ["lora.variant=dora"],
    "patterns": [
        "lora.rank_pattern={down_proj:3,self_attn.q_proj:5}",
        "lora.alpha_pattern={mlp:7}",
    ],
    "rslora, patterns": ["lora.variant=rslora", "lora.r=4", "lora.rank_pattern={mlp:9}"],
    "dora, patterns": ["lora.variant=dora", "lora.rank_pattern={v_proj:2}"],
    "one layer": ["lora.targets=['*.layers.1.*']"],
    "head": ["lora=lm_head"],
    "all and head": ["lora.targets=[all_linear,lm_head]"],
    "rslora on the head": ["lora.targets=[qv,lm_head]", "lora.variant=rslora"],
}
arms = pytest.mark.parametrize("overrides", ARMS.values(), ids=ARMS.keys())


@pytest.fixture
def documents(random_documents):
    return random_documents([11, 6, 17], [3, 1, 12])


@pytest.fixture
def batch(documents):
    return packed_batch(documents, [[0, 1, 2]], index=0)


def logits_of(backend, batch):
    backend.eval()
    with torch.no_grad():
        return backend.head(backend(batch))


def gradients_of(backend, batch, chunk=4):
    backend.train()
    backend.zero_grad()
    backend.begin(0)
    objective = CrossEntropy("causal", chunk)
    objective(backend(batch), batch.targets_M, backend.head).total.backward()
    return {name: p.grad for name, p in backend.trainable().items()}


def peft_logits(config, base, directory, ids):
    """Return the logits of base and adapter from the libraries alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            base.directory,
            dtype=torch.float32,
            quantization_config=quantization_config(config.quant),
            attn_implementation="eager",
        )
        keep_trainable(model)
        model = PeftModel.from_pretrained(model, directory).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]


@arms
def test_a_fresh_adapter_changes_nothing(tiny_backend, batch, overrides):
    """With B = 0 no variant changes the base; DoRA's magnitudes are those of the weights."""
    backend = tiny_backend(F32, *overrides)
    tuned = logits_of(backend, batch)
    with backend.base_only():
        base = logits_of(backend, batch)
    limit = 1e-5 if "lora.variant=dora" in overrides else 0
    assert (tuned - base).abs().max() <= limit


def test_dora_in_bf16_starts_within_its_rounding(tiny_backend, batch):
    """In training, DoRA's ratio of norms is one up to bf16's precision."""
    backend = tiny_backend("lora.variant=dora", "lora.dropout=0").train()
    with backend.base_only():
        base = backend.head(backend(batch)).detach().float()
    tuned = backend.head(backend(batch)).detach().float()
    assert (tuned - base).norm() <= 0.02 * base.norm()


@arms
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_every_part_learns_and_nothing_else_does(tiny_backend, batch, overrides, compute):
    """Each matrix and magnitude has a float32 gradient; the base and a tied table have none."""
    backend = tiny_backend(*overrides, f"quant.compute_dtype={compute}", live=True)
    gradients = gradients_of(backend, batch)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert all(bool(gradient.abs().sum() > 0) for gradient in gradients.values())
    ours = {id(parameter) for parameter in backend.trainable().values()}
    assert all(p.grad is None for p in backend.parameters() if id(p) not in ours)


@arms
def test_train_validate_train_gives_the_same_gradients(tiny_backend, batch, overrides):
    """A validation in between changes no bit."""
    backend = tiny_backend(*overrides, live=True)
    before = {name: g.clone() for name, g in gradients_of(backend, batch).items()}
    logits_of(backend, batch)
    after = gradients_of(backend, batch)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True")  # about a tied head
@arms
def test_peft_reads_the_adapter_back(
    tiny_backend,
    tiny_base,
    tiny_config,
    documents_of,
    tmp_path,
    overrides,
):
    """PEFT gives the trained graph's logits in float32, with patterns and magnitudes."""
    backend = tiny_backend(F32, *overrides, live=True)
    with torch.no_grad():
        for name, parameter in backend.trainable().items():
            if name.endswith("magnitude"):
                parameter.mul_(1.3)
    backend.write_peft(tmp_path / "peft")
    ids = list(range(3, 40))
    batch = packed_batch(documents_of([ids], [[0] + [1] * 36]), [[0]], index=0)
    theirs = peft_logits(tiny_config(F32, *overrides), tiny_base, tmp_path / "peft", ids)
    ours = logits_of(backend, batch)
    with backend.base_only():
        assert (logits_of(backend, batch) - ours).abs().max() > 0.05
    assert (theirs - ours).abs().max() <= 2e-5


@arms
def test_the_adapter_on_disk_is_read_back_exactly(
    tiny_backend,
    tiny_config,
    batch,
    overrides,
    tmp_path,
):
    """Tensors, variant and the scale of every layer are equal."""
    backend = tiny_backend(F32, *overrides, live=True)
    manifest, tensors = backend.adapter(tiny_config(F32, *overrides))
    write_adapter(tmp_path, manifest, tensors)
    read, values = read_adapter(tmp_path)
    assert read == manifest
    for name, module in backend.layers.items():
        assert read.scale_of(name) == module.scaling[ADAPTER]
        assert read.rank_of(name) == module.r[ADAPTER]
    fresh = tiny_backend(F32, *overrides)
    fresh.load_adapter(values)
    assert torch.equal(logits_of(fresh, batch), logits_of(backend, batch))


def test_rslora_scales_by_the_root_of_the_rank(tiny_backend):
    """For alpha 16 and r 4 the scale is 8, and 4 without rsLoRA."""
    scales = {
        variant: {
            module.scaling[ADAPTER]
            for module in tiny_backend(f"lora.variant={variant}", "lora.r=4").layers.values()
        }
        for variant in ("lora", "rslora")
    }
    assert scales == {"lora": {4.0}, "rslora": {8.0}}


def test_patterns_set_ranks_and_alphas_of_single_modules(
    tiny_backend,
):
    """Patterns by group, name and glob apply; other modules keep the defaults."""
    backend = tiny_backend(
        "lora.rank_pattern={qv:8,*.layers.1.self_attn.q_proj:2}",
        "lora.alpha_pattern={down_proj:4}",
    )
    ranks = {name: module.r[ADAPTER] for name, module in backend.layers.items()}
    assert {name: r for name, r in ranks.items() if r != 16} == {
        "l0.q": 8, "l0.v": 8, "l1.q": 2, "l1.v": 8,
    }  # fmt: skip
    scales = {name: module.scaling[ADAPTER] for name, module in backend.layers.items()}
    assert (scales["l0.down"], scales["l1.q"], scales["l0.k"]) == (0.25, 8.0, 1.0)


def test_variants_and_patterns_share_the_draws_of_plain_lora(
    tiny_backend,
):
    """A layer's A depends only on its name, if the shape is the same."""
    reference = tiny_backend().trainable()
    for overrides in (*ARMS.values(), ["lora.variant=dora", "lora.dropout=0"]):
        for name, parameter in tiny_backend(*overrides).trainable().items():
            if name in reference and parameter.shape == reference[name].shape:
                assert torch.equal(parameter, reference[name]), name


# The head.


def reference_gradients(backend, batch):
    """Return the gradients of plain cross entropy over all logits."""
    backend.train()
    backend.zero_grad()
    backend.begin(0)
    logits = backend.head(backend(batch))
    total = torch.nn.functional.cross_entropy(logits, batch.targets_M, reduction="sum")
    total.backward()
    return float(total.detach()), {
        name: p.grad.clone() for name, p in backend.trainable().items() if p.grad is not None
    }


@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
@pytest.mark.parametrize("targets", ["[lm_head]", "[all_linear,lm_head]"])
def test_gradients_of_the_head_are_those_of_full_logits(tiny_backend, batch, targets, chunk):
    """They agree in float32 to 1e-5 of each gradient's size for any chunk size."""
    backend = tiny_backend(F32, f"lora.targets={targets}", "lora.dropout=0", live=True)
    _, expected = reference_gradients(backend, batch)
    found = gradients_of(backend, batch, chunk)
    assert found.keys() == expected.keys()
    assert "lm_head.lora_a" in found
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_an_adapter_on_a_tied_head_leaves_the_embedding_alone(tiny_backend, batch):
    """Hidden states equal the base's, and logits do not."""
    backend = tiny_backend(F32, "lora=lm_head", live=True)
    table = backend.causal_lm.get_input_embeddings().weight
    assert backend.layers["lm_head"].get_base_layer().weight is table
    with torch.no_grad():
        tuned, logits = backend(batch), backend.head(backend(batch))
        with backend.base_only():
            assert torch.equal(backend(batch), tuned)
            assert not torch.equal(backend.head(backend(batch)), logits)
    gradients_of(backend, batch)
    assert table.grad is None


def test_the_manifest_says_that_an_adapted_head_is_tied(tiny_backend, tiny_config):
    """Its key is the embedding's, and merging is warned about; otherwise there is no note."""
    manifest, tensors = tiny_backend("lora=lm_head").adapter(tiny_config("lora=lm_head"))
    assert manifest.base_key_map == {"lm_head": "model.embed_tokens.weight"}
    assert (manifest.mens_exp or {})["tied_head"] is True
    assert {name: v.shape for name, v in tensors.items()} == {
        "lm_head.lora_a": (16, 64),
        "lm_head.lora_b": (320, 16),
    }
    manifest, _ = tiny_backend().adapter(tiny_config())
    assert "tied_head" not in (manifest.mens_exp or {})


def test_dropout_before_the_head_differs_from_chunk_to_chunk(tiny_backend, batch):
    """Equal rows in two chunks get other masks; a repeated micro-batch gets the same ones."""
    backend = tiny_backend(F32, "lora=lm_head", "lora.dropout=0.5", live=True).train()
    hidden = torch.ones(4, 64)
    backend.begin(3)
    first, second = backend.head(hidden), backend.head(hidden)
    backend.begin(3)
    assert not torch.equal(first, second)
    assert torch.equal(backend.head(hidden), first)


# Dropout with DoRA.


def test_dora_drops_elements_of_one_input_for_base_and_update_alike(
    tiny_backend,
):
    """By hand: ``W x + (g - 1) W d(x) + g s B A d(x)``, where g is the ratio of norms.

    This is what DoRA's authors do (arXiv:2402.09353, PEFT's DoraLinearVariant): what the ratio
    changes of the base's output is computed from the dropped input too.
    """
    from mens_exp.quant.bnb import dequantized

    backend = tiny_backend(F32, "lora.variant=dora", "lora.dropout=0.5", live=True).train()
    module, found = backend.layers["l0.q"], backend.trainable()
    with torch.no_grad():
        found["l0.q.lora_magnitude"].mul_(1.2)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    backend.begin(2)
    output = module(x).detach()
    backend.begin(2)
    dropped = module.lora_dropout[ADAPTER](x)
    assert bool((dropped == 0).any())
    W = dequantized(module.get_base_layer().weight)
    update = found["l0.q.lora_b"] @ found["l0.q.lora_a"] * module.scaling[ADAPTER]
    ratio = found["l0.q.lora_magnitude"] / (W + update).norm(dim=1)
    expected = x @ W.T + (ratio - 1) * (dropped @ W.T) + ratio * (dropped @ update.T)
    assert torch.allclose(output, expected, atol=1e-4)


class Products(TorchDispatchMode):
    """Count products of a batch's three tokens with a matrix of the base layer's size."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            left, right = (tuple(one.shape) for one in args[-2:])
            self.count += (left, right) == ((3, 64), (64, 64))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dropout", "times"), [(0, 1), (0.5, 2)])
def test_dora_without_dropout_computes_the_base_once(tiny_backend, dropout, times):
    """With dropout, the base also computes the dropped input.

    PEFT recognizes the first case by its identity module, which must stay in place.
    """
    backend = tiny_backend(F32, "lora.variant=dora", f"lora.dropout={dropout}", live=True).train()
    backend.begin(0)
    layer = backend.layers["l0.q"]
    with Products() as products:
        layer(torch.ones(1, 3, 64))
    assert products.count == times
    assert isinstance(layer.lora_dropout[ADAPTER], torch.nn.Identity) == (dropout == 0)


# PEFT's own message.


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("[attention]", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        ("[mlp,lm_head]", ["down_proj", "gate_proj", "lm_head", "up_proj"]),
        ("['*.layers.1.*.q_proj']", ["model.layers.1.self_attn.q_proj"]),
    ],
)
def test_the_peft_directory_names_modules_as_short_as_can_be(
    tiny_backend, tmp_path, targets, expected
):
    """Last names are used where they suffice, in a fixed order."""
    tiny_backend(f"lora.targets={targets}").write_peft(tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text("utf-8"))
    assert config["target_modules"] == expected


def test_the_peft_directory_carries_variant_and_patterns(tiny_backend, tmp_path):
    """PEFT's own reader needs nothing else."""
    overrides = ["lora.variant=rslora", "lora.rank_pattern={*.1.*.q_proj:2}", "lora=attention"]
    tiny_backend(*overrides).write_peft(tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text("utf-8"))
    assert (config["use_rslora"], config["use_dora"]) == (True, False)
    assert config["rank_pattern"] == {r"model\.layers\.1\.self_attn\.q_proj": 2}
    assert config["r"] == 16
    assert math.isclose(config["lora_alpha"] / math.sqrt(config["r"]), 4)
