from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mens_exp.errors import ModelFileError
from mens_exp.layout.checkpoint_files import license_of, read_directory

INDEX = "model.safetensors.index.json"


def refusal(path):
    with pytest.raises(ModelFileError) as caught:
        read_directory(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


def single(base):
    """Replace the shards by a single file."""
    for file in [*base.glob("shard-*"), base / INDEX]:
        file.unlink()
    save_file({"a": np.zeros(2, np.float16)}, base / "model.safetensors")
    return base


def reindex(base, index):
    (base / INDEX).write_text(json.dumps(index), "utf-8")
    return base


def test_shards_are_read_by_their_index(base):
    """All tensors of both shards are read, in shard order."""
    found = read_directory(base)
    assert [shard.name for shard in found.shards] == ["shard-0.safetensors", "shard-1.safetensors"]
    assert len(found.tensors) == 14
    assert found.tensors["model.layers.1.mlp.down_proj.weight"].shape == (64, 128)
    assert found.config["hidden_size"] == 64


def test_single_file_needs_no_index(base):
    """`model.safetensors` alone is enough."""
    found = read_directory(single(base))
    assert found.shards == (base / "model.safetensors",)
    assert list(found.tensors) == ["a"]


def test_single_file_wins_over_an_index(base):
    """The single file is the one that transformers would load."""
    save_file({"a": np.zeros(2, np.float16)}, base / "model.safetensors")
    assert list(read_directory(base).tensors) == ["a"]


def test_absent_shard_is_refused(base):
    """The error names the shard listed in the index."""
    (base / "shard-1.safetensors").unlink()
    message = refusal(base)
    assert str(base / INDEX) in message
    assert "found shard-1.safetensors" in message


def test_truncated_shard_is_refused(base):
    """The error names the shard."""
    shard = base / "shard-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    message = refusal(base)
    assert "truncated" in message
    assert str(shard) in message


def test_tensor_that_no_shard_holds_is_refused(base):
    """Loading would initialize it randomly."""
    weight_map = json.loads((base / INDEX).read_text("utf-8"))["weight_map"]
    message = refusal(
        reindex(base, {"weight_map": weight_map | {"lm_head.weight": "shard-0.safetensors"}})
    )
    assert "found lm_head.weight, 1 in all" in message


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_index_that_lists_nothing_is_refused(base, index):
    """The model would have no weights."""
    assert "does not list any tensors" in refusal(reindex(base, index))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "is not a JSON object"),
        ("config.json", None, "is missing or unreadable"),
        ("tokenizer.json", None, "is missing"),
        (INDEX, "{", "is not JSON"),
    ],
)
def test_damaged_file_is_named(base, name, content, reason):
    """Every required file is tried."""
    if content is None:
        (base / name).unlink()
    else:
        (base / name).write_text(content, "utf-8")
    message = refusal(base)
    assert str(base / name) in message
    assert reason in message


def test_directory_without_weights_is_refused(base):
    """Only safetensors are read."""
    (single(base) / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(b"x")
    assert "contains no safetensors weights" in refusal(base)


def test_path_that_is_no_directory_is_refused(tmp_path):
    """The message says what a model directory contains."""
    message = refusal(tmp_path / "nowhere")
    assert message.startswith("model.id: is not a directory")
    assert "config.json, safetensors and tokenizer.json" in message


@pytest.mark.parametrize(
    ("card", "stated"),
    [
        ("---\nlicense: apache-2.0\ntags: [x]\n---\n# A model\n", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: tiny-terms\n---\n", "tiny-terms"),
        ("---\ntags: [x]\n---\n", None),
        ("---\nlicense: [mit, gpl]\n---\n", None),
        ("---\n: [\n---\n", None),
        ("---\nmit\n---\n", None),
        ("# A model\n", None),
        (None, None),
    ],
)
def test_licence_is_what_the_card_states(tmp_path, card, stated):
    """It is read from the metadata of README.md and never guessed."""
    if card is not None:
        (tmp_path / "README.md").write_text(card, "utf-8")
    assert license_of(tmp_path) == stated
