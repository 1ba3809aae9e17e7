"""The code of a run's own card loads the PEFT directory that the run wrote."""

from __future__ import annotations

import re

import peft
import pytest
import torch
import transformers

from mens_exp import load_run
from mens_exp.artifacts.manifest import Manifest


def code_of(run):
    """Return the code block of a card, as a reader copies it."""
    [block] = re.findall(r"```python\n(.*?)```", run.model_card.read_text("utf-8"), re.DOTALL)
    return block


@pytest.mark.parametrize("overrides", [[], ["backend=lora"]], ids=["qlora", "lora"])
def test_the_code_of_the_card_runs_as_it_stands(finished_with, tiny_base, monkeypatch, overrides):
    """But for the base, which is local and said to be; the model is the run's, within bf16."""
    run = finished_with(*overrides)
    inputs = Manifest.read(run.manifest).inputs
    block = code_of(run)
    line = f'base_name = "{inputs["base_model"]}"  # no id of the hub: write its directory here'
    assert line in block
    assert inputs["base_weights_sha256"][:12] in block
    monkeypatch.chdir(run.path)
    names = {}
    exec(block.replace(line, f"base_name = {str(tiny_base.directory)!r}  #"), names)
    model, tokenizer = names["model"], names["tokenizer"]
    assert isinstance(model, peft.PeftModel)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
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
