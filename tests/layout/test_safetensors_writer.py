"""Files written tensor by tensor, read back with the safetensors library."""

from __future__ import annotations

import io

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from mens_exp.layout.checkpoint_files import Outline, SafetensorsWriter, read_header

TENSORS = {
    "odd": np.arange(3, dtype=np.uint8),
    "wide": np.arange(6, dtype=np.float32).reshape(2, 3),
    "none": np.zeros((0, 4), np.float16),
    "half": np.arange(5, dtype=np.float16),
    "scalar": np.array(7, np.int64),
}
KINDS = {"uint8": "U8", "float32": "F32", "float16": "F16", "int64": "I64"}
OUTLINES = {
    name: Outline(dtype=KINDS[str(one.dtype)], shape=one.shape) for name, one in TENSORS.items()
}


def written(file, step=1 << 20, metadata=None):
    writer = SafetensorsWriter(file, OUTLINES, metadata)
    for name in writer.order:
        data = TENSORS[name].tobytes()
        for start in range(0, len(data), step):
            writer.write(name, data[start : start + step])
    writer.close()
    return writer.order


@pytest.mark.parametrize("step", [1, 5, 1 << 20])
def test_tensors_come_back_however_they_were_cut(tmp_path, step):
    """Types, shapes and values round-trip, scalars and empty tensors included."""
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        written(file, step, {"format": "pt"})
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)
    with safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert read_header(path).keys() == TENSORS.keys()


def test_wide_types_come_first_and_equal_tensors_give_equal_bytes():
    """Each tensor is then aligned to its type."""
    one, two = io.BytesIO(), io.BytesIO()
    assert written(one) == ["scalar", "wide", "none", "half", "odd"]
    written(two, 3)
    assert one.getvalue() == two.getvalue()


def test_a_tensor_out_of_turn_too_long_or_too_short_is_a_bug():
    """The data must match the header."""
    outlines = {"a": Outline(dtype="U8", shape=(2,)), "b": Outline(dtype="U8", shape=(1,))}
    with pytest.raises(AssertionError, match="a comes first"):
        SafetensorsWriter(io.BytesIO(), outlines).write("b", b"1")
    with pytest.raises(AssertionError, match="a has more bytes"):
        SafetensorsWriter(io.BytesIO(), outlines).write("a", b"123")
    writer = SafetensorsWriter(io.BytesIO(), outlines)
    writer.write("a", b"12")
    with pytest.raises(AssertionError, match="b is not whole"):
        writer.close()
