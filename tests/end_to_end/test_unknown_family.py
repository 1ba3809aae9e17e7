"""A model of an unknown family: trained, and loaded by PEFT alone."""

from __future__ import annotations

import json

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.model import sources

# Each has a peculiarity: multipliers, one fused matrix, plain MLPs. StableLM's layers do not
# pass the document boundaries on.
CONFIGS = {
    "granite": {"num_key_value_heads": 2},
    "stablelm": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "starcoder2": {"num_key_value_heads": 2},
}

LOSES = ("stablelm", True)


@pytest.fixture
def novel(tmp_path):
    """Let transformers create and save a small random model with a wide spread of weights."""

    def saved(name):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            name,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=320,
            max_position_embeddings=256,
            initializer_range=0.15,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **CONFIGS[name],
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        sources.write_byte_level_tokenizer(tmp_path / name)
        return tmp_path / name

    return saved


@pytest.mark.parametrize(
    ("name", "packing"),
    [(name, packing) for name in CONFIGS for packing in (True, False) if (name, packing) != LOSES],
)
def test_peft_reproduces_the_loss(
    name,
    packing,
    novel,
    train_in,
    peft_loss,
    tmp_path,
):
    """In f32 on NF4, one document at a time: no document leaked, and no layer was missed."""
    run = train_in(
        tmp_path / "run",
        "model=hf",
        f"model.id={novel(name)}",
        f"data.packing={packing}",
        "quant.compute_dtype=f32",
        "optim.lr=5e-3",
        "data.val_max_tokens=100000",
    )
    results = Manifest.read(run.manifest).results
    assert results["tuned_val_loss"] < 0.99 * results["base_val_loss"]
    assert peft_loss(run) == pytest.approx(results["tuned_val_loss"], rel=1e-3)


def test_it_merges_whole_and_names_what_wants_a_known_family(
    novel,
    train_in,
    tmp_path,
    capsys,
):
    """The merge has its certificate; mode=subset and GGUF list the known families."""
    run = train_in(
        tmp_path / "run",
        "model=hf",
        f"model.id={novel('granite')}",
        "quant.compute_dtype=f32",
        "optim.lr=5e-3",
    )
    merge = ["task=merge", "logger=none", f"path={run.path}", "parity.tokens=64", "merge.dtype=f32"]
    assert cli.main([*merge, f"out={tmp_path / 'a'}", f"hydra.run.dir={tmp_path / 'm'}"]) == 0
    capsys.readouterr()
    refused = [
        [*merge, "merge.mode=subset", f"out={tmp_path / 'b'}"],
        ["task=export", "export.format=gguf", f"path={run.path}", f"out={tmp_path / 'c'}"],
    ]
    for number, command in enumerate(refused):
        assert cli.main([*command, f"hydra.run.dir={tmp_path / str(number)}"]) == 2
        said = capsys.readouterr().err
        assert "granite" in said
        assert "qwen2" in said
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "c").exists()


def test_a_family_that_drops_the_bounds_is_refused_when_packed(
    novel,
    train_in,
    tmp_path,
    capsys,
):
    """Otherwise each position would silently see all the others, or none."""
    train_in(tmp_path / "run", "model=hf", f"model.id={novel(LOSES[0])}", code=2)
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot keep packed documents apart" in said
    assert "data.packing=false" in said


def test_weights_that_would_be_random_are_refused(
    tiny_base,
    train_in,
    tmp_path,
    capsys,
):
    """Llama's weights under Qwen 3's name lack the norms of queries and keys."""
    directory = tmp_path / "base"
    directory.mkdir()
    for file in tiny_base.directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    train_in(tmp_path / "run", "model=hf", f"model.id={directory}", code=2)
    said = " ".join(capsys.readouterr().err.split())
    assert "the checkpoint lacks weights" in said
    assert "k_norm.weight" in said
