from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mens_exp.errors import ModelFileError
from mens_exp.layout.checkpoint_files import TensorInfo, read_header

ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


def write(file, header, data=b"", *, length=None):
    """Write a file whose header is given as an object or as bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    file.write_bytes(size.to_bytes(8, "little") + raw + data)
    return file


def refusal(file):
    with pytest.raises(ModelFileError) as caught:
        read_header(file)
    assert caught.value.exit_code == 2
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_header_of_a_written_file_is_read(file):
    """Types, shapes and offsets equal those that the reference implementation wrote."""
    save_file(
        {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int64)}, file, {"format": "pt"}
    )
    found = read_header(file)
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I64", (4,)),
    }
    assert sorted(info.end - info.start for info in found.values()) == [24, 32]


def test_scalar_and_empty_tensors_are_read(file):
    """A scalar has one element and an empty tensor none; both may start at one offset."""
    header = {
        "full": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
        "empty": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]},
    }
    assert read_header(write(file, header, b"x")) == {
        "full": TensorInfo("U8", (), 0, 1),
        "empty": TensorInfo("F32", (0, 4), 0, 0),
    }


def test_file_without_tensors_is_read(file):
    """The smallest possible header is accepted."""
    assert read_header(write(file, {})) == {}


@pytest.mark.parametrize("kept", [0, 3, 8, 20])
def test_file_cut_in_its_header_is_refused(file, kept):
    """Nothing, part of the length, or part of the JSON is left."""
    whole = write(file, ONE, bytes(8)).read_bytes()
    file.write_bytes(whole[:kept])
    message = refusal(file)
    assert "truncated inside its header" in message
    assert f"found {kept} bytes" in message


def test_file_cut_in_its_data_is_refused(file):
    """One byte is missing."""
    message = refusal(write(file, ONE, bytes(7)))
    assert "the file is truncated" in message
    assert "found 7 bytes of data · expected 8" in message


def test_file_with_bytes_to_spare_is_refused(file):
    """One extra byte belongs to no tensor."""
    assert "extra bytes at its end" in refusal(write(file, ONE, bytes(9)))


@pytest.mark.parametrize("length", [1_000_000_000, 2**64 - 1])
def test_header_length_beyond_reason_is_refused_unread(file, length):
    """A gigabyte is not allocated before the check."""
    assert f"found {length} bytes" in refusal(write(file, b"{}", length=length))


@pytest.mark.parametrize(
    "raw",
    [
        b"not JSON",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"a": 1}',
        b'{"a": {}}',
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8]}}',
        b'{"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}',
        b"[" * 100_000,
    ],
    ids=lambda raw: raw[:60].decode("latin-1"),
)
def test_header_of_another_form_is_refused(file, raw):
    """Any other JSON gives an error that names the file."""
    assert "not a safetensors header" in refusal(write(file, raw, bytes(8)))


def test_unknown_dtype_is_refused(file):
    """The error names the tensor."""
    header = {"layers.a": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 1]}}
    message = refusal(write(file, header, bytes(1)))
    assert "unknown dtype" in message
    assert "layers.a" in message
    assert "found Q4" in message


@pytest.mark.parametrize("offsets", [[0, 4], [0, 12], [8, 0], [4, 8]])
def test_offsets_that_lie_about_the_size_are_refused(file, offsets):
    """Two F32 values take eight bytes."""
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}
    message = refusal(write(file, header, bytes(8)))
    assert "offsets disagree" in message
    assert "expected 8 for [2] F32" in message


@pytest.mark.parametrize(
    "second", [[12, 20], [4, 12], [0, 8], [-8, 0]], ids=["hole", "overlap", "same", "before"]
)
def test_tensors_must_follow_each_other(file, second):
    """Gaps, overlaps and leading bytes are refused."""
    header = ONE | {"b": {"dtype": "F32", "shape": [2], "data_offsets": second}}
    assert "overlap or leave a gap" in refusal(write(file, header, bytes(20)))


def test_absent_file_is_refused(file):
    """The error includes the system's message."""
    assert "cannot be read" in refusal(file)
