"""The code of a run's own card loads the PEFT directory that the run wrote."""

from __future__ import annotations

import re

import peft
import pytest
import torch
import transformers

from mens_exp import cli, load_run
from mens_exp.artifacts.manifest import Manifest


def code_of(card):
    """Return the code block of a card, as a reader copies it."""
    [block] = re.findall(r"```python\n(.*?)```", card.read_text("utf-8"), re.DOTALL)
    return block


def loaded(block, monkeypatch, place):
    """Execute a block in a directory; return its model and its tokenizer."""
    monkeypatch.chdir(place)
    names = {}
    exec(block, names)
    model, tokenizer = names["model"], names["tokenizer"]
    assert isinstance(model, peft.PeftModel)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    return model, tokenizer


@pytest.mark.parametrize("overrides", [[], ["backend=lora"]], ids=["qlora", "lora"])
def test_the_code_of_the_card_runs_as_it_stands(finished_with, tiny_base, monkeypatch, overrides):
    """But for the base, which is local and said to be; the model is the run's, within bf16."""
    run = finished_with(*overrides)
    inputs = Manifest.read(run.manifest).inputs
    block = code_of(run.model_card)
    line = f'base_name = "{inputs["base_model"]}"  # no id of the hub: write its directory here'
    assert line in block
    assert inputs["base_weights_sha256"][:12] in block
    block = block.replace(line, f"base_name = {str(tiny_base.directory)!r}  #")
    model, tokenizer = loaded(block, monkeypatch, run.path)
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


def test_the_card_of_an_export_loads_its_directory(finished, tiny_base, tmp_path, monkeypatch):
    """With the tokenizer and the template that are in it, wherever it is moved."""
    out = tmp_path / "out"
    words = ["task=export", "format=peft", f"path={finished.path}", f"out={out}"]
    assert cli.main([*words, f"hydra.run.dir={tmp_path / 'export'}"]) == 0
    out = out.rename(tmp_path / "elsewhere")
    block, base = code_of(out / "README.md"), Manifest.read(finished.manifest).inputs["base_model"]
    assert f'base_name = "{base}"  # no id of the hub' in block
    block = block.replace(f'base_name = "{base}"', f"base_name = {str(tiny_base.directory)!r}")
    model, tokenizer = loaded(block, monkeypatch, out)
    assert tokenizer.chat_template == finished.chat_template.read_text("utf-8")
    ids = torch.tensor([[5, 6, 7, 8]])
    ours = load_run(finished.path).model("cpu")
    with torch.no_grad():
        assert float((model(input_ids=ids).logits - ours(input_ids=ids).logits).abs().max()) < 0.05
