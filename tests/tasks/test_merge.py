"""Merged directories loaded by transformers alone, compared with the graph that has the adapter."""

from __future__ import annotations

import functools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mens_exp.artifacts.adapter_v3 import write_adapter
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.model import HfModel
from mens_exp.data.batch import packed_batch
from mens_exp.layout.families import FAMILIES
from mens_exp.model.quiet import quiet
from mens_exp.model.sources import resolve
from mens_exp.quant.bnb import dequantized
from mens_exp.quant.layers import quantized_linears
from mens_exp.tasks.merge import merge as merge_task
from mens_exp.training.build import build_backend

F32 = "quant.compute_dtype=f32"
KINDS = {"lora": ["backend=lora"], "qlora": [], "qlora, one scale": ["quant.double_quant=false"]}
FORMS = {
    "rslora": ["lora.variant=rslora", "lora.r=4"],
    "rslora, more ranks": ["lora.variant=rslora", "lora.rank_pattern={mlp:9}"],
    "ranks and alphas": ["lora.rank_pattern={down_proj:3}", "lora.alpha_pattern={mlp:7}"],
    "dora": ["lora.variant=dora"],
    "pissa": ["lora.init=pissa", "lora.r=4"],
    "lora_ga": ["lora.init=lora_ga", "lora.r=4"],
    "pissa, rslora": ["lora.init=pissa", "lora.r=4", "lora.variant=rslora"],
    "loftq": ["lora.init=loftq", "lora.loftq_iters=2", "lora.r=4"],
    "ia3": ["lora=ia3"],
    "ln_tuning": ["lora=ln_tuning"],
    "loha": ["lora=loha", "lora.alpha=12"],
    "lokr": ["lora=lokr", "lora.r=3", "lora.alpha=12"],
    "adalora": ["lora=adalora", "lora.alpha=24"],
    "vera": ["lora=vera", "lora.r=24"],
    "randlora": ["lora=randlora", "lora.r=24", "lora.alpha=48"],
    "passthrough": ["lora=peft", "lora.config={peft_type:OFT,oft_block_size:16}"],
    "fp4, some left alone": ["quant.quant_type=fp4", "quant.skip=[down_proj,'*.layers.0.*']"],
}
MERGED = [(family, kind) for family in FAMILIES for kind in KINDS]
MERGED += [("llama", form) for form in FORMS]
MERGED += [(family, "ln_tuning") for family in ("gpt2", "gemma3_text", "olmo2")]


def graph_on(directory, config, *, std=0.05):
    """Build a configuration's graph on a model directory, with an adapter that is not zero."""
    config.model = HfModel(id=str(directory))
    graph = build_backend(config, resolve(config.model, directory))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in graph.trainable().items():
        if name.endswith("lora_b"):
            parameter.data.normal_(std=std, generator=generator)
        elif name.endswith("lora_magnitude"):
            parameter.data.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=generator))
        elif name.endswith(
            (
                *("ia3_l", "ln_tuning", "hada_w2_b", "lokr_w1", "adalora_e"),
                *("vera_lambda_b", "randlora_lambda", "oft_r_weight"),
            )
        ):
            parameter.data.add_(0.1 * torch.rand(parameter.shape, generator=generator))
    return graph.eval()


def written(graph, config, directory):
    write_adapter(directory, *graph.adapter(config))
    return directory


@pytest.fixture(scope="module")
def merge(tiny_config, rows_file):
    """Merge without the command line, which test_merge_command tests."""

    def merged(adapter, base, out, *overrides):
        text = ["data=jsonl", f"data.path={rows_file}", "parity.tokens=64"]
        config = tiny_config("task=merge", *text, *overrides)
        config.path, config.base, config.out = str(adapter), str(base), str(out)
        record = RunDir(out.with_name(f"{out.name}_record"))
        record.path.mkdir()
        run = SimpleNamespace(dir=record, manifest=SimpleNamespace(inputs={}, results={}))
        merge_task(config, run)
        assert run.manifest.results["parity"] == "within the budget"
        return run.manifest.results

    return merged


def loaded(directory, **how):
    """Load a model as any user would; no key may be missing or unexpected."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model, told = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", output_loading_info=True, **how
        )
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.fixture
def document(random_documents):
    return random_documents([24], [23])


def largest_difference(graph, model, document):
    with torch.no_grad():
        ours = graph.head(graph(packed_batch(document, [[0]], index=0)))
        ids = torch.from_numpy(document.ids).long()[None]
        theirs = model(input_ids=ids, use_cache=False).logits[0, :-1]
    assert ours.std() > 0.1
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize(("name", "form"), MERGED)
def test_the_merged_model_is_the_trained_one(
    name,
    form,
    family_base,
    tiny_config,
    document,
    merge,
    tmp_path,
):
    """Fused, transposed, gated, capped or windowed: logits agree within 1e-4 in f32.

    In every form, onto the base it was trained on, less what its start took out of that base.
    """
    base = family_base(name).directory
    config = tiny_config(F32, *(KINDS | FORMS)[form])
    graph = graph_on(base, config)
    made = merge(written(graph, config, tmp_path / "adapter"), base, tmp_path / "merged")
    assert made["base"] == ("original" if form == "lora" else "dequantized")
    assert largest_difference(graph, loaded(tmp_path / "merged"), document) <= 1e-4


@pytest.mark.parametrize("mode", ["full", "subset"])
def test_weights_and_biases_of_norms_are_merged_and_compared_one_by_one(
    mode, family_base, tiny_config, merge, tmp_path
):
    """Every model of the certificate is the trained one, and a subset has the tuned values."""
    base = family_base("gpt2").directory
    config = tiny_config(F32, "backend=lora", "lora=ln_tuning")
    graph = graph_on(base, config)
    out = tmp_path / "merged"
    made = merge(written(graph, config, tmp_path / "adapter"), base, out, f"merge.mode={mode}")
    certificate = json.loads(RunDir(tmp_path / "merged_record").parity.read_text("utf-8"))
    compared = certificate["comparisons"]
    assert set(compared) == ({"written", "original_merged"} if mode == "full" else {"written"})
    assert all(one["max_kl"] < 1e-9 for one in compared.values())
    held = load_file(out if mode == "subset" else out / "model.safetensors")
    for one in graph.modules_chosen:
        tuned = graph.layers[one.logical].ln_tuning
        assert torch.equal(held[made["merged_keys"][one.logical]], tuned)
    if mode == "subset":
        assert len(held) == len(graph.modules_chosen) == 10


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_peft_merges_the_same_into_the_unquantized_base(
    name,
    variant,
    family_base,
    tiny_config,
    merge,
    tmp_path,
):
    """PEFT's merge_and_unload gives the same weights, DoRA's magnitudes included."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = family_base(name).directory
    config = tiny_config(F32, "backend=lora", f"lora.variant={variant}")
    graph = graph_on(base, config)
    graph.write_peft(tmp_path / "peft")
    merge(written(graph, config, tmp_path / "adapter"), base, tmp_path / "merged")
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        theirs = PeftModel.from_pretrained(plain, tmp_path / "peft").merge_and_unload()
    ours = loaded(tmp_path / "merged").state_dict()
    assert ours.keys() == theirs.state_dict().keys()
    for key, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours[key], weight, rtol=1e-6, atol=1e-6, msg=key)


@pytest.fixture(scope="module")
def tied_base(family_base, tmp_path_factory):
    """Tie a family's head to its embedding; return the directory and the tensors stored in it."""
    root = tmp_path_factory.mktemp("tied")

    @functools.cache
    def tied(name, *, with_prefix):
        base = shutil.copytree(family_base(name).directory, root / f"{name}_{with_prefix}")
        config_json = json.loads((base / "config.json").read_text("utf-8"))
        config_json["tie_word_embeddings"] = True
        (base / "config.json").write_text(json.dumps(config_json))
        stored = load_file(base / "model.safetensors")
        stored.pop("lm_head.weight", None)
        first = next(iter(stored)).partition(".")[0]
        if not with_prefix:
            stored = {key.removeprefix(f"{first}."): weight for key, weight in stored.items()}
        save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
        return base, stored

    return tied


@pytest.mark.parametrize("kind", ["lora", "qlora"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("with_prefix", [True, False])
def test_a_tied_head_with_a_delta_gets_a_weight_of_its_own(
    name,
    kind,
    with_prefix,
    tied_base,
    tiny_config,
    document,
    merge,
    tmp_path,
):
    """The embedding stays unchanged, even if the checkpoint was saved without its tied head."""
    base, stored = tied_base(name, with_prefix=with_prefix)
    config = tiny_config(F32, *KINDS[kind], "lora.targets=[o_proj,lm_head]")
    graph = graph_on(base, config)
    made = merge(written(graph, config, tmp_path / "adapter"), base, tmp_path / "merged")
    assert made["untied"] is True
    assert made["merged_keys"]["lm_head"] == "lm_head.weight"
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
    model = loaded(tmp_path / "merged")
    assert largest_difference(graph, model, document) <= 1e-4
    table = FAMILIES[name].embedding + ".weight"
    key = table if with_prefix else table.partition(".")[2]
    assert torch.equal(model.get_input_embeddings().weight, stored[key].float())
    assert not torch.equal(model.get_output_embeddings().weight, stored[key].float())


BLOCKS = ["quant.block_size=128", "model.hidden_size=128", "model.intermediate_size=256"]
BITWISE = {
    "nf4 in bf16": [],
    "nf4 in f32": [F32],
    "one scale": ["quant.double_quant=false"],
    "blocks of 128": BLOCKS,
    "blocks of 128, one scale": [*BLOCKS, "quant.double_quant=false"],
    "fp4": ["quant=fp4"],
    "fp4 in f32": ["quant=fp4", F32],
    "skipped modules": ["quant.skip=[mlp,'*.layers.1.self_attn.q_proj']"],
    "a bf16 base": ["model.dtype=bf16"],
    "a bf16 base in f32": ["model.dtype=bf16", F32],
    "gpt2": ["model=tiny_gpt2"],
    "gpt2 in f32": ["model=tiny_gpt2", F32],
    "phi3": ["model=random", "model.family=phi3"],
}


@pytest.mark.parametrize("overrides", BITWISE.values(), ids=BITWISE.keys())
def test_the_dequantized_base_is_bit_for_bit_the_backend_s(
    overrides,
    tiny_backend,
    tiny_config,
    merge,
    tmp_path,
):
    """With B = 0 every merged weight equals that of the backend, bit for bit, quantized or not."""
    graph = tiny_backend(*overrides)
    config = tiny_config(*overrides)
    base = graph.base.directory
    adapter = written(graph, config, tmp_path / "adapter")
    merge(adapter, base, tmp_path / "merged", "merge.dtype=f32")
    found = loaded(tmp_path / "merged", dtype=torch.float32).state_dict()
    plain = graph.model.get_base_model()
    four_bit = {path.removesuffix(".base_layer") for path in quantized_linears(plain)}
    assert four_bit
    is_gpt2 = graph.shape.family.transposed
    for path in four_bit:
        seen = dequantized(plain.get_submodule(path).get_base_layer().weight)
        ours = found.pop(f"{path}.weight")
        assert torch.equal(ours, seen.T if is_gpt2 else seen), path
    theirs = {key.replace(".base_layer", ""): value for key, value in plain.state_dict().items()}
    for key, weight in found.items():
        assert torch.equal(weight, theirs[key].float()), key


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gpt2"])
def test_the_proxy_s_merged_projections_are_those_of_its_graph(
    model,
    compute,
    tiny_backend,
    tiny_config,
    merge,
    tmp_path,
):
    """All projections of the stack and the tied head are the graph's, with no further tensor."""
    overrides = [f"model={model}", "backend=proxy", f"quant.compute_dtype={compute}"]
    graph = tiny_backend(*overrides, live=True)
    adapter = written(graph, tiny_config(*overrides), tmp_path / "adapter")
    made = merge(adapter, graph.base.directory, tmp_path / "o.safetensors", "merge.dtype=f32")
    assert made["mode"] == "subset"
    found = load_file(tmp_path / "o.safetensors")
    names = made["merged_keys"]
    assert names["lm_head"] == "lm_head.weight"
    for logical, projection in graph.projections.items():
        weight = projection.weight_OI.float() + projection.scale * (
            projection.lora_b @ projection.lora_a
        )
        ours = found.pop(names[logical])
        stored = weight.T if model == "tiny_gpt2" and logical != "lm_head" else weight
        torch.testing.assert_close(ours, stored.detach(), rtol=1e-6, atol=1e-6)
    assert found == {}
