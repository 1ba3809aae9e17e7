"""The causal graph on an 8-bit base."""

from __future__ import annotations

import pytest
import torch

from mens_exp.data.batch import packed_batch
from mens_exp.model.quiet import quiet
from mens_exp.quant.bnb import dequantized, quantization_config
from mens_exp.quant.layers import quantized_linears

INT8 = ["quant=int8", "quant.compute_dtype=f32"]


@pytest.fixture
def batch(random_documents):
    return packed_batch(random_documents([38], [37]), [[0]], index=0)


def logits_of(backend, batch):
    backend.eval()
    with torch.no_grad():
        return backend.head(backend(batch))


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gpt2", "tiny_qwen2"])
def test_hidden_states_are_those_of_the_dequantized_weights(tiny_backend, batch, model):
    """The oracle is transformers' float32 model with the dequantized weights: 1e-5 on logits."""
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    backend = tiny_backend(*INT8, f"model={model}")
    plain = AutoModelForCausalLM.from_pretrained(
        backend.base.directory, dtype=torch.float32, attn_implementation="eager"
    )
    layers = quantized_linears(backend.causal_lm)
    assert len(layers) == backend.facts()["quantized_linears"] > 0
    for path, layer in layers.items():
        module = plain.get_submodule(path.replace(".base_layer", ""))
        weight_OI = dequantized(layer.weight)
        module.weight.data = weight_OI.T if isinstance(module, Conv1D) else weight_OI
    with torch.no_grad():
        expected = plain.eval()(input_ids=batch.input_ids_BT[:, :38]).logits[0, batch.predict_M]
    assert (logits_of(backend, batch) - expected).abs().max() <= 1e-5


def test_the_peft_view_is_what_peft_loads(
    tiny_backend,
    tiny_base,
    tiny_config,
    batch,
    tmp_path,
):
    """The logits agree to 1e-5; those of the trained graph differ more."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    backend = tiny_backend(*INT8, live=True)
    backend.write_peft(tmp_path / "peft")
    with quiet():
        base = AutoModelForCausalLM.from_pretrained(
            tiny_base.directory,
            dtype=torch.float32,
            quantization_config=quantization_config(tiny_config(*INT8).quant),
            attn_implementation="eager",
        )
        theirs = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
        with torch.no_grad():
            ids = batch.input_ids_BT[:, :38]
            expected = theirs(input_ids=ids, use_cache=False).logits[0, batch.predict_M]
    assert not backend.peft_view_is_exact
    with backend.as_peft_view():
        assert (logits_of(backend, batch) - expected).abs().max() <= 1e-5
    assert (logits_of(backend, batch) - expected).abs().max() > 1e-4


def test_the_manifest_names_the_base(tiny_backend, tiny_config):
    """The manifest has method qlora, base int8 and no double quantization."""
    manifest, _ = tiny_backend(*INT8).adapter(tiny_config(*INT8))
    assert (manifest.adapter_method, manifest.rank) == ("qlora", 16)
    assert manifest.quant == {"base_quant": "int8", "double_quant": False}
    assert manifest.mens_exp is not None
    assert manifest.mens_exp["init"]["doubled_rank"] is False


def test_modules_left_out_keep_their_weights(tiny_backend):
    """`mlp` and the head equal the checkpoint, and attention is 8-bit."""
    backend = tiny_backend(*INT8, "quant.skip=[mlp]")
    kinds = {path.split(".")[3] for path in quantized_linears(backend.causal_lm)}
    assert kinds == {"self_attn"}
    assert backend.causal_lm.lm_head.weight.dtype == torch.float32


def test_dora_learns_on_it(tiny_backend, batch):
    """With B = 0 its magnitudes are those of the dequantized weights: base logits to 1e-5."""
    base = logits_of(tiny_backend(*INT8), batch)
    backend = tiny_backend(*INT8, "lora.variant=dora", "lora.dropout=0")
    assert (logits_of(backend, batch) - base).abs().max() <= 1e-5
    loss = torch.nn.functional.cross_entropy(backend.train().head(backend(batch)), batch.targets_M)
    loss.backward()
    gradients = {name: p.grad for name, p in backend.trainable().items()}
    assert all(grad is not None for grad in gradients.values())
    assert all(
        float(grad.abs().sum()) > 0
        for name, grad in gradients.items()
        if grad is not None and not name.endswith("lora_a")  # B starts at zero
    )
