from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mens_exp.config.model import HfModel, RandomModel, WeightsDtype
from mens_exp.planning.checks import model as checks


@pytest.fixture
def base(tiny_base, tmp_path):
    """A copy of tiny_llama's directory, to be modified."""
    return Path(shutil.copytree(tiny_base.directory, tmp_path / "base"))


@pytest.fixture
def problems_of(tiny_config):
    def found(model):
        config = tiny_config("data.seq_len=64")
        config.model = model
        return list(checks.check_model(config))

    return found


def configure(base, **changes):
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


def test_every_family_is_accepted(family_base, problems_of):
    """The directories are those saved for the backend tests."""
    for name in (
        "llama",
        "gpt2",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma2",
        "gemma3_text",
        "olmo2",
    ):
        assert problems_of(HfModel(id=str(family_base(name).directory))) == [], name


def test_a_table_of_positions_ends_where_it_ends(family_base, tiny_config):
    """n_positions of GPT-2 is 256: it allows 256 tokens, not 257."""
    for seq_len, refused in ((256, False), (257, True)):
        config = tiny_config(f"data.seq_len={seq_len}")
        config.model = HfModel(id=str(family_base("gpt2").directory))
        assert bool(list(checks.check_model(config))) is refused


def test_fused_weights_are_held_to_their_widths(
    family_base,
    problems_of,
    tmp_path,
):
    """The fused gate and up matrix of Phi-3 has 2 * 96 rows; the down projection has width 96."""
    directory = Path(shutil.copytree(family_base("phi3").directory, tmp_path / "phi3"))
    tensors = load_file(directory / "model.safetensors")
    for layer in range(2):
        gate_up = f"model.layers.{layer}.mlp.gate_up_proj.weight"
        down = f"model.layers.{layer}.mlp.down_proj.weight"
        tensors[gate_up] = tensors[gate_up][:192].contiguous()
        tensors[down] = tensors[down][:, :96].contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    configure(directory, intermediate_size=96)
    (problem,) = problems_of(HfModel(id=str(directory)))
    assert str(problem.where).endswith("mlp.down_proj")
    assert problem.found == "width 96"


def test_quantized_weights_are_refused(base, problems_of):
    """config.json tells, and if it says nothing, the dtype in the safetensors header."""
    assert problems_of(HfModel(id=str(base))) == []
    configure(base, quantization_config={"quant_method": "gptq"})
    (problem,) = problems_of(HfModel(id=str(base)))
    assert (problem.what, problem.found) == ("the weights are quantized already", "gptq")
    configure(base, quantization_config=None)
    tensors = load_file(base / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    (problem,) = problems_of(HfModel(id=str(base)))
    assert problem.found == "F8_E4M3"


def test_masks_beside_the_weights_are_left_alone(base, problems_of):
    """Old GPT-2 checkpoints contain boolean buffers."""
    tensors = load_file(base / "model.safetensors")
    tensors["h.0.attn.bias"] = torch.ones(2, 2, dtype=torch.bool)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    assert problems_of(HfModel(id=str(base))) == []


@pytest.mark.parametrize(
    ("auto_map", "trust", "reason"),
    [
        (None, False, None),
        ({"AutoModelForCausalLM": "code.Model"}, False, None),
        ({"AutoModelForCausalLM": "code.Model"}, True, None),
        (None, True, "has no effect"),
        ({"AutoConfig": "code.Config"}, True, "has no effect"),
        ({"AutoModelForCausalLM": "other/place--code.Model"}, True, "in another repository"),
    ],
)
def test_remote_code_is_run_only_where_there_is_some(
    base,
    problems_of,
    auto_map,
    trust,
    reason,
):
    """trust_remote_code is refused if it has no effect, or if the commit does not pin the code."""
    configure(base, auto_map=auto_map)
    problems = problems_of(HfModel(id=str(base), trust_remote_code=trust))
    assert bool(problems) is (reason is not None)
    assert all(reason in problem.what for problem in problems if reason)


def test_random_weights_need_room(problems_of, monkeypatch):
    """Two layers of 40,960 weights and a 320 * 64 table: 409,600 bytes in float32, half in bf16."""
    monkeypatch.setattr(checks, "space", lambda path: (path, 300_000))
    model = RandomModel(name="roomy", init_seed=987, num_attention_heads=2)
    (problem,) = problems_of(model)
    assert problem.expected == "409,600 bytes"
    assert problem.exit_code == 3
    model.dtype = WeightsDtype.bf16
    assert problems_of(model) == []


def test_a_plan_draws_no_weights(tiny_config, monkeypatch):
    """A plan lists the full disk among its problems instead of failing."""
    monkeypatch.setattr(checks, "space", lambda path: (path, 0))
    config = tiny_config("task=plan", "data.seq_len=64")
    config.model = RandomModel(name="roomy", init_seed=987, num_attention_heads=2)
    assert list(checks.check_model(config)) == []


def test_a_cache_that_is_not_there_yet_has_the_room_of_its_disk(problems_of, tmp_path, monkeypatch):
    """On a new machine the folder does not exist yet."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "new" / "cache"))
    model = RandomModel(name="roomy", init_seed=987, num_attention_heads=2)
    assert problems_of(model) == []
