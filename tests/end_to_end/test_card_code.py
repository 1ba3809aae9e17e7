"""The code of a run's model card loads the run's PEFT directory on its base."""

from __future__ import annotations

import re
import shlex
import shutil

import peft
import pytest
import torch
import transformers

from mens_exp import cli, load_run
from mens_exp.artifacts.manifest import Manifest


def code_of(card):
    """Return the code block of a model card."""
    [block] = re.findall(r"```python\n(.*?)```", card.read_text("utf-8"), re.DOTALL)
    return block


def loaded(block, monkeypatch, place):
    """Write the base with the command in the block, then execute it; return model and tokenizer."""
    monkeypatch.chdir(place)
    [command] = re.findall(r"^# python -m mens_exp (.*)$", block, re.MULTILINE)
    assert cli.main([*shlex.split(command), "hydra.run.dir=record"]) == 0
    names = {}
    exec(block, names)
    model, tokenizer = names["model"], names["tokenizer"]
    assert isinstance(model, peft.PeftModel)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    return model, tokenizer


@pytest.mark.parametrize("overrides", [[], ["backend=lora"]], ids=["qlora", "lora"])
def test_the_code_of_the_card_runs_as_it_stands(finished_with, tmp_path, monkeypatch, overrides):
    """Its command writes the base first; the logits are the run's, within bf16."""
    run = finished_with(*overrides)
    block = code_of(run.model_card)
    assert Manifest.read(run.manifest).inputs["base_weights_sha256"][:12] in block
    shutil.copytree(run.peft, tmp_path / "adapter" / "peft")
    model, tokenizer = loaded(block, monkeypatch, tmp_path)
    assert tokenizer.chat_template == run.chat_template.read_text("utf-8")
    asked = [{"role": "user", "content": "Add 3."}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    ours = load_run(run.path).model("cpu")
    with torch.no_grad():
        found, expected = model(input_ids=ids).logits.float(), ours(input_ids=ids).logits.float()
        with model.disable_adapter():
            base = model(input_ids=ids).logits.float()
    assert float((found - expected).abs().max()) < 0.05
    assert float((found - base).abs().max()) > 1e-3


def test_the_card_of_an_export_loads_its_directory(finished, tmp_path, monkeypatch, capsys):
    """The moved directory still has its tokenizer and chat template."""
    out = tmp_path / "out"
    words = ["task=export", "export.format=peft", f"path={finished.path}", f"out={out}"]
    assert cli.main([*words, f"hydra.run.dir={tmp_path / 'export'}"]) == 0
    said = capsys.readouterr().out
    assert "All 14 tensors were read back" in said
    assert "task=export path=base export.format=hf model=tiny_llama out=tiny_llama" in said
    out = out.rename(tmp_path / "elsewhere")
    block = code_of(out / "README.md")
    model, tokenizer = loaded(block, monkeypatch, out)
    assert tokenizer.chat_template == finished.chat_template.read_text("utf-8")
    ids = torch.tensor([[5, 6, 7, 8]])
    ours = load_run(finished.path).model("cpu")
    with torch.no_grad():
        assert float((model(input_ids=ids).logits - ours(input_ids=ids).logits).abs().max()) < 0.05
