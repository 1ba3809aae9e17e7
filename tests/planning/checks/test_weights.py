from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mens_exp.config.compose import compose, typed
from mens_exp.planning.preflight import preflight

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def base(tiny_base, tmp_path):
    """A copy of tiny_llama's directory, to be damaged."""
    return Path(shutil.copytree(tiny_base.directory, tmp_path / "base"))


@pytest.fixture
def config(base):
    """A configuration that uses the directory as the user's own model."""
    return typed(
        compose([["model=hf", f"model.id={base}", "logger=none", "trainer=cpu"]])[0].values
    )


def only(config):
    """Return the only problem."""
    (problem,) = preflight(config)
    return problem


def configure(base, **changes):
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


def embed(base, array):
    tensors = load_file(base / "model.safetensors")
    del tensors[EMBEDDING]
    if array is not None:
        tensors[EMBEDDING] = array
    save_file(tensors, base / "model.safetensors")


def test_sound_directory_is_no_problem(config):
    """The intact directory, as a control for the refusals below."""
    assert preflight(config) == []


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ((320 * 64,), "of rank 1"),
        ((320, 64, 1), "of rank 3"),
        ((319, 64), "another vocabulary"),
        ((320, 128), "another width"),
    ],
)
def test_embedding_of_another_shape_is_refused(config, base, shape, what):
    """There is no fallback; the message has the tensor's name, its shape and the expected one."""
    embed(base, np.zeros(shape, np.float32))
    problem = only(config)
    assert what in str(problem)
    assert problem.where == f"{base}: {EMBEDDING}"
    assert problem.found == str(list(shape))
    assert str(problem.expected).startswith("[320, 64]")


def test_absent_embedding_is_refused(config, base):
    """The message names the keys that were tried."""
    embed(base, None)
    assert f"{EMBEDDING} or embed_tokens.weight" in str(only(config).expected)


def test_heads_that_do_not_divide_are_refused(config, base):
    """Four query heads and three KV heads; wrong shapes of k and v are reported separately."""
    configure(base, num_key_value_heads=3)
    told = next(one for one in preflight(config) if "do not divide" in str(one))
    assert str(told.where).endswith("config.json: num_key_value_heads")
    assert told.found == "4 query heads, 3 key and value heads"


def header_of(file):
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length])


def write(file, header, data):
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize("lie", ["short", "shifted", "beyond"])
def test_header_that_lies_about_offsets_is_refused(config, base, lie):
    """Too few bytes for the shape, a gap, or an end beyond the file."""
    file = base / "model.safetensors"
    header = header_of(file)
    name = max(
        (n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1]
    )
    start, end = header[name]["data_offsets"]
    changed = {"short": (start, end - 4), "shifted": (start + 8, end + 8), "beyond": (start, end)}
    header[name]["data_offsets"] = list(changed[lie])
    if lie == "beyond":
        header[name]["shape"][0] *= 2
        header[name]["data_offsets"] = [start, start + 2 * (end - start)]
    write(file, json.dumps(header).encode(), data=b"\0" * end)
    assert str(file) in str(only(config).where)
