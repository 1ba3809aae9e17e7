"""A merge's rate beside its own limits, in one process and one run, in turns.

    python benchmarks/merge.py [gigabytes, 2 by default] [rounds, 3 by default]

The model is synthetic: projections of [4096, 4096] in bf16, rank 16 on each, three quarters of the
size in merged ones. Onto the original base the limit is a bare loop that reads a tensor, makes it
f32, casts it back and writes it; onto the dequantized base it is bitsandbytes' own quantize and
dequantize of the merged tensors. Prints medians, ratios, and by how much the merge's memory grew.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from mens_exp.export.merge import Merge, write_tensors
from mens_exp.layout.merge_map import AdaptedLayer, places
from mens_exp.layout.safetensors_writer import Outline, SafetensorsWriter
from mens_exp.lora.merge import Delta
from mens_exp.model.stored_rows import StoredRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.artifacts.quantizer import Quantizer
    from mens_exp.layout.merge_map import Place

WIDTH, RANK, ROWS = 4096, 16, 256
QUANTIZER: Quantizer = {
    "quant_type": "nf4",
    "block_size": 64,
    "double_quant": True,
    "compute_dtype": "bf16",
    "rounded_to": "bf16",
    "skip": [],
    "library": "bitsandbytes",
}


def make(path: Path, count: int) -> None:
    """Write the model."""
    outline = Outline(dtype="BF16", shape=(WIDTH, WIDTH))
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(count)]
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        writer = SafetensorsWriter(file, dict.fromkeys(names, outline))
        for name in names:
            for _ in range(0, WIDTH, ROWS):
                weight = torch.randn(ROWS, WIDTH, generator=generator) * 0.02
                writer.write(name, weight.bfloat16().view(torch.uint8).numpy().data)
        writer.close()


def bare(planned: list[Place], out: Path) -> None:
    """Read, to f32, cast, write, as many rows at a time as keep it fast."""
    with out.open("wb") as file:
        for place in planned:
            stored = StoredRows(place.shard, place.key, place.info)
            for first in range(0, WIDTH, ROWS):
                weight = stored.read(first, first + ROWS).float().bfloat16()
                file.write(weight.view(torch.uint8).numpy().data)


def bitsandbytes(planned: list[Place]) -> None:
    """Quantize and dequantize the merged tensors, each whole."""
    for place in planned:
        if place.logical is not None:
            stored = StoredRows(place.shard, place.key, place.info)
            weight = stored.read(0, stored.rows)
            codes, state = quantize_4bit(
                weight, blocksize=64, compress_statistics=True, quant_type="nf4"
            )
            dequantize_4bit(codes, state)


def merge(planned: list[Place], deltas: dict[str, Delta], out: Path, *, quantized: bool) -> None:
    """Write the merged file."""
    how = Merge(deltas=deltas, dtype="BF16", quantizer=QUANTIZER if quantized else None)
    with out.open("wb") as file:
        write_tensors(file, planned, how)


def seconds(work: Callable[[], None]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(gigabytes: float, rounds: int) -> None:
    """Run everything in turns and print the medians."""
    count = max(4, round(gigabytes * 1e9 / (2 * WIDTH * WIDTH)))
    chosen = range(count * 3 // 4)
    layers = [
        AdaptedLayer(
            logical=f"l{i}.up", key=f"model.layers.{i}.mlp.up_proj.weight", shape=(WIDTH, WIDTH)
        )
        for i in chosen
    ]
    deltas = {
        one.logical: Delta(
            A_RI=torch.randn(RANK, WIDTH), B_OR=torch.randn(WIDTH, RANK) * 1e-3, scale=2.0
        )
        for one in layers
    }
    with tempfile.TemporaryDirectory() as folder:
        shard, out = Path(folder) / "a.safetensors", Path(folder) / "o.safetensors"
        make(shard, count)
        keys = [one.key for one in layers]
        (plain,) = places(layers, [shard], only_merged=False).values()
        (four_bit,) = places(layers, [shard], only_merged=False, quantized=keys).values()
        merged = [one for one in four_bit if one.logical is not None]
        quantize_4bit(torch.ones(64, 64))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        merge(merged[:2], deltas, out, quantized=True)
        merge(plain, deltas, out, quantized=False)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        works: dict[str, Callable[[], None]] = {
            "bare loop": lambda: bare(plain, out),
            "merge, original": lambda: merge(plain, deltas, out, quantized=False),
            "bitsandbytes": lambda: bitsandbytes(four_bit),
            "merge, dequantized": lambda: merge(merged, deltas, out, quantized=True),
        }
        took: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                took[name].append(seconds(work))
    median = {name: statistics.median(each) for name, each in took.items()}
    size = count * 2 * WIDTH * WIDTH
    sizes = dict.fromkeys(works, size)
    sizes |= dict.fromkeys(("bitsandbytes", "merge, dequantized"), size * len(layers) // count)
    for name, each in took.items():
        listed = ", ".join(f"{one:.2f}" for one in each)
        print(f"{name:20} {sizes[name] / median[name] / 1e6:8.0f} MB/s   ({listed} s)")
    largest = 2 * WIDTH * WIDTH
    print(
        f"original base:    {median['bare loop'] / median['merge, original']:.2f} of the bare loop"
    )
    print(
        f"dequantized base: {median['bitsandbytes'] / median['merge, dequantized']:.2f} of "
        "bitsandbytes, reading, merging and writing included"
    )
    print(f"memory grew by {grown / 1e6:.0f} MB; four largest tensors are {4 * largest / 1e6:.0f}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(float(arguments[0]) if arguments else 2.0, int(arguments[1]) if arguments[1:] else 3)
