"""The subset file of the source system's merge-qlora, byte for byte.

The oracle is numpy and the safetensors package alone: ``W + (B @ A) · alpha / r``, each step
rounded to f32, under the names of ``base_key_map``. The package's writer is the source system's.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from mens_exp import cli
from mens_exp.artifacts.adapter_v3 import write_adapter
from mens_exp.artifacts.certificate import Certificate
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.export.parity import merged_stack
from mens_exp.model.quiet import quiet

V, D, R, ALPHA = 11, 6, 3, 16  # 16/3 is no power of two, so the order of rounding shows
GPT2 = {"mid0": "h.0.attn.c_proj.weight", "mid1": "h.1.attn.c_proj.weight"}
LLAMA = {f"mid{i}": f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)}
FAMILIES = {
    "gpt2": GPT2 | {"lm_head": "wte.weight"},
    "llama": LLAMA | {"lm_head": "model.embed_tokens.weight"},
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def base_of(keys, dtype=torch.float32):
    """Draw a base that has a tensor besides those that a merge changes."""
    draw = torch.Generator().manual_seed(1)
    shapes = {key: (V, D) if name == "lm_head" else (D, D) for name, key in keys.items()}
    shapes |= {"untouched.weight": (D,)}
    return {key: torch.randn(size, generator=draw).to(dtype) for key, size in shapes.items()}


def adapter_of(keys):
    """Draw matrices of sixteenths, whose product is exact in f32 in any order of summation."""
    draw = np.random.default_rng(2)
    rows = {name: V if name == "lm_head" else D for name in keys}
    made = {f"{name}.lora_a": draw.integers(-32, 33, (R, D)) / 16 for name in keys}
    made |= {f"{name}.lora_b": draw.integers(-32, 33, (rows[name], R)) / 16 for name in keys}
    return {name: one.astype(np.float32) for name, one in made.items()}


def expected_file(keys, base, adapter):
    """Compute the source system's file."""
    merged = {}
    for name, key in keys.items():
        delta = adapter[f"{name}.lora_b"] @ adapter[f"{name}.lora_a"] * np.float32(ALPHA / R)
        # GPT-2 stores projections [in, out]; the source added the delta untransposed.
        delta = delta.T if "c_proj" in key else delta
        merged[key] = np.ascontiguousarray(base[key].float().numpy() + delta)
    return safetensors.numpy.save(merged)


def sidecar(keys, schema):
    """Write a sidecar file as the source system's trainer did."""
    common = {
        "layer_order": list(keys),
        "base_key_map": keys,
        "vocab": V,
        "d_model": D,
        "rank": R,
        "alpha": ALPHA,
    }
    if schema == "v2":
        head = {"format": "vox_mens_qlora_lora_only_v2", "version": 2}
        return head | common | {"embed_key": keys["lm_head"]}
    quant = {"base_quant": "nf4", "double_quant": True}
    head = {"format": "vox_mens_adapter", "version": 3, "adapter_method": "qlora", "quant": quant}
    return head | common


def typed(here, keys, base, schema, *overrides, adapter=None, code=0):
    adapter = adapter or adapter_of(keys)
    (here / "meta.json").write_text(json.dumps(sidecar(keys, schema)))
    (here / "adapter.safetensors").write_bytes(safetensors.numpy.save(adapter))
    (here / "base.safetensors").write_bytes(safetensors.torch.save(base))
    usual = [
        "task=merge",
        "parity.tokens=64",
        "logger=none",
        f"adapter={here / 'adapter.safetensors'}",
        f"merge.meta={here / 'meta.json'}",
        f"merge.base_shard=[{here / 'base.safetensors'}]",
        f"out={here / 'out.safetensors'}",
        f"hydra.run.dir={here / 'record'}",
    ]
    assert cli.main([*usual, *overrides]) == code
    return adapter


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schema", ["v2", "v3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_file_is_the_source_s_byte_for_byte(family, schema, dtype, tmp_path):
    """Names, order, header and every bit of the numbers agree for each dtype of the base."""
    keys = FAMILIES[family]
    base = base_of(keys, dtype)
    asked = ["merge.untie=false", "merge.dtype=f32"]
    adapter = typed(tmp_path, keys, base, schema, *asked)
    found = (tmp_path / "out.safetensors").read_bytes()
    assert found == expected_file(keys, base, adapter)


def test_products_that_are_not_exact_agree_to_the_source_s_tolerance(tmp_path):
    """Within 1e-5, as the source's tests ask: libraries may sum products in another order."""
    keys = FAMILIES["llama"]
    base, draw = base_of(keys), np.random.default_rng(3)
    adapter = adapter_of(keys)
    adapter = {name: draw.normal(size=one.shape).astype("f4") for name, one in adapter.items()}
    typed(tmp_path, keys, base, "v2", "merge.untie=false", adapter=adapter)
    found = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    expected = safetensors.numpy.load(expected_file(keys, base, adapter))
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        np.testing.assert_allclose(found[key], one, rtol=0, atol=1e-5)


def test_the_head_alone_gets_a_name_of_its_own_unless_asked(tmp_path):
    """The numbers are the same either way; only untie=false says that the embedding changes."""
    keys = FAMILIES["gpt2"]
    for name, asked in (("own", []), ("shared", ["merge.untie=false"])):
        (tmp_path / name).mkdir()
        typed(tmp_path / name, keys, base_of(keys), "v2", *asked)
    own, shared = (
        safetensors.numpy.load_file(tmp_path / name / "out.safetensors")
        for name in ("own", "shared")
    )
    assert np.array_equal(own.pop("lm_head.weight"), shared.pop("wte.weight"))
    assert own.keys() == shared.keys() == set(GPT2.values())
    records = {name: RunDir(tmp_path / name / "record") for name in ("own", "shared")}
    manifests = {name: Manifest.read(run.manifest) for name, run in records.items()}
    for name, moves in (("own", False), ("shared", True)):
        assert manifests[name].results["untied"] is not moves
        assert manifests[name].results["embedding_moves"] is moves
        said = [note for note in manifests[name].notes if "input embedding moves" in note]
        assert len(said) == moves
        reference = Certificate.read(records[name].parity).reference
        assert ("input embedding moves" in reference) is moves


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda keys, _: keys.pop("lm_head"), "no delta for a tied head"),
        (lambda _, base: base.update({"lm_head.weight": torch.ones(V, D)}), "has an untied head"),
    ],
    ids=["no head", "untied base"],
)
def test_a_head_that_shares_nothing_is_refused(change, reason, tmp_path, capsys):
    """Without a tied embedding the setting has no effect, or would change an untrained weight."""
    keys = dict(FAMILIES["gpt2"])
    base = base_of(keys)
    change(keys, base)
    typed(tmp_path, keys, base, "v3", "merge.untie=false", code=2)
    assert reason in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out.safetensors").exists()


F32 = "quant.compute_dtype=f32"


@pytest.fixture
def merged(tiny_backend, tiny_config, rows_file, tmp_path):
    """Merge a filled adapter of tiny_llama, whose head is tied, given by its directory."""

    def merge(graph, config, name, *asked, code=0):
        adapter = tmp_path / "adapter"
        if not adapter.exists():
            write_adapter(adapter, *graph.adapter(config))
        usual = [f"path={adapter}", f"base={graph.base.directory}", f"out={tmp_path / name}"]
        usual += ["data=jsonl", f"data.path={rows_file}", "parity.tokens=64", "trainer=cpu"]
        record = RunDir(tmp_path / f"{name}_record")
        command = [
            "task=merge",
            "parity.tokens=64",
            "logger=none",
            *usual,
            f"hydra.run.dir={record.path}",
            *asked,
        ]
        assert cli.main(command) == code
        return record, tmp_path / name

    return merge


def test_a_whole_model_that_stays_tied_is_measured_and_set_aside(
    merged, tiny_backend, tiny_config, capsys
):
    """The loss is not the trained model's; if accepted, transformers finds one moved table."""
    from transformers import AutoModelForCausalLM

    overrides = ["backend=lora", F32, "lora.targets=[o_proj,lm_head]"]
    graph, config = tiny_backend(*overrides, live=True), tiny_config(*overrides)
    record, out = merged(graph, config, "tied", "merge.untie=false", code=4)
    assert not out.exists()
    certificate = Certificate.read(record.parity)
    written = certificate.comparisons["written"]
    assert "input embedding moves" in written["what"]
    assert written["exceeded"]
    assert abs(written["nll_difference"]) > 1e-3
    # The base in memory, with the file's tensors put in, is the same model.
    subset, _ = merged(graph, config, "subset", "merge.mode=subset", "merge.untie=false", code=4)
    again = Certificate.read(subset.parity).comparisons["written"]
    assert again["nll_difference"] == pytest.approx(written["nll_difference"], rel=1e-5)
    capsys.readouterr()

    asked = ["merge.untie=false", "parity.accept=true"]
    _, out = merged(graph, config, "accepted", *asked)
    assert "input embedding moves" in " ".join((out / "README.md").read_text("utf-8").split())
    assert "input embedding moves" in " ".join(capsys.readouterr().out.split())
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    table = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is table
    files = safetensors.numpy.load_file(out.parent / "adapter" / "adapter.safetensors")
    base = safetensors.numpy.load_file(graph.base.directory / "model.safetensors")
    scale = config.lora.alpha / config.lora.r
    delta = files["lm_head.lora_b"] @ files["lm_head.lora_a"] * scale
    expected = base["model.embed_tokens.weight"] + delta
    np.testing.assert_allclose(table.detach().numpy(), expected, atol=1e-6)
    assert np.abs(delta).max() > 1e-3


def test_the_proxy_s_embedding_cannot_be_four_bit(merged, tiny_backend, tiny_config, capsys):
    """Merged into the published table it works, and is measured with that table moved."""
    overrides = ["backend=proxy", F32]
    graph, config = tiny_backend(*overrides, live=True), tiny_config(*overrides)
    merged(graph, config, "four_bit", "merge.untie=false", code=2)
    assert "never 4-bit" in " ".join(capsys.readouterr().err.split())
    asked = ["merge.base=original", "merge.dtype=f32"]
    _, out = merged(graph, config, "file", "merge.untie=false", *asked)
    names = set(safetensors.numpy.load_file(out))
    assert names == {"model.embed_tokens.weight", *LLAMA.values()}


def test_a_stack_that_stays_tied_reads_the_moved_table(tiny_backend):
    """The logits of a lone head are E'[t] E'ᵀ; after the block, the stack is as before."""
    graph = tiny_backend("backend=proxy", "backend.lm_head_only=true", F32, live=True)
    table = torch.randn(graph.embedding_VD.shape, generator=torch.Generator().manual_seed(0))
    before = graph.trace([3, 5]).logits_TV
    with merged_stack(graph, {"lm_head": table}, tied=True) as forward:
        found = forward([3, 5]).logits_TV
    torch.testing.assert_close(found, table[[3, 5]] @ table.T)
    assert torch.equal(graph.trace([3, 5]).logits_TV, before)


def test_a_model_that_stays_tied_is_verified_without_the_run_that_wrote_it(
    train_in, tmp_path, monkeypatch, capsys
):
    """The certificate says how it was merged, and a second measurement agrees."""
    run = train_in(
        tmp_path / "outputs" / "run", F32, "lora.targets=[o_proj,lm_head]", "trainer.max_steps=2"
    )
    monkeypatch.chdir(tmp_path)
    asked = ["merge.untie=false", "parity.accept=true", "parity.tokens=64", "out=merged"]
    command = ["task=merge", "logger=none", f"path={run.path}", *asked]
    assert cli.main([*command, "hydra.run.dir=outputs/record"]) == 0
    shutil.rmtree("outputs/record")
    inspect = [
        "task=inspect",
        "path=merged",
        "inspect.verify=true",
        "hydra.run.dir=outputs/inspected",
    ]
    capsys.readouterr()
    assert cli.main(inspect) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "input embedding moves" in said
    inspection = json.loads((tmp_path / "outputs/inspected/inspection.json").read_text())
    checks = inspection["verification"]["checks"]
    found = {one["name"]: one["outcome"] for one in checks if "certificate" in one["name"]}
    assert found
    assert set(found.values()) == {"equal"}, found
