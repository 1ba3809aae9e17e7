from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from mens_exp.errors import MensError
from mens_exp.export.handoff import (
    BackendFamily,
    read_handoff,
    serve_command,
    vllm_problems,
    write_vllm,
)

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tmp_path):
    """Write a PEFT adapter of rank 4 for one layer."""

    def made(*, layer=LAYER, rank=4, **changes):
        place = tmp_path / "peft"
        place.mkdir()
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
        config |= {"bias": "none", "use_dora": False, "rank_pattern": {}, **changes}
        (place / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        weights = {
            f"{layer}.lora_A.weight": torch.ones(rank, 6),
            f"{layer}.lora_B.weight": torch.ones(5, rank),
        }
        save_file(weights, place / "adapter_model.safetensors")
        return place

    return made


@pytest.mark.parametrize(
    ("rank", "room"), [(1, 1), (4, 8), (16, 16), (33, 64), (300, 320), (512, 512)]
)
def test_the_command_makes_room_for_the_rank(rank, room):
    """The engine accepts only certain ranks; the next larger one is used."""
    assert serve_command("org/base", "mine", "out dir", rank) == (
        f"vllm serve org/base --enable-lora --lora-modules 'mine=out dir' --max-lora-rank {room}"
    )


def test_the_directory_holds_the_adapter_the_command_and_the_record(adapter, tmp_path):
    """The adapter's files are copied unchanged, and a second export gives the same bytes."""
    source = adapter()
    for name in ("a", "b"):
        write_vllm(source, tmp_path / name, base="org/base", name="mine")
    found = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert found[name] == (source / name).read_bytes()
    command = serve_command("org/base", "mine", ".", 4)
    assert command in found["README.md"].decode()
    record = read_handoff(tmp_path / "a")
    assert record.backend_family is BackendFamily.VLLM
    assert (record.base_model, record.adapter_path) == ("org/base", ".")
    assert record.notes == command


def test_what_a_run_leaves_is_served(finished):
    """A run's adapter for all linear layers, in PEFT's format, is accepted."""
    assert vllm_problems(finished.peft) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "saved whole"),
        ({"rank_pattern": {"q_proj": 2}}, "a different rank"),
        ({"alpha_pattern": {"q_proj": 2}}, "a different alpha"),
        ({"trainable_token_indices": [3]}, "trained tokens"),
        ({"bias": "all"}, "biases"),
        ({"r": 513, "rank": 513}, "of this rank .* expected 1 to 512"),
        ({"layer": "base_model.model.lm_head"}, "on the head or the embedding"),
        ({"rank": 2}, "layers of different ranks .*expected 4"),
        ({"r": "4"}, "not a configuration of a LoRA adapter"),
    ],
)
def test_what_vllm_would_serve_otherwise_is_refused(adapter, tmp_path, changes, said):
    """Nothing is written, and the message suggests task=merge where that helps."""
    with pytest.raises(MensError, match=said):
        write_vllm(adapter(**changes), tmp_path / "out", base="org/base", name="mine")
    assert not (tmp_path / "out").exists()


def test_all_problems_are_told_together(adapter):
    """Each one suggests task=merge."""
    found = vllm_problems(adapter(use_dora=True, bias="all"))
    assert len(found) == 2
    assert all("task=merge" in str(problem) for problem in found)


def test_a_directory_that_is_no_adapter_is_refused(tmp_path):
    """The message names the missing file."""
    (problem,) = vllm_problems(tmp_path)
    assert "adapter_config.json: the file cannot be read" in str(problem)
