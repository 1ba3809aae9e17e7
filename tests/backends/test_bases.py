"""The base of the causal graph: unquantized, with other block sizes, with modules left out."""

from __future__ import annotations

import pytest
import torch
from nf4_reference import FP4_LEVELS, NF4_LEVELS, quantize

from mens_exp.data.batch import packed_batch
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.modules import linear_modules
from mens_exp.model.stored_weights import StoredWeights
from mens_exp.planning.memory import base_bits
from mens_exp.quant.bnb import dequantized
from mens_exp.quant.layers import binding_that_holds, quantized_linears, values_of

F32 = "quant.compute_dtype=f32"
WIDE = ["model=random", "model.name=wide", "model.hidden_size=256", "model.intermediate_size=512"]


@pytest.fixture
def batch(random_documents):
    return packed_batch(random_documents([11, 6, 17]), [[0, 1, 2]], index=0)


def logits_of(backend, batch):
    backend.eval()
    with torch.no_grad():
        return backend.head(backend(batch))


def weights_of(backend):
    return StoredWeights(backend.base.directory, backend.shape.family)


def test_an_unquantized_base_is_the_checkpoint(tiny_backend, batch):
    """No layer is quantized; logits of packed documents equal transformers' in float32 to 1e-5."""
    from transformers import AutoModelForCausalLM

    backend = tiny_backend("backend=lora", F32)
    assert quantized_linears(backend.model) == {}
    model = AutoModelForCausalLM.from_pretrained(backend.base.directory, dtype=torch.float32)
    assert batch.documents is not None
    parts = []
    with torch.no_grad():
        for start, end in batch.documents:
            logits = model(input_ids=batch.input_ids_BT[:, start:end]).logits[0]
            inside = [int(i) - start for i in batch.predict_M if start <= i < end]
            parts.append(logits[inside])
    assert torch.allclose(logits_of(backend, batch), torch.cat(parts), atol=1e-5)
    assert backend.facts()["quant"] == "none"


def test_the_adapter_of_an_unquantized_base_says_so(tiny_backend, tiny_config):
    """Its manifest has method lora and base_quant none, unlike qlora and nf4."""
    for overrides, method, quant in (
        (["backend=lora"], "lora", {"base_quant": "none", "double_quant": False}),
        ([], "qlora", {"base_quant": "nf4", "double_quant": True}),
    ):
        manifest, _ = tiny_backend(*overrides).adapter(tiny_config(*overrides))
        assert (manifest.adapter_method, manifest.quant) == (method, quant)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("block", [64, 128, 256])
def test_blocks_are_of_the_size_asked_for(tiny_backend, kind, block):
    """Every layer equals the reference round trip of the published weight at that block size."""
    backend = tiny_backend(*WIDE, F32, f"quant={kind}", f"quant.block_size={block}")
    assert backend.facts()["block_size"] == block
    weights = weights_of(backend)
    levels = {"nf4": NF4_LEVELS, "fp4": FP4_LEVELS}[kind]
    for path, module in quantized_linears(backend.causal_lm).items():
        published = weights.read(path.replace(".base_layer", ""), torch.device("cpu"))
        expected = quantize(published, levels=levels, block_size=block, double_quant=True)
        assert (dequantized(module.weight) - expected.dequantize()).abs().max() <= 1e-6, path


def test_blocks_of_other_sizes_compute_and_learn(tiny_backend, batch):
    """Logits differ from those with blocks of 64, and every matrix gets a gradient."""
    usual = logits_of(tiny_backend(*WIDE, F32), batch)
    backend = tiny_backend(*WIDE, F32, "quant.block_size=256", live=True)
    with backend.base_only():
        assert (logits_of(backend, batch) - usual).abs().max() > 1e-4
    backend.train()
    logits = backend.head(backend(batch))
    torch.nn.functional.cross_entropy(logits, batch.targets_M).backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in backend.trainable().values())


@pytest.mark.parametrize("storage", ["u8", "bf16", "f32"])
def test_codes_are_the_same_whatever_they_lie_in(tiny_backend, batch, storage):
    """quant.storage_dtype does not change the logits."""
    expected = logits_of(tiny_backend(F32), batch)
    backend = tiny_backend(F32, f"quant.storage_dtype={storage}")
    name = {"u8": "uint8", "bf16": "bfloat16", "f32": "float32"}[storage]
    assert backend.facts()["storage_dtype"] == name
    assert torch.equal(logits_of(backend, batch), expected)


def test_modules_left_out_keep_their_weights(tiny_backend):
    """`mlp` and one layer's q_proj equal the checkpoint; all other layers are 4-bit."""
    backend = tiny_backend(F32, "quant.skip=[mlp,'*.layers.1.*.q_proj']")
    quantized = {path.replace(".base_layer", "") for path in quantized_linears(backend.causal_lm)}
    kinds = {(path.split(".")[2], path.rpartition(".")[2]) for path in quantized}
    attention = {(layer, f"{x}_proj") for layer in "01" for x in "qkvo"}
    assert kinds == attention - {("1", "q_proj")}
    weights = weights_of(backend)
    layer = backend.causal_lm.get_submodule("model.layers.1.self_attn.q_proj.base_layer")
    assert torch.equal(
        layer.weight, weights.read("model.layers.1.self_attn.q_proj", layer.weight.device)
    )
    assert read_directory(backend.base.directory).tensors


@pytest.mark.parametrize(
    ("usual", "others", "expected"),
    [
        ("nf4", "{mlp:nf2,down_proj:fp4}", {"q": "nf4", "up": "nf2", "down": "fp4"}),
        ("int4", "{attention:nf4,*.0.mlp.*:nf8}", {"q": "nf4", "l0.up": "nf8", "l1.up": "int4"}),
    ],
)
def test_modules_are_stored_by_the_quantizers_of_their_patterns(
    tiny_backend, usual, others, expected
):
    """4-bit values equal bitsandbytes' on the published weights; others name their quantizer."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    backend = tiny_backend(f"quant={usual}", f"quant.type_pattern={others}")
    layers = quantized_linears(backend.causal_lm)
    for one in linear_modules(backend.shape)[:-1]:
        name = expected.get(one.logical, expected.get(one.kind))
        if name is None:
            continue
        layer = layers.get(one.path) or layers[f"{one.path}.base_layer"]
        found = binding_that_holds(layer).facts(layer)
        assert found["quant"] == name, one.path
        if name in {"nf4", "fp4"}:
            published = weights_of(backend).read(one.path, torch.device("cpu")).to(torch.bfloat16)
            nested = usual == "nf4"
            codes, state = quantize_4bit(
                published, blocksize=64, compress_statistics=nested, quant_type=name
            )
            assert found["double_quant"] is nested
            assert torch.equal(values_of(layer), dequantize_4bit(codes, state).float())
    facts = backend.facts()
    many = facts["quantized_as"]
    assert (sum(many.values()), set(many)) == (14, {usual, *expected.values()})
    assert facts["quant"] == usual


@pytest.mark.parametrize(
    ("told", "expected", "usual", "blocks"),
    [
        (
            ["quant.block_size_pattern={attention:128,*.1.self_attn.q_proj:256}"],
            {"q": ("nf4", 128), "l1.q": ("nf4", 256), "o": ("nf4", 128), "up": ("nf4", 64)},
            ("nf4", 64),
            {"64": 6, "128": 7, "256": 1},
        ),
        (
            ["quant.block_size=128", "quant.block_size_pattern={mlp:64,down_proj:512}"],
            {"q": ("nf4", 128), "gate": ("nf4", 64), "down": ("nf4", 512)},
            ("nf4", 128),
            {"128": 8, "64": 4, "512": 2},
        ),
        (
            ["quant=int4", "quant.block_size_pattern={attention:256}"],
            {"q": ("int4", 256), "up": ("int4", 64)},
            ("int4", 64),
            {"256": 8, "64": 6},
        ),
        (
            [
                *("quant=nvfp4", "quant.type_pattern={mlp:fp4,o_proj:nf8}"),
                "quant.block_size_pattern={down_proj:256,o_proj:128}",
            ],
            {"down": ("fp4", 256), "up": ("fp4", 64), "o": ("nf8", 128), "q": ("nvfp4", 16)},
            ("nvfp4", 16),
            {"16": 6, "128": 2, "64": 4, "256": 2},
        ),
    ],
)
def test_modules_are_stored_in_the_blocks_of_their_patterns(
    tiny_backend, told, expected, usual, blocks
):
    """Values equal the plain quantizer with that block size, and bitsandbytes' for 4 bits."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    backend = tiny_backend(*WIDE, *told)
    layers = quantized_linears(backend.causal_lm)
    whole = {}
    for one in linear_modules(backend.shape)[:-1]:
        if one.logical not in expected and one.kind not in expected:
            continue
        name, block = expected.get(one.logical) or expected[one.kind]
        path = one.path if one.path in layers else f"{one.path}.base_layer"
        found = binding_that_holds(layers[path]).facts(layers[path])
        assert (found["quant"], found["block_size"]) == (name, block), one.path
        if name in {"nf4", "fp4"}:
            published = weights_of(backend).read(one.path, torch.device("cpu")).to(torch.bfloat16)
            codes, state = quantize_4bit(
                published, blocksize=block, compress_statistics=name == "nf4", quant_type=name
            )
            assert torch.equal(values_of(layers[path]), dequantize_4bit(codes, state).float())
        else:
            size = [] if name == "nvfp4" else [f"quant.block_size={block}"]
            if (name, block) not in whole:
                plain = tiny_backend(*WIDE, f"quant={name}", *size)
                whole[name, block] = quantized_linears(plain.causal_lm)
            assert torch.equal(values_of(layers[path]), values_of(whole[name, block][path]))
    facts = backend.facts()
    assert facts["in_blocks_of"] == blocks
    assert (facts["quant"], facts["block_size"]) == usual


def test_the_plan_counts_the_bits_of_every_module_as_it_is_stored(tiny_backend, tiny_config):
    """Codes, scales and full-precision modules are counted to the byte."""
    told = ["quant.double_quant=false", "quant.skip=[q_proj]"]
    told += ["quant.type_pattern={mlp:nf2,down_proj:nf8}"]
    told += ["quant.block_size_pattern={down_proj:128}"]
    backend = tiny_backend(*told)
    kept = weights = 0
    for one in linear_modules(backend.shape)[:-1]:
        layer = backend.causal_lm.get_submodule(one.path)
        layer = getattr(layer, "base_layer", layer)
        kept += sum(tensor.nbytes for tensor in (layer.weight.data, *layer.buffers()))
        kept += (
            layer.weight.quant_state.absmax.nbytes if hasattr(layer.weight, "quant_state") else 0
        )
        weights += one.out * one.width
    config = tiny_config(*told)
    assert base_bits(config.quant, backend.shape) == pytest.approx(8 * kept / weights)


def test_a_mixture_of_quantizers_computes_with_its_dequantized_weights(tiny_backend, batch):
    """Logits equal those of transformers' dense model with the dequantized weights, in float32."""
    from transformers import AutoModelForCausalLM

    backend = tiny_backend("quant.type_pattern={mlp:nf2,down_proj:nf8}", F32)
    model = AutoModelForCausalLM.from_pretrained(backend.base.directory, dtype=torch.float32)
    for path, layer in quantized_linears(backend.causal_lm).items():
        model.get_submodule(path.removesuffix(".base_layer")).weight.data = values_of(layer)
    assert batch.documents is not None
    parts = []
    with torch.no_grad():
        for start, end in batch.documents:
            logits = model(input_ids=batch.input_ids_BT[:, start:end]).logits[0]
            parts.append(logits[[int(i) - start for i in batch.predict_M if start <= i < end]])
    torch.testing.assert_close(logits_of(backend, batch), torch.cat(parts), atol=1e-4, rtol=1e-4)
