"""PiSSA and LoftQ on a 4-bit tiny_llama: initialization, the plain base, and the artifact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning import Trainer

from mens_exp.artifacts.adapter_v3 import read_adapter, write_adapter
from mens_exp.backends.lora import ADAPTER
from mens_exp.backends.qlora import QloraBackend
from mens_exp.data.batch import packed_batch
from mens_exp.model import sources
from mens_exp.model.quiet import quiet
from mens_exp.model.sources import BaseModel
from mens_exp.objective.causal import CrossEntropy
from mens_exp.quant.bnb import dequantized, quantization_config
from mens_exp.quant.layers import keep_trainable
from mens_exp.training.module import TrainingModule

F32 = "quant.compute_dtype=f32"
LOFTQ = ["lora.init=loftq"]
RESIDUAL = {
    "pissa": ["lora.init=pissa"],
    "loftq, three rounds": ["lora.init=loftq", "lora.loftq_iters=3"],
    "pissa, rslora": ["lora.init=pissa", "lora.variant=rslora", "lora.r=5"],
    "pissa, dora": ["lora.init=pissa", "lora.variant=dora"],
    "pissa, patterns": [
        "lora.init=pissa",
        "lora.rank_pattern={mlp:3}",
        "lora.alpha_pattern={qv:5}",
    ],
    "pissa, fp4": ["lora.init=pissa", "quant=fp4", "quant.double_quant=false"],
}
EXACT = {
    "loftq": LOFTQ,
    "loftq, rslora": [*LOFTQ, "lora.variant=rslora", "lora.r=5"],
    "loftq, dora": [*LOFTQ, "lora.variant=dora"],
}
residual = pytest.mark.parametrize("overrides", RESIDUAL.values(), ids=RESIDUAL.keys())
exact = pytest.mark.parametrize("overrides", EXACT.values(), ids=EXACT.keys())
both = pytest.mark.parametrize(
    "overrides", [*RESIDUAL.values(), *EXACT.values()], ids=[*RESIDUAL, *EXACT]
)
IDS = list(range(3, 40))


@pytest.fixture
def batch(documents_of):
    return packed_batch(documents_of([IDS], [[0] + [1] * 36]), [[0]], index=0)


def logits_of(backend, batch):
    backend.eval()
    with torch.no_grad():
        return backend.head(backend(batch))


def moved(backend):
    """Change every trained parameter a little, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in backend.trainable().values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.2 * parameter.std() * noise)
    return backend


def of_the_libraries(config, base, *, quantized=True):
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            base.directory,
            dtype=torch.float32,
            attn_implementation="eager",
            **({"quantization_config": quantization_config(config.quant)} if quantized else {}),
        )
    keep_trainable(model)
    return model.eval()


def plain_logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, :-1]


@both
def test_the_start_is_nearer_to_the_unquantized_model(
    tiny_backend,
    tiny_base,
    tiny_config,
    overrides,
    batch,
):
    """Its logits and the weights of every layer are closer, by the recorded measure."""
    backend = tiny_backend(F32, *overrides)
    unquantized = of_the_libraries(tiny_config(F32), tiny_base, quantized=False)
    target = plain_logits(unquantized)
    with backend.base_only():
        before = (logits_of(backend, batch) - target).norm()
    assert (logits_of(backend, batch) - target).norm() < 0.95 * before
    errors = backend.quantization_errors()
    assert errors.keys() == backend.layers.keys()
    assert all(after < before for before, after in errors.values())
    W = unquantized.model.layers[1].mlp.up_proj.weight.detach()
    module, found = backend.layers["l1.up"], backend.trainable()
    update = module.scaling[ADAPTER] * found["l1.up.lora_b"] @ found["l1.up.lora_a"]
    seen = dequantized(module.get_base_layer().weight) + update
    assert errors["l1.up"][1] == pytest.approx(
        float((W - seen).detach().norm() / W.norm()), rel=1e-4
    )
    with backend.base_only():
        plain = dequantized(module.get_base_layer().weight)
    assert errors["l1.up"][0] == pytest.approx(float((W - plain).norm() / W.norm()), rel=1e-4)


def test_facts_say_what_the_start_did(tiny_backend):
    """They have the mean over layers, the worst layer, and the time."""
    backend = tiny_backend("lora.init=pissa")
    facts, errors = backend.facts(), backend.quantization_errors()
    assert facts["lora_init"] == "pissa"
    assert facts["quantization_error_before"] == pytest.approx(
        np.mean([before for before, _ in errors.values()])
    )
    assert facts["quantization_error_after"] == pytest.approx(
        np.mean([after for _, after in errors.values()])
    )
    assert facts["quantization_error_worst"] == max(after for _, after in errors.values())
    assert facts["init_s"] >= 0
    assert tiny_backend().quantization_errors() == {}


@both
def test_without_the_adapter_it_is_the_plain_base_again(
    tiny_backend,
    tiny_base,
    tiny_config,
    batch,
    overrides,
):
    """With the adapter off it equals transformers' own 4-bit model, and switches back."""
    backend = tiny_backend(F32, *overrides)
    tuned = logits_of(backend, batch)
    with backend.base_only():
        found = logits_of(backend, batch)
    config = tiny_config(F32, *overrides)
    assert (found - plain_logits(of_the_libraries(config, tiny_base))).abs().max() <= 1e-5
    assert torch.equal(logits_of(backend, batch), tuned)


@both
def test_equal_configurations_start_from_equal_bits(tiny_backend, batch, overrides):
    """The start depends only on the weights, not on the seed or earlier draws."""
    first = tiny_backend(*overrides)
    torch.rand(7)
    second = tiny_backend(*overrides, "seed=9")
    ours, theirs = first.trainable(), second.trainable()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(logits_of(first, batch), logits_of(second, batch))


@both
def test_every_part_learns_and_the_base_does_not(tiny_backend, batch, overrides):
    """At the first step B is not zero, so A has a gradient."""
    backend = tiny_backend(*overrides).train()
    backend.begin(0)
    CrossEntropy("causal", 4)(backend(batch), batch.targets_M, backend.head).total.backward()
    found = {name: p.grad for name, p in backend.trainable().items()}
    assert all(g is not None and bool(g.abs().sum() > 0) for g in found.values())
    ours = {id(p) for p in backend.trainable().values()}
    assert all(
        p.grad is None and not p.requires_grad for p in backend.parameters() if id(p) not in ours
    )


@both
def test_an_adapter_on_disk_gives_the_same_logits_in_a_fresh_graph(
    tiny_backend,
    tiny_config,
    batch,
    overrides,
    tmp_path,
):
    """No bit differs, and the scale of every layer is read back."""
    backend = moved(tiny_backend(*overrides))
    manifest, tensors = backend.adapter(tiny_config(*overrides))
    write_adapter(tmp_path, manifest, tensors)
    read, values = read_adapter(tmp_path)
    assert read == manifest
    for name, module in backend.layers.items():
        assert read.scale_of(name) == pytest.approx(module.scaling[ADAPTER], rel=1e-12)
    fresh = tiny_backend(*overrides)
    fresh.load_adapter(values)
    assert torch.equal(logits_of(fresh, batch), logits_of(backend, batch))


@residual
def test_the_base_is_rebuilt_from_the_adapter_not_from_a_new_decomposition(
    tiny_backend,
    tiny_config,
    batch,
    overrides,
    monkeypatch,
):
    """Loading works even if another machine's decomposition is off by a twentieth."""
    from mens_exp.backends import adapters

    backend = moved(tiny_backend(*overrides))
    _, tensors = backend.adapter(tiny_config(*overrides))
    expected = logits_of(backend, batch)
    ours = adapters.initialization_of

    class Other:
        def __init__(self, spec):
            self.spec = spec

        def start(self, site, lora):
            found = ours(self.spec).start(site, lora)
            pair = (found.taken[0] * 1.05, found.taken[1])
            return type(found)(pair=found.pair, taken=pair)

    monkeypatch.setattr(adapters, "initialization_of", Other)
    fresh = tiny_backend(*overrides)
    assert not torch.equal(logits_of(fresh, batch), logits_of(tiny_backend(), batch))
    state = backend.start_state()
    fresh.load_adapter(tensors)
    assert torch.equal(logits_of(fresh, batch), expected)
    resumed = tiny_backend(*overrides)
    resumed.load_start_state(state)
    with torch.no_grad():
        for name, parameter in resumed.trainable().items():
            parameter.copy_(backend.trainable()[name])
    assert torch.equal(logits_of(resumed, batch), expected)


@both
def test_peft_on_the_plain_base_is_what_the_view_says_it_is(
    tiny_backend,
    tiny_base,
    tiny_config,
    batch,
    overrides,
    tmp_path,
):
    """PEFT gives the logits of as_peft_view, and those of the trained graph if it is exact."""
    from peft import PeftModel

    backend = moved(tiny_backend(F32, *overrides))
    backend.write_peft(tmp_path / "peft")
    base = of_the_libraries(tiny_config(F32, *overrides), tiny_base)
    theirs = plain_logits(PeftModel.from_pretrained(base, tmp_path / "peft").eval())
    tuned = logits_of(backend, batch)
    with backend.as_peft_view():
        view = logits_of(backend, batch)
    assert (theirs - view).abs().max() <= 2e-5
    assert torch.equal(logits_of(backend, batch), tuned)
    assert backend.peft_view_is_exact is (overrides in EXACT.values())
    assert torch.equal(view, tuned) is backend.peft_view_is_exact


@residual
def test_an_untouched_start_is_no_change_of_the_published_model(
    tiny_backend,
    tiny_config,
    overrides,
):
    """Before training PiSSA's delta B A - B0 A0 is zero; LoftQ's is what its last round added."""
    backend = tiny_backend(*overrides)
    manifest, tensors = backend.adapter(tiny_config(*overrides))
    assert (manifest.mens_exp or {})["init"]["doubled_rank"] is True
    for name, module in backend.layers.items():
        r = module.r[ADAPTER]
        a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        assert (a.shape[0], b.shape[1]) == (2 * r, 2 * r)
        if "lora.init=pissa" in overrides:
            assert np.abs(b @ a).max() < 1e-6
        else:
            assert np.abs(b @ a).max() < np.abs(b[:, :r] @ a[:r]).max()


@exact
def test_loftq_of_one_round_keeps_its_rank(
    tiny_backend,
    tiny_config,
    overrides,
):
    """The adapter on the plain base is the model, and the manifest says so."""
    manifest, tensors = tiny_backend(*overrides).adapter(tiny_config(*overrides))
    init = (manifest.mens_exp or {})["init"]
    assert (init["name"], init["doubled_rank"], init["loftq_iters"]) == ("loftq", False, 1)
    assert "plainly quantized base" in init["exactness"]
    assert tensors["l0.q.lora_a"].shape[0] == manifest.rank


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_families_with_other_modules_start_nearer_too(tiny_config, tmp_path, family, init):
    """The families include GPT-2's transposed and Phi-3's fused weights, and a square one."""
    base = saved(family, tmp_path)
    config = tiny_config("model=hf", f"model.id={base.directory}", f"lora.init={init}", "lora.r=4")
    backend = QloraBackend(config, base, torch.device("cpu"))
    errors = backend.quantization_errors()
    kinds = {"gpt2": ["qkv", "o", "fc", "proj"], "phi3": ["qkv", "o", "gate_up", "down"]}[family]
    assert list(errors) == [f"l{layer}.{kind}" for layer in (0, 1) for kind in kinds]
    assert all(0.05 < before < 0.12 and after < 0.99 * before for before, after in errors.values())


def saved(family, directory):
    """Save a small random model of a family, as a user would provide it."""
    from transformers import AutoModelForCausalLM, GPT2Config, Phi3Config

    torch.manual_seed(0)
    config = {
        "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=320),
        "phi3": Phi3Config(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=320,
            pad_token_id=0,
        ),
    }[family]
    with quiet():
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    sources.write_byte_level_tokenizer(directory)
    return BaseModel(
        directory=directory, name=family, source="directory", weights_sha256="0" * 64, license=None
    )


@residual
def test_the_view_adds_what_training_changed_of_the_published_weights(tiny_backend, overrides):
    """By hand, ``s (B A - B0 A0)`` is added for each layer, for any ranks and scales."""
    backend = moved(tiny_backend(*overrides))
    taken, found = backend.start_state(), backend.trainable()
    expected = {
        name: module.scaling[ADAPTER]
        * (
            found[f"{name}.lora_b"] @ found[f"{name}.lora_a"]
            - taken[f"{name}.lora_b"] @ taken[f"{name}.lora_a"]
        ).detach()
        for name, module in backend.layers.items()
    }
    with backend.as_peft_view():
        for name, module in backend.layers.items():
            a, b = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
            update = (module.scaling[ADAPTER] * (b @ a)).detach()
            assert (update - expected[name]).norm() <= 1e-4 * expected[name].norm()


def test_the_base_is_asked_inside_of_the_view_and_the_view_goes_on(tiny_backend, batch):
    """Nested, as in objectives that compare with the base, both give their usual logits."""
    backend = moved(tiny_backend("lora.init=pissa"))
    with backend.base_only():
        base = logits_of(backend, batch)
    with backend.as_peft_view():
        view = logits_of(backend, batch)
        with backend.base_only():
            assert torch.equal(logits_of(backend, batch), base)
        assert torch.equal(logits_of(backend, batch), view)
    assert not torch.equal(view, base)


@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_dora_starts_with_the_lengths_of_what_it_starts_from(tiny_backend, init):
    """Magnitudes are those of base plus initial update, so DoRA changes nothing at first."""
    backend = tiny_backend(F32, "lora.variant=dora", f"lora.init={init}")
    found = backend.trainable()
    for name, module in backend.layers.items():
        update = module.scaling[ADAPTER] * found[f"{name}.lora_b"] @ found[f"{name}.lora_a"]
        whole = dequantized(module.get_base_layer().weight) + update.detach()
        expected = whole.double().norm(dim=1).float()
        assert torch.allclose(found[f"{name}.lora_magnitude"].detach(), expected, rtol=1e-5)


def test_a_checkpoint_brings_its_own_base(tiny_backend, tiny_config):
    """The decomposition in the checkpoint is used, even if this machine's differs."""
    config = tiny_config("lora.init=pissa")
    saved_by, loaded_by = (tiny_backend("lora.init=pissa") for _ in range(2))
    objective = CrossEntropy("causal", 4)
    modules = [
        TrainingModule(config, backend, objective, total_steps=1)
        for backend in (saved_by, loaded_by)
    ]
    for module in modules:
        module.trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    checkpoint = {}
    modules[0].on_save_checkpoint(checkpoint)
    other = {name: matrix * 1.05 for name, matrix in saved_by.start_state().items()}
    loaded_by.load_start_state(other)
    base = loaded_by.layers["l0.q"].get_base_layer
    expected = dequantized(saved_by.layers["l0.q"].get_base_layer().weight)
    assert not torch.equal(dequantized(base().weight), expected)
    modules[1].on_load_checkpoint(checkpoint)
    assert torch.equal(dequantized(base().weight), expected)
