from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from mens_exp.config.task import GgufDtype
from mens_exp.errors import MensError
from mens_exp.export.gguf import _kind, write_gguf
from mens_exp.export.gguf_layout import Form, Stored
from mens_exp.export.parity import from_gguf
from mens_exp.model.quiet import quiet

gguf = pytest.importorskip("gguf", reason="gguf is missing: pip install 'mens-exp[gguf]'")
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


def copied(source, target):
    return shutil.copytree(source, target)


def changed(directory, file, **values):
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), encoding="utf-8")
    return directory


def logits_of(directory, ids, **how):
    from transformers import AutoModelForCausalLM

    with quiet(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **how)
        return model(ids).logits


def read_back(file, ids, config=None):
    from transformers import GgufConfig

    how = {} if config is None else {"config": config}
    unpacked = GgufConfig(dequantize=True)
    return logits_of(file.parent, ids, gguf_file=file.name, quantization_config=unpacked, **how)


def header(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def tensors(file):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_read_back_gives_the_same_logits(family, source_of, tmp_path):
    """The reader is transformers' own; it shows names, orientation and the order of q and k."""
    from transformers import AutoConfig

    source = source_of(family)
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f32)
    ids = torch.arange(3, 67).reshape(2, 32)
    if family == "mistral":  # written as Llama, so read as Llama; equal within the window
        config, ids = None, ids[:, :5]
    else:
        config = AutoConfig.from_pretrained(source)
    found = read_back(tmp_path / "m.gguf", ids, config)
    assert (found - logits_of(source, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_header_alone_makes_the_same_model(family, source_of, tmp_path):
    """Without config.json: heads, widths, norms and the rotary base come from the header."""
    source = source_of(family)
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f32)
    ids = torch.arange(3, 35)[None]
    assert (read_back(tmp_path / "m.gguf", ids) - logits_of(source, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("dtype", "most"), [("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 1 / 254 + 2**-11)]
)
def test_matrices_are_rounded_and_vectors_are_not(dtype, most, source_of, tmp_path):
    """Error bounds are relative to each value, for Q8_0 to its block's maximum; norms are exact."""
    source = source_of("llama")
    write_gguf(source, tmp_path / "m.gguf", GgufDtype(dtype))
    found = tensors(tmp_path / "m.gguf")
    kept = load_file(source / "model.safetensors")["model.embed_tokens.weight"].float()
    table = found["token_embd.weight"]
    assert table.tensor_type.name == dtype.upper()
    read = torch.from_numpy(gguf.dequantize(table.data, table.tensor_type).copy())
    scale = kept.abs()
    if dtype == "q8_0":
        scale = scale.view(-1, 32).amax(1, keepdim=True).expand(-1, 32).reshape(kept.shape)
    assert ((read - kept).abs() <= most * scale + 1e-7).all()
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"


def test_a_matrix_that_blocks_do_not_divide_stays_in_f16():
    """A row of 48 is not a multiple of the block size 32; a row of 64 is."""
    for width, kind in ((48, "F16"), (64, "Q8_0")):
        stored = Stored(
            name="x", key="x", shape=(4, width), form=Form.plain, heads=0, is_small=False
        )
        assert _kind(stored, GgufDtype.q8_0).name == kind


def test_the_same_directory_gives_the_same_bytes(source_of, tmp_path):
    """The file contains no time and no path, and its order is fixed."""
    for number in ("1", "2"):
        source = copied(source_of("llama"), tmp_path / f"from{number}")
        write_gguf(source, tmp_path / f"{number}.gguf", GgufDtype.f16)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "2.gguf").read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "1.gguf").read_bytes()


def test_a_window_bounds_the_context(source_of, tmp_path):
    """GGUF's Llama graph has no window; up to the window's length the two models agree."""
    write_gguf(source_of("mistral"), tmp_path / "m.gguf", GgufDtype.f16)
    assert header(tmp_path / "m.gguf")["llama.context_length"] == 5


def test_a_tied_head_is_written_once(source_of, tmp_path):
    """GPT-2's head is tied, tiny Llama's is not."""
    for family, has_head in (("gpt2", False), ("llama", True)):
        write_gguf(source_of(family), tmp_path / "m.gguf", GgufDtype.f32)
        assert ("output.weight" in tensors(tmp_path / "m.gguf")) is has_head


def test_a_tied_model_with_another_head_is_refused(source_of, tmp_path):
    """The library transformers would load the separate head; an identical copy is accepted."""
    source = copied(source_of("llama"), tmp_path / "m")
    changed(source, "config.json", tie_word_embeddings=True)
    with pytest.raises(MensError, match="has an untied head"):
        write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    assert "output.weight" not in tensors(tmp_path / "m.gguf")


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_3_scaling_is_written_as_factors(source_of, tmp_path):
    """By hand: wavelengths below 8192/4 stay, those above 8192 are divided by 8, others blended."""
    source = copied(source_of("llama"), tmp_path / "m")
    changed(source, "config.json", rope_parameters=LLAMA_3)
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f32)
    factors = tensors(tmp_path / "m.gguf")["rope_freqs.weight"].data
    width = 2 * len(factors)
    for index, factor in enumerate(factors):
        wave = 2 * 3.141592653589793 * 500000.0 ** (2 * index / width)
        smooth = (8192 / wave - 1) / 3
        blend = 1 / ((1 - smooth) / 8 + smooth)
        expected = 1.0 if wave < 2048 else 8.0 if wave > 8192 else blend
        assert factor == pytest.approx(expected, rel=1e-4)
    assert {1.0, 8.0} < set(factors.round(3).tolist())


def test_linear_scaling_is_a_value_of_the_header(source_of, tmp_path):
    """The header has the type "linear" and the factor; there is no tensor of factors."""
    source = copied(source_of("llama"), tmp_path / "m")
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    write_gguf(
        changed(source, "config.json", rope_parameters=rope), tmp_path / "m.gguf", GgufDtype.f32
    )
    values = header(tmp_path / "m.gguf")
    assert values["llama.rope.scaling.type"] == "linear"
    assert values["llama.rope.scaling.factor"] == 4.0
    assert "rope_freqs.weight" not in tensors(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("llama", {"model_type": "phi3"}, "models of this family cannot be written as GGUF"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act has no equivalent in GGUF"),
        ("gpt2", {"activation_function": "relu"}, "activation_function has no equivalent in GGUF"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx has no equivalent"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "scaling of the rotary frequencies .* found dynamic",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias has no equivalent in GGUF"),
        ("qwen2", {"rope_parameters": LLAMA_3}, "expected default or linear"),
        ("qwen3", {"rope_parameters": LLAMA_3}, "expected default or linear"),
        ("llama", {"num_hidden_layers": 3}, r"layers\.2\..*found no such tensor"),
        ("llama", {"num_hidden_layers": 1}, "is not a tensor of the model"),
        ("llama", {"num_key_value_heads": 4}, r"k_proj.*weights disagree|weights disagree"),
    ],
)
def test_a_model_that_gguf_cannot_say_is_refused(
    family,
    values,
    said,
    source_of,
    tmp_path,
):
    """The message names the reason, and nothing is written."""
    source = changed(copied(source_of(family), tmp_path / "m"), "config.json", **values)
    with pytest.raises(MensError, match=said):
        write_gguf(source, tmp_path / "out" / "m.gguf", GgufDtype.f16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (float("nan"), "f32", "not finite in F32"),
        (float("inf"), "q8_0", "not finite in Q8_0"),
        (1e5, "f16", r"not finite in F16.*100000.*gguf\.dtype=f32"),
    ],
)
def test_a_weight_beyond_the_type_is_refused(value, dtype, said, source_of, tmp_path):
    """The partial file is removed, and an earlier file stays."""
    source = copied(source_of("llama"), tmp_path / "m")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "m.gguf").write_bytes(b"earlier")
    with pytest.raises(MensError, match=said):
        write_gguf(source, tmp_path / "m.gguf", GgufDtype(dtype))
    assert (tmp_path / "m.gguf").read_bytes() == b"earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.gguf"]


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_smollm2_survives(
    real_texts,
    same_ids,
    smollm2,
    smollm2_cut,
    tmp_path,
    monkeypatch,
    is_whole,
):
    """The default model or a cut of it: logits to 1e-4 in F32, otherwise a KL within rounding."""
    from transformers import AutoConfig

    # transformers builds this table again for every tensor, which takes most of its time
    names = functools.cache(gguf.get_tensor_name_map)
    monkeypatch.setattr(gguf, "get_tensor_name_map", names)
    source = smollm2.directory if is_whole else smollm2_cut
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode("\n\n".join(real_texts(40))).ids[:256]])
    wanted = logits_of(source, ids)
    config = AutoConfig.from_pretrained(source)
    for dtype, most in (("f32", 1e-12), ("bf16", 1e-12), ("f16", 1e-6), ("q8_0", 5e-3)):
        file = tmp_path / f"{dtype}.gguf"
        write_gguf(source, file, GgufDtype(dtype))
        found = read_back(file, ids, config)
        if dtype == "f32":
            assert (found - wanted).abs().max() <= 1e-4
            same_ids(source, file)
        p, q = wanted.log_softmax(-1).double(), found.log_softmax(-1).double()
        kl = (p.exp() * (p - q)).sum(-1)
        print(f"{dtype}: mean KL {kl.mean():.2e}, max {kl.max():.2e}")  # the figures
        assert kl.mean() <= most
        file.unlink()


def test_transformers_parses_a_file_once(source_of, tmp_path, monkeypatch):
    """Transformers asks for its configuration and its weights, and the package is as before."""
    write_gguf(source_of("llama"), tmp_path / "model.gguf", GgufDtype.f32)
    parsed = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path):
            parsed.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    with from_gguf(tmp_path):
        assert len(parsed) == 1
    assert gguf.GGUFReader is Counting
