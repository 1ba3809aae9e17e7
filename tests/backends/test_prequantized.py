"""Quantized checkpoints, compared with transformers, bitsandbytes and arithmetic.

The layers of tests/model/published, written by other packages, make small models; the same model
of these packages' values, loaded by transformers, is the reference.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.model import HfModel
from mens_exp.errors import ModelFileError
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.prequantized import format_of
from mens_exp.layout.shape import stored_layers
from mens_exp.model.quiet import quiet
from mens_exp.model.sources import resolve, write_byte_level_tokenizer
from mens_exp.planning.checks.model import check_model
from mens_exp.planning.estimate import make_plan
from mens_exp.planning.memory import base_bits
from mens_exp.quant.layers import parameter_count, quantization_facts, quantized_linears
from mens_exp.training.build import build_backend

PUBLISHED = Path(__file__).parents[1] / "model" / "published"
FILES = sorted(path.stem for path in PUBLISHED.glob("*.safetensors"))
AS_ASKED = ("merge.any_base=true", "out=other")
IDS = torch.arange(5, 45)[None]


def published(name):
    with safe_open(PUBLISHED / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in list(file.keys())}
        return json.loads(file.metadata()["quantization_config"]), tensors


def plain(place, weight_OI=None):
    """Save a small Llama whose projections are all 64 by 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=512, max_position_embeddings=256, **sizes, **heads)
    )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and weight_OI is not None:
            module.weight.data = weight_OI.clone()
    with quiet():
        model.save_pretrained(place)
    write_byte_level_tokenizer(place)
    return place


def coded(dense, place, config, tensors):
    """Copy a model, replacing every projection by the tensors of a quantized layer."""
    shutil.copytree(dense, place)
    state = load_file(place / "model.safetensors")
    for key in [key for key in state if key.endswith("_proj.weight")]:
        path = key.removesuffix(".weight")
        del state[key]
        state |= {f"{path}.{suffix}": one.clone() for suffix, one in tensors.items()}
    save_file(state, place / "model.safetensors", {"format": "pt"})
    described = json.loads((place / "config.json").read_text("utf-8"))
    described["quantization_config"] = config
    (place / "config.json").write_text(json.dumps(described), "utf-8")
    return place


@pytest.fixture
def pair(tmp_path):
    """Return a quantized model and the same model with plain weights."""

    def made(name):
        config, tensors = published(name)
        dense = plain(tmp_path / "dense", tensors.pop("expected"))
        return coded(dense, tmp_path / name, config, tensors), dense

    return made


def configured(tiny_config, place, *more):
    config = tiny_config(
        "quant=prequantized", "quant.compute_dtype=f32", "lora.dropout=0", "data.seq_len=128", *more
    )
    config.model = HfModel(id=str(place))
    return config


def graph(config, tmp_path):
    base = resolve(config.model, tmp_path)
    return build_backend(config, base).eval()


def logits(model):
    with torch.no_grad(), quiet():
        return model(input_ids=IDS, use_cache=False).logits


def of_transformers(place, **options):
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
        return logits(model.eval())


def close(ours, theirs, tolerance=2e-6):
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


@pytest.mark.parametrize("name", FILES)
def test_a_model_of_codes_computes_what_the_same_plain_weights_do(
    name, pair, tiny_config, tmp_path
):
    place, dense = pair(name)
    backend = graph(configured(tiny_config, place), tmp_path)
    layers = quantized_linears(backend.causal_lm)
    assert len(layers) == 14
    assert close(logits(backend.causal_lm), of_transformers(dense))
    assert {layer.weight.dtype for layer in layers.values()} == {torch.uint8}
    facts = quantization_facts(backend.causal_lm)
    assert (facts["quant"], facts["quantized_linears"]) == ("prequantized", 14)
    plain = 2 * 512 * 64 + 5 * 64  # embedding, head and norms
    adapters = sum(one.numel() for one in backend.trainable().values())
    assert parameter_count(backend.causal_lm) == 14 * 64 * 64 + plain + adapters
    kept = sum(layer.weight.nbytes + layer.scale_bytes.nbytes for layer in layers.values())
    config = configured(tiny_config, place)
    assert base_bits(config.quant, backend.shape) == 8 * kept / (14 * 64 * 64)


@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_that_transformers_saved_are_what_it_loads(nested, tiny_config, tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    asked = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )
    place = plain(tmp_path / "dense")
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(place, quantization_config=asked)
        model.save_pretrained(tmp_path / "saved")
    write_byte_level_tokenizer(tmp_path / "saved")
    theirs = of_transformers(tmp_path / "saved")
    backend = graph(configured(tiny_config, tmp_path / "saved"), tmp_path)
    assert len(quantized_linears(backend.causal_lm)) == 14
    # On some processors bitsandbytes' evaluation kernel computes in bf16.
    assert close(logits(backend.causal_lm), theirs, 0.02)
    again = graph(
        configured(tiny_config, place, "quant=nf4", f"quant.double_quant={nested}".lower()),
        tmp_path,
    )
    assert close(logits(backend.causal_lm), logits(again.causal_lm), 1e-5)


def test_fp8_by_blocks_is_what_transformers_dequantizes(tiny_config, tmp_path):
    from transformers import FineGrainedFP8Config

    generator = torch.Generator().manual_seed(5)
    dense = plain(tmp_path / "dense")
    tensors = {
        "weight": (torch.randn(64, 64, generator=generator)).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.rand(2, 2, generator=generator) * 0.1,
    }
    config = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    place = coded(dense, tmp_path / "fp8", config, tensors)
    theirs = of_transformers(
        place, quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 32))
    )
    backend = graph(configured(tiny_config, place), tmp_path)
    assert close(logits(backend.causal_lm), theirs)


def test_layers_that_were_published_unquantized_stay_plain(pair, tiny_config, tmp_path):
    place, dense = pair("awq")
    state = load_file(place / "model.safetensors")
    whole = load_file(dense / "model.safetensors")
    path = "model.layers.0.mlp.down_proj"
    for suffix in ("qweight", "qzeros", "scales"):
        del state[f"{path}.{suffix}"]
    state[f"{path}.weight"] = whole[f"{path}.weight"]
    save_file(state, place / "model.safetensors", {"format": "pt"})
    backend = graph(configured(tiny_config, place), tmp_path)
    assert len(quantized_linears(backend.causal_lm)) == 13
    assert close(logits(backend.causal_lm), of_transformers(dense))
    manifest, _ = backend.adapter(configured(tiny_config, place))
    assert manifest.quantizer["skip"] == [path]
    assert manifest.base_key_map["l0.q"] == "model.layers.0.self_attn.q_proj.weight"


def changed(place, edit, **config):
    """Change the tensors and the quantization settings of a saved model in place."""
    state = load_file(place / "model.safetensors")
    edit(state)
    save_file(state, place / "model.safetensors", {"format": "pt"})
    described = json.loads((place / "config.json").read_text("utf-8"))
    described["quantization_config"] |= config
    (place / "config.json").write_text(json.dumps(described), "utf-8")
    return place


def test_a_layer_that_lost_its_scales_is_refused_by_name(pair, tiny_config):
    """Its codes would be mistaken for weights."""
    place, _ = pair("fp8_tensor")
    path = "model.layers.1.mlp.up_proj"
    changed(place, lambda state: state.pop(f"{path}.weight_scale"))
    (problem,) = check_model(configured(tiny_config, place))
    assert f"no {path}.weight_scale" in str(problem)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_four_bits_that_are_stored_as_floats_are_read(storage, tiny_config, tmp_path):
    """`bnb_4bit_quant_storage` stores 4-bit codes as floats for sharding."""
    from bitsandbytes import functional

    values_OI = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) * 0.1
    codes, state = functional.quantize_4bit(values_OI, quant_type="nf4", quant_storage=storage)
    tensors = {"weight": codes}
    tensors |= {f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}  # in older files
    config["bnb_4bit_quant_storage"] = str(storage).removeprefix("torch.")
    shapes = {f"a.{name}": tuple(one.shape) for name, one in tensors.items()}
    stored = format_of({"quantization_config": config}, "a model")
    assert stored.layers(shapes, "a model", lambda _: None) == {"a": (64 * 64,)}  # before download
    place = coded(plain(tmp_path / "dense"), tmp_path / "coded", config, tensors)
    backend = graph(configured(tiny_config, place), tmp_path)
    (layer, *_) = quantized_linears(backend.causal_lm).values()
    assert torch.equal(layer.dequantized(), functional.dequantize_4bit(codes, state))


def test_codes_of_transposed_weights_are_refused(tiny_config, tmp_path):
    """GPT-2's are transposed; if square, they would be merged without an error."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 512}
    with quiet():
        GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "dense")
    write_byte_level_tokenizer(tmp_path / "dense")
    config, tensors = published("gptq")
    del tensors["expected"]
    place = coded(tmp_path / "dense", tmp_path / "gptq", config, tensors)
    (problem,) = check_model(configured(tiny_config, place))
    assert "of this family are not supported" in str(problem)
    with pytest.raises(ModelFileError, match="of this family are not supported"):
        stored_layers(read_directory(place))  # as task=merge asks


def test_a_plan_counts_the_file_of_codes(pair, tiny_config, tmp_path):
    """Each 32 weights take 4 bits each, a scale and a zero point; embedding and head are bf16."""
    place, _ = pair("gptq")
    found = make_plan(configured(tiny_config, place), tmp_path)["memory_bytes"]["components"]
    assert found["weights file, mapped"] == 14 * 64 * 64 * (4 + 64 / 32) / 8 + 2 * 2 * 512 * 64


def test_a_damaged_layer_is_refused_by_name(pair, tiny_config, tmp_path):
    place, _ = pair("gptq")
    state = load_file(place / "model.safetensors")
    state["model.layers.1.mlp.up_proj.scales"][0, 0] = torch.inf
    save_file(state, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match="quantized weights are not finite") as refused:
        graph(configured(tiny_config, place), tmp_path)
    assert "model.layers.1.mlp.up_proj" in str(refused.value)


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Run a command on the test's model, and return its run directory."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {n}.", "response": f"It is {n}."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")

    def run(name, *words):
        code = cli.main([*words, "logger=none", f"hydra.run.dir={tmp_path / name}"])
        return code, RunDir(tmp_path / name)

    return run


def trained(typed, name, place, *words):
    usual = ["data=jsonl", "data.path=rows.jsonl", "data.seq_len=64", "trainer=cpu", "suite=none"]
    usual += [
        "trainer.max_steps=4",
        "quant.compute_dtype=f32",
        "optim.lr=1e-2",
        "data.val_frac=0.2",
    ]
    usual += ["lora.dropout=0", "trainer.accumulate_grad_batches=1"]
    return typed(name, "model=hf", f"model.id={place}", *usual, *words)


def test_an_adapter_on_codes_is_trained_merged_and_scored(pair, typed, tmp_path):
    """Scores equal those on plain weights; the merged model is these plus scale · B · A."""
    place, dense = pair("gptq_2_ordered")
    _, run = trained(typed, "coded", place, "quant=prequantized")
    _, other = trained(typed, "plain", dense, "backend=lora")
    found, expected = (Manifest.read(one.manifest).results for one in (run, other))
    for loss in ("base_val_loss", "tuned_val_loss"):
        assert found[loss] == pytest.approx(expected[loss], rel=1e-5)
    assert found["tuned_val_loss"] < found["base_val_loss"]
    typed("merge", "task=merge", "parity.tokens=64", f"path={run.path}", "out=merged")
    merged, tensors = (
        load_file(tmp_path / "merged" / "model.safetensors"),
        load_file(run.adapter / "adapter.safetensors"),
    )
    _, other = typed(
        "other", "task=merge", "parity.tokens=64", f"path={run.path}", f"base={dense}", *AS_ASKED
    )
    assert Manifest.read(other.manifest).results["base_reason"].startswith("unquantized weights")
    _, layer = published("gptq_2_ordered")
    scale = json.loads((run.adapter / "adapter_manifest.json").read_text("utf-8"))
    scale = scale["alpha"] / scale["rank"]
    for key, logical in (("self_attn.q_proj", "q"), ("mlp.down_proj", "down")):
        delta = tensors[f"l1.{logical}.lora_b"] @ tensors[f"l1.{logical}.lora_a"]
        expected = layer["expected"] + scale * delta
        assert torch.allclose(merged[f"model.layers.1.{key}.weight"], expected, atol=1e-6)
    assert not any("qweight" in key or "scales" in key for key in merged)
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())


def test_a_merged_model_has_no_tensor_that_the_model_lacks(pair, typed, tmp_path):
    """GPTQ writers add zero biases, and servers add cache scales."""
    place, dense = pair("gptq")
    keys = list(load_file(dense / "model.safetensors"))
    idle = {f"{key[:-7]}.bias": torch.zeros(64) for key in keys if key.endswith("_proj.weight")}
    idle |= {f"model.layers.0.self_attn.{one}_scale": torch.ones(1) for one in "kv"}
    changed(place, lambda state: state.update(idle))
    _, run = trained(typed, "coded", place, "quant=prequantized")
    typed("merge", "task=merge", "parity.tokens=64", f"path={run.path}", "out=merged")
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(keys)


def test_biases_of_codes_are_kept_and_merged(typed, tmp_path):
    """In Qwen2 the quantized layers have biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=512, **sizes, **heads))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    with quiet():
        model.save_pretrained(tmp_path / "dense")
    write_byte_level_tokenizer(tmp_path / "dense")
    config, tensors = published("awq")
    del tensors["expected"]
    place = coded(tmp_path / "dense", tmp_path / "awq", config, tensors)
    _, run = trained(typed, "coded", place, "quant=prequantized")
    typed("merge", "task=merge", "parity.tokens=64", f"path={run.path}", "out=merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    biases = {name: one for name, one in model.state_dict().items() if name.endswith("bias")}
    assert len(biases) == 3
    assert all(torch.equal(merged[name], one) for name, one in biases.items())


@pytest.mark.parametrize(("name", "warns"), [("fp8_block", True), ("gptq", False)])
def test_a_plan_warns_of_activation_quantization(name, warns, pair, tiny_config, tmp_path):
    place, _ = pair(name)
    plan = make_plan(configured(tiny_config, place), tmp_path)
    assert any("activation quantization" in one for one in plan["warnings"]) is warns


def test_a_refused_base_names_its_reason(pair, typed, capsys):
    place, dense = pair("gptq")
    state = load_file(place / "model.safetensors")
    state |= {f"lm_head.{name}": one for name, one in published("gptq")[1].items()}
    headed = Path(shutil.copytree(place, place.with_name("headed")))
    save_file(state, headed / "model.safetensors", {"format": "pt"})
    untold = Path(shutil.copytree(place, place.with_name("untold")))
    shutil.copy(dense / "config.json", untold / "config.json")
    refusals = {
        (headed, "quant=prequantized"): "found     lm_head.weight",
        (place, "quant=nf4"): "choose quant=prequantized, which keeps their codes",
        (dense, "quant=prequantized"): "config.json has no quantization_config",
        (
            place,
            "quant=prequantized objective=distillation",
        ): "this checkpoint was published quantized",
        (place, "quant=prequantized backend=lora"): "backend=lora has no quantized base",
        (untold, "quant=prequantized"): "put what its quantize_config.json (GPTQ)",
    }
    for number, ((model, words), reason) in enumerate(refusals.items()):
        code, _ = trained(typed, f"refused_{number}", model, *words.split())
        assert code == 2
        assert reason in capsys.readouterr().err
