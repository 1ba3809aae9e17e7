"""Code that comes with a model runs only if allowed, and packing is checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mens_exp.artifacts.manifest import Manifest

GOOD = """
from pathlib import Path
from transformers import LlamaForCausalLM

Path({mark!r}).write_text("ran", "utf-8")

class TheirModel(LlamaForCausalLM):
    pass
"""
LEAKING = """
import torch
from transformers import LlamaForCausalLM, LlamaModel

class Forgetful(LlamaModel):
    def forward(self, input_ids, documents=None, attention_mask=None, **kwargs):
        return super().forward(input_ids, torch.ones_like(input_ids), **kwargs)

class TheirModel(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = Forgetful(config)
        self.post_init()
"""
STRICT = """
from transformers import LlamaForCausalLM, LlamaModel

class Strict(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None):
        return super().forward(input_ids, attention_mask, position_ids, use_cache=use_cache)

class TheirModel(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = Strict(config)
        self.post_init()
"""


@pytest.fixture
def with_code(tiny_base, tmp_path, monkeypatch):
    """Write a model directory with its own code."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))

    def made(code):
        directory = Path(shutil.copytree(tiny_base.directory, tmp_path / "theirs"))
        (directory / "their_code.py").write_text(code, "utf-8")
        config = json.loads((directory / "config.json").read_text("utf-8"))
        config["auto_map"] = {"AutoModelForCausalLM": "their_code.TheirModel"}
        (directory / "config.json").write_text(json.dumps(config), "utf-8")
        return directory

    return made


def test_code_is_not_run_unless_asked_for(with_code, train_in, tmp_path):
    """The class of transformers is used, without a prompt and without recorded code."""
    mark = tmp_path / "mark"
    directory = with_code(GOOD.format(mark=str(mark)))
    run = train_in(tmp_path / "run", "model=hf", f"model.id={directory}", "trainer.max_steps=1")
    assert not mark.exists()
    assert "trust_remote_code" not in Manifest.read(run.manifest).inputs


def test_code_that_was_asked_for_is_run_and_recorded(with_code, train_in, tmp_path):
    """It uses transformers' attention, so documents stay separate."""
    mark = tmp_path / "mark"
    directory = with_code(GOOD.format(mark=str(mark)))
    run = train_in(
        tmp_path / "run",
        "model=hf",
        f"model.id={directory}",
        "model.trust_remote_code=true",
        "trainer.max_steps=1",
    )
    assert mark.read_text("utf-8") == "ran"
    assert Manifest.read(run.manifest).inputs["trust_remote_code"] is True


@pytest.mark.parametrize(
    ("code", "found"), [(LEAKING, "another neighbour moves"), (STRICT, "unexpected keyword")]
)
def test_code_that_would_mix_documents_is_refused(
    with_code,
    train_in,
    tmp_path,
    capsys,
    code,
    found,
):
    """The error comes before the first step and says what was observed."""
    directory = with_code(code)
    train_in(
        tmp_path / "run",
        "model=hf",
        f"model.id={directory}",
        "model.trust_remote_code=true",
        code=2,
    )
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot keep packed documents apart" in said
    assert found in said
