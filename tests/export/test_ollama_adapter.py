"""Adapters for Ollama, applied by llama.cpp's rule, written out here.

It adds ``alpha / rank · B A`` to the tensor of the base's GGUF file that the pair is named after.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from mens_exp import cli
from mens_exp.artifacts.certificate import Certificate
from mens_exp.config.task import GgufDtype
from mens_exp.export.gguf import write_gguf

gguf = pytest.importorskip("gguf", reason="gguf is missing: pip install 'mens-exp[gguf]'")

FORM = ("export.format=ollama", "ollama.form=adapter")
PREFIX = "base_model.model."


def exported(run, out, *words, code=0):
    command = ["task=export", f"path={run.path}", *words, f"out={out}", "parity.tokens=64"]
    assert cli.main([*command, f"hydra.run.dir={out}_run"]) == code
    return out


def pairs(directory):
    """Return A and B by module, as written."""
    found = load_file(directory / "adapter_model.safetensors")
    halves = ("lora_A.weight", "lora_B.weight")
    assert all(name.endswith(halves) for name in found)
    modules = {name.rsplit(".", 2)[0] for name in found}
    return {one: tuple(found[f"{one}.{half}"] for half in halves) for one in modules}


def scale_of(config, module, rank):
    """Return the scale of a layer by PEFT's rule."""
    path = module.removeprefix(PREFIX).replace(".", r"\.")
    alpha = config["alpha_pattern"].get(path, config["lora_alpha"])
    return alpha / (rank**0.5 if config["use_rslora"] else rank)


@pytest.mark.parametrize(
    "overrides",
    [
        ("lora.r=4", "lora.alpha=6"),
        ("lora.variant=rslora", "lora.r=4", "lora.alpha=6"),
        ("lora.alpha_pattern={q_proj:64}",),
        ("lora.rank_pattern={v_proj:3}",),
        ("lora.variant=rslora", "lora.rank_pattern={v_proj:3}", "lora.alpha_pattern={o_proj:5}"),
    ],
)
def test_ollama_applies_what_was_trained(finished_with, overrides, tmp_path):
    """Alpha over the rank of the written pair gives the delta of the run's own PEFT directory."""
    run = finished_with(*overrides, "optim.lr=1e-2")
    out = exported(run, tmp_path / "out", *FORM)
    config = json.loads((out / "adapter_config.json").read_text("utf-8"))
    assert type(config["lora_alpha"]) is int
    assert (config["use_rslora"], config["alpha_pattern"]) == (False, {})
    own = json.loads((run.peft / "adapter_config.json").read_text("utf-8"))
    trained, written = pairs(run.peft), pairs(out)
    assert trained.keys() == written.keys()
    for module, (A, B) in written.items():
        rank = B.shape[1]
        found = config["lora_alpha"] / rank * B.astype(np.float64) @ A
        A_own, B_own = trained[module]
        expected = scale_of(own, module, rank) * B_own.astype(np.float64) @ A_own
        assert np.linalg.norm(expected) > 0
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
        assert scale_of(config, module, rank) == config["lora_alpha"] / rank
    assert Certificate.read(out / "parity.json").passed


def matrices(file):
    return {one.name: np.array(one.data, np.float64) for one in gguf.GGUFReader(file).tensors}


ALL_PATTERNS = ("lora.rank_pattern={v_proj:3}", "lora.alpha_pattern={q_proj:5}")


@pytest.mark.parametrize(
    ("family", "architecture", "overrides"),
    [
        ("llama", "llama", ()),
        ("llama", "llama", ("lora.variant=rslora", *ALL_PATTERNS)),
        ("mistral", "llama", ()),
        ("qwen2", "qwen2", ()),
        ("qwen3", "qwen3", ("lora.variant=rslora", *ALL_PATTERNS)),
    ],
)
def test_base_and_adapter_are_the_merged_model(
    finished_with, source_of, family, architecture, overrides, tmp_path
):
    """In f32 files of the same base, with Llama's rows of q and k reordered in all three."""
    base = source_of(family)
    model = ("model=hf", f"model.id={base}", "backend=lora", "quant.compute_dtype=f32")
    run = finished_with(*model, *overrides, "optim.lr=1e-2")
    file = exported(run, tmp_path / "adapter", *FORM) / "adapter.gguf"
    merged = exported(run, tmp_path / "merged", "export.format=gguf", "gguf.dtype=f32")
    write_gguf(base, tmp_path / "base.gguf", GgufDtype.f32)
    found, pairs = matrices(tmp_path / "base.gguf"), matrices(file)
    fields = gguf.GGUFReader(file).fields
    assert fields["general.type"].contents() == "adapter"
    assert fields["adapter.type"].contents() == "lora"
    assert fields["general.architecture"].contents() == architecture
    alpha = fields["adapter.lora.alpha"].contents()
    for name in [one.removesuffix(".lora_a") for one in pairs if one.endswith(".lora_a")]:
        A, B = pairs[f"{name}.lora_a"], pairs[f"{name}.lora_b"]
        assert np.abs(B).max() > 0
        found[name] += alpha / B.shape[1] * B @ A
    expected = matrices(merged / "model.gguf")
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-7)


def test_ollama_is_given_the_file(finished, tmp_path):
    """Ollama's own conversion of a PEFT directory applies q and k otherwise."""
    text = (exported(finished, tmp_path / "out", *FORM) / "Modelfile").read_text("utf-8")
    assert "\nADAPTER ./adapter.gguf\n" in text


def test_gguf_is_needed(finished, tmp_path, monkeypatch, capsys):
    """The extra is named before a run directory is created."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    exported(finished, tmp_path / "out", *FORM, code=3)
    assert "pip install 'mens-exp[gguf]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_plain_adapter_keeps_its_bytes(finished, tmp_path):
    """Ollama's directory has the tensors of PEFT's."""
    out = exported(finished, tmp_path / "ollama", *FORM)
    peft = exported(finished, tmp_path / "peft", "export.format=peft")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (out / name).read_bytes() == (peft / name).read_bytes()


def test_a_scale_that_ollama_ignores_is_not_certified(finished_with, tmp_path, monkeypatch, capsys):
    """PEFT would read the directory as trained."""
    monkeypatch.setattr("mens_exp.tasks.merge.for_ollama", lambda *adapter: adapter)
    run = finished_with("lora.variant=rslora", "lora.r=4", "lora.alpha=6", "optim.lr=1e-2")
    exported(run, tmp_path / "out", *FORM, code=4)
    assert "relative" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("lora.variant=dora",), "DoRA"),
        (("lora.targets=[lm_head,q_proj]",), "adapters of the head"),
        (("model=tiny_gpt2",), "adapters of gpt2 models"),
    ],
)
def test_what_ollama_does_not_load_is_refused(finished_with, overrides, said, tmp_path, capsys):
    """Exit code 2 before a run directory is created; the merged model is the remedy."""
    run = finished_with(*overrides)
    exported(run, tmp_path / "out", *FORM, code=2)
    text = " ".join(capsys.readouterr().err.split())
    assert f"Ollama does not load {said}" in text
    assert "export.format=ollama without ollama.form=adapter" in text
    assert list(tmp_path.iterdir()) == []
