from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from mens_exp.errors import ModelFileError
from mens_exp.layout.checkpoint_files import TensorInfo, read_header
from mens_exp.model.stored_weights import StoredRows

TENSORS = {
    "w": torch.arange(12, dtype=torch.bfloat16).view(4, 3),
    "b": torch.arange(3, dtype=torch.float32),
    "s": torch.tensor(5),
    "none": torch.zeros(0, 2),
}


@pytest.fixture
def shard(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("name", TENSORS)
def test_rows_are_the_tensor_s_own(shard, name):
    """Rows have their stored dtype, and a scalar is one row."""
    rows = StoredRows(shard, name, read_header(shard)[name])
    found = rows.read(0, rows.rows)
    assert found.dtype == TENSORS[name].dtype
    assert torch.equal(found.reshape(TENSORS[name].shape), TENSORS[name])


def test_a_part_of_the_rows_is_read(shard):
    """Rows 1 and 2 of four are read."""
    rows = StoredRows(shard, "w", read_header(shard)["w"])
    assert torch.equal(rows.read(1, 3), TENSORS["w"][1:3])


def test_a_file_that_ends_early_and_an_unknown_type_are_refused(shard):
    """Rows must not be missing silently."""
    info = read_header(shard)["b"]
    long = TensorInfo(info.dtype, (1000,), info.start, info.end)
    with pytest.raises(ModelFileError, match="ended while it was read"):
        StoredRows(shard, "b", long).read(0, 1000)
    odd = TensorInfo("F8_E4M3", (1,), 0, 1)
    with pytest.raises(ModelFileError, match=r"b: cannot be read as a tensor.*found F8_E4M3"):
        StoredRows(shard, "b", odd)
