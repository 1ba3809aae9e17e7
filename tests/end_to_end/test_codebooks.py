"""Codebook quantizers, from the command line to a merged model."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from bitsandbytes.functional import get_4bit_type
from safetensors.torch import load_file

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest

SUITE = ("suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=40")


@pytest.fixture(scope="module")
def run(finished_with):
    """A finished run on NF3; do not change it."""
    return finished_with("quant=nf3", "optim.lr=5e-3", "trainer.max_steps=12", *SUITE)


def test_the_record_says_what_was_computed(run):
    """Quantizer, levels and blocks; the adapter learned, and transformers confirms the gradient."""
    manifest = Manifest.read(run.manifest)
    facts, results = manifest.facts, manifest.results
    named = [facts[name] for name in ("quant", "levels", "block_size", "scales")]
    assert named == ["nf3", 8, 64, "f32"]
    assert manifest.contract["quant"] == {"base": "nf3", "double_quant": False}
    assert 0 < manifest.data_contract["probe"]["reference"]["gradient"] < 1e-4
    assert results["tuned_val_loss"] < 0.97 * results["base_val_loss"]
    written = json.loads((run.adapter / "adapter_manifest.json").read_text("utf-8"))
    assert written["quant"] == {"base_quant": "nf3", "double_quant": False}


def test_parameters_are_counted_and_not_their_codes(run, tiny_base):
    """The total is transformers' count for the original weights, plus the adapter."""
    from transformers import AutoModelForCausalLM

    published = AutoModelForCausalLM.from_pretrained(tiny_base.directory, dtype=torch.bfloat16)
    facts = Manifest.read(run.manifest).facts
    expected = published.num_parameters() + facts["trainable_parameters"]
    assert facts["total_parameters"] == expected


def test_it_is_merged_into_the_values_that_it_was_trained_on(run, tmp_path, monkeypatch, capsys):
    """The adapter's header says how to compute them again, and the certificate is close to zero."""
    written = json.loads((run.adapter / "adapter_manifest.json").read_text("utf-8"))
    quantizer = written["mens_exp"]["quantizer"]
    assert (quantizer["quant_type"], quantizer["block_size"]) == ("nf3", 64)
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(
            ["task=merge", "parity.tokens=64", f"path={run.path}", "out=merged", "logger=none"]
        )
        == 0
    )
    assert "nf3 values in blocks of 64, which" in " ".join(capsys.readouterr().out.split())
    certificate = json.loads((tmp_path / "merged" / "parity.json").read_text("utf-8"))
    assert certificate["passed"]
    judged = certificate["comparisons"][certificate["judged"]]
    assert judged["mean_kl"] < 1e-4


def test_given_levels_train_as_the_quantizer_that_has_them(train_in, tmp_path, capsys):
    """With NF4's levels and double quantization, losses are those of bitsandbytes' NF4.

    The adapter is merged into the same values, and another quantizer's base is refused with the
    override that makes this one.
    """
    levels = get_4bit_type("nf4", device="cpu").tolist()
    told = f"quant.levels=[{','.join(map(str, levels))}]"
    common = ("quant.compute_dtype=f32", "optim.lr=1e-2", "lora.targets=[q_proj,up_proj]", *SUITE)
    given = ("quant=codebook", told, "quant.double_quant=true")
    runs = [train_in(tmp_path / "nf4", *common), train_in(tmp_path / "own", *given, *common)]
    losses = [
        [Manifest.read(run.manifest).results[f"{arm}_val_loss"] for run in runs]
        for arm in ("base", "tuned")
    ]
    for nf4, own in losses:
        assert own == pytest.approx(nf4, rel=1e-6)
    merged = []
    for run in runs:
        out = tmp_path / f"{run.path.name}-merged"
        command = [
            "task=merge",
            "parity.tokens=64",
            f"path={run.path}",
            f"out={out}",
            "merge.dtype=f32",
            "logger=none",
        ]
        assert cli.main(command) == 0
        merged.append(load_file(out / "model.safetensors"))
    for name, values in merged[0].items():
        torch.testing.assert_close(merged[1][name], values, rtol=0, atol=2e-5)
    command = ["task=evaluate", "logger=none", "model=tiny_llama", "suite=mini_python"]
    command += ["suite.items=1", "sandbox=none", f"path={runs[1].adapter}"]
    capsys.readouterr()
    assert cli.main([*command, f"hydra.run.dir={tmp_path / 'no'}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"add quant=codebook quant.double_quant=true {told} to score" in said
    assert cli.main([*command, *given, f"hydra.run.dir={tmp_path / 'yes'}"]) == 0


def test_levels_that_no_record_tells_cannot_be_merged(train_in, tiny_base, tmp_path, capsys):
    """A header that names a codebook does not tell its levels; the published weights remain."""
    given = ("quant=codebook", "quant.levels=[-1,-0.3,0,0.3,1]")
    run = train_in(tmp_path / "run", *given, "trainer.max_steps=1", "lora.targets=[q_proj]")
    adapter = tmp_path / "adapter"
    shutil.copytree(run.adapter, adapter)
    written = json.loads((adapter / "adapter_manifest.json").read_text("utf-8"))
    assert written["mens_exp"]["quantizer"]["levels"] == [-1, -0.3, 0, 0.3, 1]
    del written["mens_exp"]["quantizer"]
    (adapter / "adapter_manifest.json").write_text(json.dumps(written), "utf-8")
    command = [
        "task=merge",
        "parity.tokens=64",
        f"path={adapter}",
        f"base={tiny_base.directory}",
        "logger=none",
    ]
    capsys.readouterr()
    assert cli.main([*command, f"out={tmp_path / 'no'}"]) == 2
    assert "unknown levels of the codebook" in " ".join(capsys.readouterr().err.split())
    assert cli.main([*command, f"out={tmp_path / 'yes'}", "merge.base=original"]) == 0


def test_an_adapter_records_what_was_left_out(train_in, tmp_path):
    """`quantizer.skip` lists the full paths of the skipped layers."""
    told = ("quant=nf2", "quant.skip=[down_proj]", "lora.targets=[q_proj]")
    run = train_in(tmp_path / "run", *told, "trainer.max_steps=2")
    written = json.loads((run.adapter / "adapter_manifest.json").read_text("utf-8"))
    skipped = written["mens_exp"]["quantizer"]["skip"]
    assert skipped == [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]


def test_a_mixture_of_quantizers_is_merged_into_its_own_values(
    train_in, tiny_base, tmp_path, capsys
):
    """Weights without an adapter equal bitsandbytes' dequantized originals."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    mixed = (
        "quant.type_pattern={mlp:nf2,up_proj:codebook,*.1.self_attn.v_proj:fp4}",
        "quant.levels=[-1,0,1]",
        "quant.double_quant_pattern={mlp:true,v_proj:false}",
    )
    run = train_in(tmp_path / "run", *mixed, "trainer.max_steps=2", "lora.targets=[o_proj]")
    assert (
        cli.main(
            [
                "task=merge",
                "parity.tokens=64",
                f"path={run.path}",
                f"out={tmp_path / 'm'}",
                "logger=none",
            ]
        )
        == 0
    )
    assert "nf2 in 4 modules, codebook in 2 modules, nf4 in 1 module, fp4 in 1 module," in " ".join(
        capsys.readouterr().out.split()
    )
    certificate = json.loads((tmp_path / "m" / "parity.json").read_text("utf-8"))
    judged = certificate["comparisons"][certificate["judged"]]
    assert certificate["passed"]
    assert judged["mean_kl"] < 1e-4
    facts = Manifest.read(run.manifest).facts
    assert (facts["quant"], facts["quantized_as"]) == (
        "nf4",
        {"nf4": 7, "nf2": 4, "codebook": 2, "fp4": 1},
    )
    assert (
        "layers are nf4 in 7, nf2 in 4, codebook in 2, fp4 in 1: a mixture"
        in run.model_card.read_text("utf-8")
    )
    merged = load_file(tmp_path / "m" / "model.safetensors")
    published = load_file(tiny_base.directory / "model.safetensors")
    for name, kind, double in (
        ("1.self_attn.v_proj", "fp4", False),
        ("0.self_attn.v_proj", "nf4", False),
        ("0.self_attn.q_proj", "nf4", True),
    ):
        key = f"model.layers.{name}.weight"
        rounded = published[key].to(torch.bfloat16)
        stored = quantize_4bit(rounded, blocksize=64, compress_statistics=double, quant_type=kind)
        torch.testing.assert_close(merged[key].float(), dequantize_4bit(*stored).float())


def test_a_module_is_merged_in_the_blocks_that_it_was_trained_in(
    train_in, tiny_base, tmp_path, capsys
):
    """The oracle: W + s·BA of bitsandbytes' values in blocks of 128; the header has the modules."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    run = train_in(
        tmp_path / "run",
        *("quant.block_size_pattern={down_proj:128}", "lora.targets=[down_proj,o_proj]"),
        *("optim.lr=1e-2", "trainer.max_steps=2"),
    )
    words = [
        "task=merge",
        "parity.tokens=64",
        f"path={run.path}",
        f"out={tmp_path / 'm'}",
        "merge.dtype=f32",
    ]
    assert cli.main([*words, "logger=none"]) == 0
    assert "nf4 in blocks of 128 in 2 modules," in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "m" / "parity.json").read_text("utf-8"))["passed"]
    assert Manifest.read(run.manifest).facts["in_blocks_of"] == {"64": 12, "128": 2}
    assert "layers have blocks of 64 in 12, 128 in 2: a mixture" in run.model_card.read_text(
        "utf-8"
    )
    written = json.loads((run.adapter / "adapter_manifest.json").read_text("utf-8"))
    modules = written["mens_exp"]["quantizer"]["modules"]
    assert {name: one["block_size"] for name, one in modules.items()} == {
        f"model.layers.{layer}.mlp.down_proj": 128 for layer in (0, 1)
    }
    merged = load_file(tmp_path / "m" / "model.safetensors")
    published = load_file(tiny_base.directory / "model.safetensors")
    adapter = load_file(run.adapter / "adapter.safetensors")
    for name, logical, block in (
        ("1.mlp.down_proj", "l1.down", 128),
        ("1.self_attn.o_proj", "l1.o", 64),
    ):
        key = f"model.layers.{name}.weight"
        rounded = published[key].to(torch.bfloat16)
        stored = quantize_4bit(rounded, blocksize=block, compress_statistics=True, quant_type="nf4")
        A_RI, B_OR = (adapter[f"{logical}.lora_{side}"].float() for side in "ab")
        delta_OI = written["alpha"] / written["rank"] * (B_OR @ A_RI)
        assert delta_OI.abs().max() > 1e-3
        expected = dequantize_4bit(*stored).float() + delta_OI
        torch.testing.assert_close(merged[key], expected, rtol=1e-5, atol=1e-6)


def test_a_format_that_only_a_header_names_has_its_own_block(train_in, tiny_base, tmp_path):
    """With export.base_quant=mxfp4 the block size is 32, and the merge equals that of the run."""
    run = train_in(tmp_path / "run", "quant=mxfp4", "trainer.max_steps=2")
    shutil.copytree(run.peft, tmp_path / "peft")
    base = f"base={tiny_base.directory}"
    for command in (
        ["task=merge", "parity.tokens=64", f"path={run.path}", f"out={tmp_path / 'known'}"],
        [
            *("task=export", f"path={tmp_path / 'peft'}", "export.format=v3", "model=tiny_llama"),
            *("export.base_quant=mxfp4", f"out={tmp_path / 'told'}"),
        ],
        [
            "task=merge",
            "parity.tokens=64",
            f"path={tmp_path / 'told'}",
            base,
            f"out={tmp_path / 'assumed'}",
        ],
    ):
        assert cli.main([*command, "logger=none"]) == 0
    known, assumed = (
        load_file(tmp_path / name / "model.safetensors") for name in ("known", "assumed")
    )
    for name, weight in known.items():
        torch.testing.assert_close(assumed[name], weight, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    "told", [["quant=nvfp4"], ["quant=int2", "lora.variant=dora"], ["quant=hqq3"]]
)
def test_a_run_in_two_parts_is_the_run_in_one(whole_and_parts, told):
    """Resuming from the checkpoint gives the same bytes."""
    found = [(one.adapter / "adapter.safetensors").read_bytes() for one in whole_and_parts(*told)]
    assert found[0] == found[1]
