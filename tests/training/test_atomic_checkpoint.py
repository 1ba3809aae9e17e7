from __future__ import annotations

import os

import pytest
import torch

from mens_exp.errors import DataError
from mens_exp.training.build import AtomicCheckpointIO

STATE = {"adapter": {"l0.q.lora_a": torch.arange(6.0).view(2, 3)}, "step": 7}


def test_a_checkpoint_reads_back_as_it_was_written(tmp_path):
    """It loads with weights_only; missing parent directories are created."""
    path = tmp_path / "checkpoints" / "step.ckpt"
    AtomicCheckpointIO().save_checkpoint(STATE, path)
    read = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    assert read["step"] == 7
    assert torch.equal(read["adapter"]["l0.q.lora_a"], STATE["adapter"]["l0.q.lora_a"])


def test_a_path_may_be_a_string(tmp_path):
    """Lightning passes either a path or a string."""
    AtomicCheckpointIO().save_checkpoint(STATE, str(tmp_path / "step.ckpt"))
    assert (tmp_path / "step.ckpt").is_file()


def test_a_write_that_fails_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    """If the disk is full, the earlier file stays and no temporary file remains."""
    path = tmp_path / "step.ckpt"
    AtomicCheckpointIO().save_checkpoint(STATE, path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        AtomicCheckpointIO().save_checkpoint({**STATE, "step": 8}, path)
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [tmp_path / "sha256.json", path]


def test_a_checkpoint_that_was_written_over_is_refused(tmp_path):
    """A flipped bit in a tensor, which torch.load does not detect, is refused."""
    path, plugin = tmp_path / "step_00000001.ckpt", AtomicCheckpointIO()
    plugin.save_checkpoint({"weights": torch.ones(1000)}, path)
    content = bytearray(path.read_bytes())
    at = content.index(torch.ones(4).numpy().tobytes())
    content[at + 3] ^= 0x80
    path.write_bytes(bytes(content))
    assert float(torch.load(path, weights_only=True)["weights"][0]) == -1
    with pytest.raises(DataError, match="has changed since it was written"):
        plugin.load_checkpoint(path)


def test_what_cannot_be_saved_leaves_no_file(tmp_path):
    """Serialization happens before the first byte is written."""
    with pytest.raises((AttributeError, TypeError), match="lambda"):
        AtomicCheckpointIO().save_checkpoint({"fn": lambda: None}, tmp_path / "step.ckpt")
    assert list(tmp_path.iterdir()) == []
