from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mens_exp import cli
from mens_exp.artifacts.attribution import Attribution
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.overrides import check
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import chosen, pattern_values, quantized_modules
from mens_exp.planning.preflight import preflight


@pytest.fixture(scope="module")
def attributed(rows_file, tmp_path_factory):
    """Run task=attribute on two random layers and sixty small rows."""

    def run(*overrides, code=0):
        directory = tmp_path_factory.mktemp("attribute") / "run"
        usual = ["task=attribute", "logger=none", "model=tiny_llama", "trainer=cpu", "data=jsonl"]
        usual += [f"data.path={rows_file}", "data.seq_len=192", "data.val_frac=0.2"]
        usual = [text for text in usual if "logger=wandb" not in overrides or text != "logger=none"]
        arguments = [*usual, "attribute.tokens=150", *overrides, f"hydra.run.dir={directory}"]
        assert cli.main(arguments) == code
        return RunDir(directory)

    return run


@pytest.fixture(scope="module")
def run(attributed):
    """A finished run whose suggestion may leave modules out; do not change it."""
    bounds = "attribute.position_bounds=[0,20]"
    return attributed("attribute.extra_bits=3", bounds, "logger=wandb")


def test_every_quantized_module_is_measured(run):
    """All seven projections of both layers are measured; the head, never quantized, is not."""
    record = Attribution.read(run.attribution)
    assert len(record.modules) == 14
    assert record.variants == ["nf4_double", "nf4", "fp4_double"]
    assert all(one["path"].startswith("model.layers.") for one in record.modules)
    assert record.sum_of_parts["kl"] == pytest.approx(sum(one["kl"] for one in record.modules))
    assert {one["first"] for one in record.parity["by_position"]} <= {0, 20}


def test_modules_are_a_table_and_a_panel_in_wandb(run, mirrored):
    """W&B gets a table with the costliest module first, and the file itself as an artifact."""
    record = Attribution.read(run.attribution)
    found = mirrored(run)
    assert [one["run"]["job_type"] for one in found if one["type"] == "run"] == ["attribute"]
    row = [one["history"]["item"] for one in found if one["type"] == "history"][-1]
    (files,) = run.wandb.glob("offline-run-*/files")
    table = json.loads((files / row["modules.path"]).read_text("utf-8"))
    dearest = min(record.modules, key=lambda one: one["rank"])
    assert (table["data"][0][0], table["data"][0][-1]) == (dearest["path"], 1)
    assert len(table["data"]) == 14
    assert "plots/modules_table.path" in row
    types = {one["artifact"]["type"] for one in found if one["type"] == "artifact"}
    assert {"attribution", "manifest"} <= types


def test_record_and_figures_are_in_the_manifest(run):
    """The manifest has the hash of the file, and the headline figures as results."""
    manifest = Manifest.read(run.manifest)
    record = Attribution.read(run.attribution)
    assert manifest.status is Status.SUCCEEDED
    assert manifest.outputs["attribution.json"] == sha256_file(run.attribution)
    assert manifest.results["kl"] == record.whole["nf4_double"]["kl"]
    assert manifest.results["suggested_overrides"] == record.suggestion["overrides"]
    assert manifest.inputs["data"]["val_rows"] > 0
    assert "4 bits against f32" in run.report.read_text("utf-8")


def test_printed_overrides_compose_and_plan(run, rows_file):
    """The printed overrides are accepted by the parser and by preflight."""
    overrides = Attribution.read(run.attribution).suggestion["overrides"]
    assert [text.partition("=")[0] for text in overrides] == ["quant.skip", "lora.targets"]
    base = ["model=tiny_llama", "trainer=cpu", "logger=none", "data=jsonl"]
    checked = check([*base, f"data.path={rows_file}", *overrides])
    assert checked.problems == ()
    assert preflight(checked.cells[0].config) == []


def test_the_same_command_measures_the_same(run, attributed):
    """On one thread, the same command writes the same bytes."""
    again = attributed("attribute.extra_bits=3", "attribute.position_bounds=[0,20]")
    assert again.attribution.read_bytes() == run.attribution.read_bytes()


def test_skipped_modules_are_not_measured(attributed):
    """A skipped module has no quantization error; fp4 is measured as nf4 is."""
    record = Attribution.read(attributed("quant=fp4", "quant.skip=[mlp]").attribution)
    assert {one["kind"] for one in record.modules} == {"q", "k", "v", "o"}
    assert record.configured == "fp4_double"
    assert record.suggestion["skip"] in ([], ["mlp"])


def test_a_codebook_is_attributed_beside_nf4(attributed):
    """Over the whole model int3 has 1.5 times the KL of nf4_double; its stored bits are given."""
    record = Attribution.read(attributed("quant=int3").attribution)
    assert record.variants == ["int3", "nf4_double"]
    three, four = (record.whole[name] for name in record.variants)
    assert three["kl"] > 1.5 * four["kl"]
    assert three["bits_per_parameter"] == 3.5  # with an f32 scale for each 64 codes


def test_a_mixture_is_suggested_as_an_override(attributed, rows_file):
    """The suggested mixture uses the named quantizers within the configured bits, and plans."""
    run = attributed("attribute.quant_types=[nf2,nf8]", "data.seq_len=128")
    record, manifest = Attribution.read(run.attribution), Manifest.read(run.manifest)
    mixture, uniform = record.suggestion["mixture"], record.whole["nf4_double"]
    assert list(record.whole) == sorted(["nf4_double", "nf4", "fp4_double", "nf2", "nf8"])
    assert mixture["budget_bits"] == uniform["bits_per_parameter"]
    assert mixture["whole"]["bits_per_parameter"] <= uniform["bits_per_parameter"] + 1e-6
    assert mixture["kl_of_parts"] < record.sum_of_parts["kl"]
    assert manifest.results["mixture_kl"] == mixture["whole"]["kl"]
    (override,) = mixture["overrides"]
    page = run.report.read_text("utf-8")
    assert override in page
    assert "train on the suggested mixture" in page
    base = ["model=tiny_llama", "trainer=cpu", "logger=none", "data=jsonl"]
    checked = check([*base, f"data.path={rows_file}", override])
    assert checked.problems == ()
    config = checked.cells[0].config
    assert preflight(config) == []
    stored = quantized_modules(config.quant, shape_of(config.model))
    assert {path: one.quant_type.value for path, one in stored.items()} == {
        path: name.removesuffix("_double") for path, name in mixture["variants"].items()
    }


def test_ranks_are_suggested_by_the_error_that_adapters_can_take_away(
    attributed, rows_file, tiny_base
):
    """The oracle is numpy's SVD of the errors that bitsandbytes' functions leave, and a search.

    No exchange of one rank for another takes away more, and the parameters are those of one rank.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    run = attributed("attribute.rank=4")
    record = Attribution.read(run.attribution)
    found = record.suggestion["ranks"]
    published = load_file(tiny_base.directory / "model.safetensors")
    gains = {}
    for one in record.modules:
        weight = published[f"{one['path']}.weight"].to(torch.bfloat16).float()
        stored = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        lost = weight - dequantize_4bit(*stored).to(torch.bfloat16).float()
        energy = np.linalg.svd(lost.double().numpy(), compute_uv=False) ** 2
        gains[one["path"]] = one["kl"] * energy / energy.sum()
    ranks, width = found["ranks"], {one["path"]: one["adapter_width"] for one in record.modules}
    assert ranks.keys() == gains.keys()
    budget = 4 * sum(width.values())
    assert budget - max(width.values()) < found["parameters"] <= budget
    assert found["parameters"] == sum(ranks[path] * width[path] for path in ranks)
    assert found["parameters_uniform"] == budget
    total = sum(one["kl"] for one in record.modules)
    taken = sum(gains[path][: ranks[path]].sum() for path in ranks) / total
    uniform = sum(own[:4].sum() for own in gains.values()) / total
    assert (found["share"], found["share_uniform"]) == pytest.approx((taken, uniform), rel=1e-3)
    assert found["share"] > found["share_uniform"]
    for path, rank in ranks.items():
        for other, theirs in ranks.items():
            if other != path and theirs > 1 and width[other] >= width[path]:
                assert (
                    gains[path][rank]
                    <= 1.001 * gains[other][theirs - 1] * width[path] / width[other]
                )
    base = ["model=tiny_llama", "trainer=cpu", "logger=none", "data=jsonl", "suite=none"]
    checked = check([*base, f"data.path={rows_file}", *found["overrides"]])
    assert checked.problems == ()
    config = checked.cells[0].config
    shape = shape_of(config.model)
    modules = chosen(config.lora, shape)
    assert pattern_values(config.lora.rank_pattern, modules, shape.family, config.lora.r) == ranks
    alphas = pattern_values(config.lora.alpha_pattern, modules, shape.family, config.lora.alpha)
    assert alphas == ranks
    page = run.report.read_text("utf-8")
    assert "train with the suggested ranks" in page
    assert all(override in page for override in found["overrides"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["attribute.rank=65"], "at most 32, its smaller side"),
        (["quant=none"], "has no quantization error to attribute"),
        (["quant=int8"], "expected one of nf4, fp4, nf2"),
        (["quant.skip=[all_linear]"], "leaves nothing quantized"),
        (["quant.skip=[nothing]"], "matches no linear module"),
        (["attribute.position_bounds=[16,64]"], "the first 0"),
        (["attribute.position_bounds=[0,64,16]"], "ascending"),
        (["attribute.tokens=0"], "out of range"),
        (["attribute.quant_types=[int8]"], "cannot be mixed with another quantizer"),
        (["attribute.quant_types=[nf4]"], "is the configured quantizer, which is measured anyway"),
        (["attribute.quant_types=[nf2,nf2]"], "a quantizer is named twice"),
        (["attribute.bits=3"], "has no effect with attribute.quant_types=[]"),
        (["attribute.quant_types=[nf2]", "attribute.bits=2"], "expected at least 2.500"),
        (
            ["quant=mxfp4", "attribute.quant_types=[nf8]", "model.head_dim=40"],
            "nf8: 64 for o (160)",
        ),
        (["backend=qlora"], "has no effect with task=attribute"),
        (["lora.r=8"], "has no effect with task=attribute"),
        (["quant.storage_dtype=bf16"], "has no effect with task=attribute"),
        (["data.val_max_tokens=9"], "attribute.tokens"),
        (["tokenizer=vox"], "on its own tokens"),
        (["seed=3"], "has no effect with task=attribute"),
    ],
)
def test_request_is_refused(
    attributed,
    capsys,
    overrides,
    said,
):
    """The message names what is wrong once, before a run directory is created."""
    run = attributed(*overrides, code=2)
    message = " ".join(capsys.readouterr().err.split())
    assert message.count(said) == 1
    assert not run.path.exists()


def test_settings_of_attribution_are_refused_elsewhere():
    """Settings of attribution are refused in training, where they have no effect."""
    assert cli.main(["attribute.tokens=9"]) == 2
