from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from mens_exp.layout import hub
from mens_exp.layout.hub import shipped_config

# Parameters as counted on the hub's pages, from safetensors headers.
PARAMETERS = {
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "openai-community/gpt2": 124_439_808,
}


def test_models_of_the_presets_are_shipped():
    """No other model's dimensions are shipped."""
    folder = Path(hub.__file__).parent / "shipped"
    ids = {json.loads(file.read_text("utf-8"))["id"] for file in folder.iterdir()}
    assert ids == PARAMETERS.keys()
    assert shipped_config("someone/else") is None


@pytest.mark.parametrize("model_id", PARAMETERS)
def test_dimensions_are_those_of_the_published_model(model_id):
    """The parameters of transformers' model on the meta device equal the published number."""
    import torch
    from transformers import AutoModelForCausalLM

    config = shipped_config(model_id)
    assert config is not None
    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[model_id]
