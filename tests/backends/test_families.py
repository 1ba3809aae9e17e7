"""The contract of a backend for every model family, compared with transformers and PEFT.

The references attend eagerly, to one document at a time, on a base that transformers has loaded
and quantized by itself.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from families import make_tiny
from safetensors.torch import load_file

from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.families import FAMILIES
from mens_exp.model.quiet import quiet
from mens_exp.objective.causal import CrossEntropy
from mens_exp.quant.bnb import quantization_config
from mens_exp.quant.layers import quantized_linears

families = pytest.mark.parametrize("name", FAMILIES)


def eager(base, config=None):
    """Load the base with transformers alone, in 4 bits if the configuration says so.

    bitsandbytes' own inference kernel for AVX512-BF16 is left out; it computes in bf16.
    """
    from transformers import AutoModelForCausalLM

    quantized = {"quantization_config": quantization_config(config.quant)} if config else {}
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            base.directory, dtype=torch.float32, attn_implementation="eager", **quantized
        )
    for module in quantized_linears(model).values():
        module.support_avx512bf16_for_cpu = False
    return model.eval()


def one_by_one(model, documents):
    """Return the logits at each supervised position, for each document separately."""
    ids = torch.from_numpy(documents.ids).long()
    bounds = documents.offsets.tolist()
    return torch.cat(
        [
            model(input_ids=ids[None, start:end], use_cache=False).logits[0, :-1]
            for start, end in pairwise(bounds)
        ]
    )


def logits_of(backend, batch):
    return backend.head(backend(batch))


def close(ours, theirs, tolerance):
    """Compare with a tolerance relative to the largest logit."""
    assert ours.shape == theirs.shape
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


@families
def test_logits_are_those_of_peft_on_eager_attention(
    name,
    family_backend,
    family_base,
    family_config,
    family_documents,
    packed_documents,
    padded_documents,
    tmp_path,
):
    """Packed and padded, in both modes, logits agree to 1e-5 with PEFT on single documents."""
    from peft import PeftModel

    backend = family_backend(name).eval()
    backend.write_peft(tmp_path / "peft")
    with quiet():
        reference = PeftModel.from_pretrained(
            eager(family_base(name), family_config(name)), tmp_path / "peft"
        ).eval()
    with torch.no_grad():
        expected = one_by_one(reference, family_documents)
        assert close(logits_of(backend, packed_documents), expected, 1e-5)
        assert close(logits_of(backend, padded_documents), expected, 1e-5)
    assert close(logits_of(backend, packed_documents).detach(), expected, 1e-5)


# Families that scale or cap logits, route to experts, or use functional dropout.
OTHERS = {
    "granite": {},
    "granitemoe": {},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {},
    "mixtral": {},
    "opt": {},
    "biogpt": {},
}


@pytest.fixture(scope="session")
def other_backend(tmp_path_factory, tiny_config):
    """Build the LoRA graph of another family with an unquantized base in float32."""
    from mens_exp.backends.lora import LoraBackend
    from mens_exp.config.model import HfModel
    from mens_exp.model.sources import resolve

    def built(name):
        place = tmp_path_factory.mktemp(name)
        base = HfModel(id=str(make_tiny(name, place / "model", **OTHERS[name])))
        overrides = ("quant=none", "quant.compute_dtype=f32", "backend=lora")
        config = tiny_config(*overrides, "lora.targets=[q_proj,v_proj]")
        config.model = base
        return LoraBackend(config, resolve(base, place), torch.device("cpu"))

    return built


@pytest.mark.parametrize("name", OTHERS)
def test_loss_and_answers_are_those_of_transformers(
    name, other_backend, family_documents, packed_documents
):
    """The oracles are `forward(labels=...)` on single documents, and `generate`."""
    backend = other_backend(name).train()
    reference = eager(backend.base)
    ids = torch.from_numpy(family_documents.ids).long()
    bounds = [(a, b) for a, b in pairwise(family_documents.offsets.tolist()) if b - a > 1]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 319, "pad_token_id": 0}
    with torch.no_grad():
        ours = CrossEntropy("test", 16)(
            backend(packed_documents), packed_documents.targets_M, backend.head
        )
        theirs = sum(
            reference(input_ids=ids[None, a:b], labels=ids[None, a:b]).loss * (b - a - 1)
            for a, b in bounds
        )
        answer = reference.generate(input_ids=ids[None, :6], **options)[0, 6:]
    assert float(ours.total) == pytest.approx(float(theirs), rel=1e-5)
    pending, cache, made = ids[:6].tolist(), None, []
    for _ in range(8):
        logits_V, cache = backend.next_logits(pending, cache)
        pending = [int(logits_V.argmax())]
        made += pending
    assert made[: len(answer)] == answer.tolist()


@families
def test_a_fresh_adapter_is_the_base(
    name,
    family_backend,
    family_base,
    family_config,
    family_documents,
    packed_documents,
):
    """With B = 0 the logits equal those of the quantized base loaded by transformers."""
    backend = family_backend(name, live=False).eval()
    with torch.no_grad():
        expected = one_by_one(eager(family_base(name), family_config(name)), family_documents)
        fresh = logits_of(backend, packed_documents)
        with backend.base_only():
            assert torch.equal(logits_of(backend, packed_documents), fresh)
    assert close(fresh, expected, 1e-5)


@families
def test_the_adapter_adds_b_times_a_to_the_checkpoint_s_own_weights(
    name,
    family_backend,
    family_base,
    family_config,
    family_documents,
    packed_documents,
):
    """Dequantized weights plus s·BA, under the checkpoint keys of the manifest, are the same model.

    Which holds only where names, keys and the orientation of transposed checkpoints are right.
    """
    from bitsandbytes.functional import dequantize_4bit

    backend, base = family_backend(name).eval(), family_base(name)
    manifest, tensors = backend.adapter(family_config(name))
    plain = eager(base)
    weights = plain.state_dict()
    for logical, key in manifest.base_key_map.items():
        layer = backend.layers[logical].base_layer
        restored = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        a, b = (torch.from_numpy(tensors[f"{logical}.lora_{x}"]) for x in "ab")
        merged = restored + b @ a * manifest.alpha / manifest.rank
        weights[key].copy_(merged.T if FAMILIES[name].transposed else merged)
    with torch.no_grad():
        assert close(
            logits_of(backend, packed_documents), one_by_one(plain, family_documents), 2e-5
        )


@families
def test_quantized_weights_are_the_checkpoint_s_in_four_bits(name, family_backend, family_base):
    """Each projection is within a tenth of its weights' norm, in the checkpoint's orientation.

    NF4's error on normal weights is 9.2 %; a transposed or misread block would be over 100 %.
    """
    from bitsandbytes.functional import dequantize_4bit

    backend, base = family_backend(name), family_base(name)
    directory = read_directory(base.directory)
    stored = {}
    for shard in directory.shards:
        stored |= load_file(shard)
    linears = quantized_linears(backend.causal_lm)
    assert len(linears) == 2 * len(FAMILIES[name].projections)
    for path, module in linears.items():
        weight = stored[f"{path.removesuffix('.base_layer')}.weight"]
        expected = weight.T if FAMILIES[name].transposed else weight
        restored = dequantize_4bit(module.weight.data, module.weight.quant_state)
        assert (restored - expected).norm() <= 0.1 * expected.norm(), path


@families
def test_gradients_reach_every_adapter_and_are_those_of_eager_attention(
    name,
    family_backend,
    family_base,
    family_config,
    family_documents,
    packed_documents,
    tmp_path,
):
    """No gradient is zero or missing, and they equal PEFT's up to rounding."""
    from peft import PeftModel

    backend = family_backend(name).train()
    backend.write_peft(tmp_path / "peft")
    with quiet():
        base = eager(family_base(name), family_config(name))
        reference = PeftModel.from_pretrained(base, tmp_path / "peft", is_trainable=True).eval()
    logits_of(backend, packed_documents).logsumexp(-1).sum().backward()
    one_by_one(reference, family_documents).logsumexp(-1).sum().backward()
    theirs = dict(reference.named_modules())
    for one in backend.modules_chosen:
        logical, path = one.logical, f"base_model.model.{one.path}"
        for which in "AB":
            ours = backend.trainable()[f"{logical}.lora_{which.lower()}"].grad
            other = getattr(theirs[path], f"lora_{which}")["default"].weight.grad
            assert ours is not None
            assert ours.abs().max() > 0, logical
            assert (ours - other).norm() <= 1e-4 * other.norm(), logical


@families
def test_logical_names_lead_to_the_checkpoint_and_back(
    name,
    family_backend,
    family_base,
    family_config,
):
    """Every layer has its own key in the header, with the shape of A's inputs by B's outputs."""
    backend = family_backend(name)
    manifest, tensors = backend.adapter(family_config(name))
    header = read_directory(family_base(name).directory).tensors
    keys = manifest.base_key_map
    assert len(set(keys.values())) == len(keys) == 2 * len(FAMILIES[name].projections)
    for logical, key in keys.items():
        shape = (
            tensors[f"{logical}.lora_b"].shape[0],
            tensors[f"{logical}.lora_a"].shape[1],
        )
        assert header[key].shape == (shape[::-1] if FAMILIES[name].transposed else shape), logical


@families
@pytest.mark.parametrize("shared", [0, 20])
def test_prompts_are_continued_as_by_transformers(
    name,
    family_backend,
    family_base,
    family_config,
    shared,
):
    """Greedy ids of two prompts at a time equal those of `generate` for single prompts.

    Answers of other lengths make room for other prompts, one of which comes twice; with a prefix
    that all have, that is read once.
    """
    generator = torch.Generator().manual_seed(1)
    prefix = torch.randint(3, 259, (shared,), generator=generator).tolist()
    prompts = [
        prefix + torch.randint(3, 259, (length,), generator=generator).tolist()
        for length in (4, 13, 1, 9, 30)
    ]
    prompts.insert(2, prompts[1])
    backend = family_backend(name, live=False)
    free = backend.generate(prompts, max_new_tokens=10, end_ids={319}, batch_size=2)
    ends = {319, *free[0][2:3], *free[3][6:7]}
    ours = backend.generate(prompts, max_new_tokens=10, end_ids=ends, batch_size=2)
    assert min(map(len, ours)) < 10
    reference = eager(family_base(name), family_config(name))
    for prompt, completion in zip(prompts, ours, strict=True):
        with torch.no_grad(), quiet():
            ids = reference.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=10,
                do_sample=False,
                eos_token_id=sorted(ends),
                pad_token_id=0,
            )
        assert completion == ids[0, len(prompt) :].tolist()


@families
def test_the_base_drops_nothing_of_its_own(name, family_backend, packed_documents):
    """GPT-2 has dropout in embeddings and residuals, but training mode changes no logit."""
    backend = family_backend(name).eval()
    with torch.no_grad():
        still = logits_of(backend, packed_documents)
        assert torch.equal(logits_of(backend.train(), packed_documents), still)


def test_gemma_caps_both_scores_and_logits(family_backend, packed_documents):
    """Control: without either cap the logits differ, so the comparisons above can fail."""
    backend = family_backend("gemma2").eval()
    with torch.no_grad():
        capped = logits_of(backend, packed_documents)
        assert capped.abs().max() < 3
        backend.causal_lm.config.final_logit_softcapping = None
        assert logits_of(backend, packed_documents).abs().max() > 3
        backend.causal_lm.config.final_logit_softcapping = 3.0
        for layer in backend.causal_lm.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        assert not close(logits_of(backend, packed_documents), capped, 1e-2)


@pytest.mark.parametrize("name", ["mistral", "phi3", "gemma2"])
def test_windows_are_shorter_than_the_documents(name, family_backend, packed_documents):
    """Control: without the window the logits differ, so the comparisons above can fail."""
    backend = family_backend(name).eval()
    with torch.no_grad():
        windowed = logits_of(backend, packed_documents)
        backend.causal_lm.config.sliding_window = None
        for layer in backend.causal_lm.model.layers:
            layer.self_attn.sliding_window = None
        assert not close(logits_of(backend, packed_documents), windowed, 1e-2)
