from __future__ import annotations

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from mens_exp import cli
from mens_exp.artifacts.certificate import Certificate
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.export import gguf_layout
from mens_exp.export.handoff import BackendFamily, read_handoff


@pytest.fixture
def model(tiny_base, tmp_path, monkeypatch):
    """tiny_llama in the working directory, with one merge, which GGUF readers require."""
    source = shutil.copytree(tiny_base.directory, tmp_path / "merged")
    path = source / "tokenizer.json"
    core = json.loads(path.read_text("utf-8"))
    core["model"]["vocab"]["ab"] = 259
    core["model"]["merges"] = [["a", "b"]]
    core["pre_tokenizer"]["use_regex"] = True
    path.write_text(json.dumps(core), encoding="utf-8")
    assert Tokenizer.from_file(str(path)).encode("ab").ids == [259]
    monkeypatch.chdir(tmp_path)
    return source


def test_the_command_writes_the_file_a_modelfile_and_the_record(model, tmp_path):
    """Exporting a second time replaces the directory with the same bytes."""
    for number in ("1", "2"):
        overrides = ["export.format=gguf", "path=merged", "out=out", f"hydra.run.dir=run{number}"]
        assert cli.main(["task=export", *overrides]) == 0
    out = tmp_path / "out"
    names = ["Modelfile", "external_serving_handoff_v1.json", "model.gguf", "parity.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert (out / "Modelfile").read_text("utf-8").startswith("FROM ./model.gguf\nTEMPLATE ")
    record = read_handoff(out)
    assert record.backend_family is BackendFamily.OLLAMA
    assert (record.base_model, record.prompt_format) == ("merged", "chatml")
    first, second = (
        Manifest.read(tmp_path / f"run{number}" / "manifest.json").results["files_sha256"]
        for number in ("1", "2")
    )
    assert first == second
    assert first["model.gguf"] == sha256_file(out / "model.gguf")
    certificate = Certificate.read(out / "parity.json")
    assert certificate.passed
    assert certificate.files == first


def test_without_out_it_lies_in_the_run(model, tmp_path):
    """The directory is named after the format."""
    overrides = ["export.format=gguf", f"path={model}", "gguf.dtype=q8_0", "hydra.run.dir=run"]
    assert cli.main(["task=export", *overrides]) == 0
    assert (tmp_path / "run" / "gguf" / "model.gguf").is_file()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["export.format=gguf"], "path: nothing to export"),
        (["export.format=gguf", "path=merged", "out=merged"], "out: already exists"),
        (
            ["export.format=gguf", "path=merged", "export.checkpoints=true"],
            "has no effect with export.format=gguf",
        ),
        (["path=merged", "gguf.dtype=f32"], "has no effect with export.format=bundle"),
        (
            ["export.format=v3", "path=merged", "parity.tokens=9"],
            "has no effect with export.format=v3",
        ),
        (
            ["export.format=vllm", "path=merged", "data=stdlib"],
            "has no effect with export.format=vllm",
        ),
        (
            ["export.format=ollama", "path=merged", "model=tiny_llama"],
            "has no effect with export.format=ollama",
        ),
        (
            ["export.format=ollama", "ollama.form=adapter", "path=merged", "merge.dtype=f32"],
            "has no effect with export.format=ollama",
        ),
        (["export.format=gguf", "path=base"], "path: "),
        (["export.format=gguf", "path=merged", "gguf.dtype=q4_0"], "gguf.dtype"),
    ],
)
def test_a_command_that_asks_for_something_else_is_refused(
    model,
    tmp_path,
    overrides,
    said,
    capsys,
):
    """Exit code 2 before a run directory is created."""
    assert cli.main(["task=export", *overrides]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [model]


def test_what_is_neither_a_model_nor_an_adapter_is_refused(tmp_path, monkeypatch, capsys):
    """Exit code 2 before a run directory is created."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert cli.main(["task=export", "export.format=gguf", "path=empty"]) == 2
    assert "there is no adapter" in capsys.readouterr().err


def test_a_missing_library_is_told_before_a_run_is_opened(
    model,
    tmp_path,
    monkeypatch,
    capsys,
):
    """Exit code 3, and the message names the extra."""
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    assert cli.main(["task=export", "export.format=gguf", f"path={model}"]) == 3
    assert "pip install 'mens-exp[gguf]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("base", ["ready", "to be made"])
def test_a_tokenizer_without_merges_is_refused_before_the_merge(
    finished, base, tmp_path, monkeypatch, capsys
):
    """tiny_llama has one token per byte; if its base is cached, no run directory is created."""

    def merged(*arguments):
        raise AssertionError("the merge was computed")

    monkeypatch.setattr("mens_exp.export.merge.write_directory", merged)
    if base == "to be made":
        monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    command = [
        "task=export",
        "export.format=gguf",
        f"path={finished.path}",
        f"out={tmp_path / 'out'}",
    ]
    assert cli.main([*command, f"hydra.run.dir={tmp_path / 'record'}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "tokenizer has no merges" in said
    assert "found BPE without merges expected BPE with merges" in said
    assert "export.format=hf" in said
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "record").exists() is (base == "to be made")


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def replaced(directory, family, **values):
    """Replace the model in a directory; its weights are so large that attention matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **values)
    built = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in built.parameters():
            weight.add_(0.1 * torch.randn_like(weight)) if weight.dim() == 1 else weight.mul_(4)
    (directory / "model.safetensors").unlink()
    built.save_pretrained(directory)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {"rope_parameters": LLAMA_3}),
        ("llama", {"rope_parameters": {**LLAMA_3, "rope_type": "linear", "factor": 2.5}}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"head_dim": 24}),
        ("mistral", {"sliding_window": 16}),
        ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128}),
        ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 96}),
    ],
)
def test_a_file_is_certified_with_what_transformers_leaves_out(family, values, model, tmp_path):
    """Its reader drops rotary factors, widths, biases and positions; the file has no window."""
    size = SMALL if family != "gpt2" else {"vocab_size": 320}
    replaced(model, family, **size, **values)
    words = ["export.format=gguf", "path=merged", "out=out", "gguf.dtype=f32"]
    assert cli.main(["task=export", *words, "parity.tokens=256", "hydra.run.dir=run"]) == 0
    certificate = Certificate.read(tmp_path / "out" / "parity.json")
    assert certificate.comparisons["written"]["mean_kl"] < 1e-9
    is_cut = "cut to the file's context of 16 tokens" in certificate.probe["source"]
    assert is_cut is ("sliding_window" in values)


def test_a_file_with_other_rotary_frequencies_is_not_certified(model, monkeypatch, capsys):
    """The tensors are right, and only the factors of Llama 3's scaling are missing."""
    replaced(model, "llama", **SMALL, rope_parameters=LLAMA_3)
    monkeypatch.setattr(gguf_layout, "_rope_factors", lambda _: None)
    words = ["export.format=gguf", "path=merged", "out=out", "gguf.dtype=f32"]
    assert cli.main(["task=export", *words, "hydra.run.dir=run"]) == 4
    assert "mean_kl" in capsys.readouterr().err
