"""Memory that a merge needs does not grow with the model."""

from __future__ import annotations

import json
import sys

import fork_server
import pytest

# Eight projections of 67 MB in bf16, 537 MB in one shard; a sparse file of zeros.
TENSOR = 4096 * 8192 * 2


def write_shard(path):
    header, end = {}, 0
    for i in range(8):
        end += TENSOR
        header[f"model.layers.{i}.mlp.up_proj.weight"] = {
            "dtype": "BF16",
            "shape": [8192, 4096],
            "data_offsets": [end - TENSOR, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


MERGE = """
import resource, sys
from pathlib import Path
import torch
from bitsandbytes import functional
from mens_exp.export.merge import Merge, write_tensors
from mens_exp.layout.adapter_base import AdaptedLayer, places
from mens_exp.lora.method import Delta
shard, out, base = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
keys = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
layers = [AdaptedLayer(logical=f"l{i}.up", key=k, shape=(8192, 4096)) for i, k in enumerate(keys)]
deltas = {one.logical: Delta(A_RI=torch.ones(16, 4096), B_OR=torch.ones(8192, 16), scale=1.0)
          for one in layers}
quantizer = None if base == "original" else {
    "quant_type": "nf4", "block_size": 64, "double_quant": True, "compute_dtype": "bf16",
    "rounded_to": "bf16", "skip": [], "library": "here"}
functional.quantize_4bit(torch.ones(64, 64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantizers = {} if quantizer is None else dict.fromkeys(keys, quantizer)
(planned,) = places(layers, [shard], only_merged=False, quantizers=quantizers).values()
with out.open("wb") as file:
    write_tensors(file, planned, Merge(deltas=deltas, dtype="BF16", quantizer=quantizer))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("base", ["original", "dequantized"])
def test_a_merge_holds_a_tensor_and_no_shard(tmp_path, base):
    """Less than four times the largest tensor, where the documented bound allows 600 MB more."""
    shard, out = tmp_path / "a.safetensors", tmp_path / "o.safetensors"
    write_shard(shard)
    command = [sys.executable, "-c", MERGE, shard, out, base]
    done = fork_server.run(command, check=True, capture_output=True, text=True, timeout=600)
    assert out.stat().st_size >= 8 * TENSOR
    assert json.loads(done.stdout) < 4 * TENSOR
