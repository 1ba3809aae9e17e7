"""A merge's rate compared with its own limits, in one process, in turns.

    python benchmarks/merge.py [gigabytes] [rounds]

The model is synthetic: projections of [4096, 4096] in bf16, rank 16 on each, three quarters of the
size in merged ones. Onto the original base the limit is a bare loop that reads a tensor, makes it
f32, casts it back and writes it; onto the dequantized base it is bitsandbytes' own quantize and
dequantize of the merged tensors. The growth of memory is that of one merge of each kind.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import record
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from mens_exp.export.merge import Merge, write_tensors
from mens_exp.layout.adapter_base import AdaptedLayer, places
from mens_exp.layout.checkpoint_files import Outline, SafetensorsWriter
from mens_exp.lora.method import Delta
from mens_exp.model.stored_weights import StoredRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.layout.adapter_base import Place

QUESTION = "How fast is a merge, compared with reading and writing and with bitsandbytes?"
GIGABYTES, ROUNDS, WIDTH = 2.0, 3, 4096
RANK, ROWS = 16, 256
QUANTIZER: Quantizer = {
    "quant_type": "nf4",
    "block_size": 64,
    "double_quant": True,
    "compute_dtype": "bf16",
    "rounded_to": "bf16",
    "skip": [],
    "library": "bitsandbytes",
}


def main() -> None:
    """Merge onto both bases, in turns with their reference loops."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("gigabytes", type=float, nargs="?", help=f"default: {GIGABYTES:g}")
    parser.add_argument("rounds", type=int, nargs="?", help=f"default: {ROUNDS}")
    given = record.begin(parser)
    width = ROWS if given.smallest else WIDTH
    gigabytes = given.gigabytes or (0.0 if given.smallest else GIGABYTES)
    count = max(4, round(gigabytes * 1e9 / (2 * width * width)))
    layers, deltas = adapted(count * 3 // 4, width)
    with tempfile.TemporaryDirectory() as folder:
        shard, out = Path(folder) / "a.safetensors", Path(folder) / "o.safetensors"
        make(shard, count, width)
        (plain,) = places(layers, [shard], only_merged=False).values()
        quantizers = dict.fromkeys((one.key for one in layers), QUANTIZER)
        (four_bit,) = places(layers, [shard], only_merged=False, quantizers=quantizers).values()
        merged = [one for one in four_bit if one.logical is not None]
        works: dict[str, Callable[[], None]] = {
            "bare loop": lambda: bare(plain, out),
            "original": lambda: merge(plain, deltas, out, quantized=False),
            "bitsandbytes": lambda: bitsandbytes(four_bit),
            "dequantized": lambda: merge(merged, deltas, out, quantized=True),
        }
        quantize_4bit(torch.ones(64, 64))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        merge(merged[:2], deltas, out, quantized=True)
        works["original"]()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        took: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(given.rounds or (1 if given.smallest else ROUNDS)):
            for name, work in works.items():
                took[name].append(seconds(work))
    tensor = 2 * width * width / 1e6
    sizes = {"bare loop": count, "original": count}
    rates = {
        name: [tensor * sizes.get(name, len(layers)) / one for one in each]
        for name, each in took.items()
    }
    higher, lower = record.Better.HIGHER, record.Better.LOWER
    figures = [
        record.figure(f"onto the {base} base", rates[base], "MB/s", higher, (limit, rates[limit]))
        for base, limit in (("original", "bare loop"), ("dequantized", "bitsandbytes"))
    ]
    beside = ("four of its tensors", 4 * tensor)
    figures.append(record.figure("growth of memory", grown / 1e6, "MB", lower, beside))
    record.finish(QUESTION, figures, given)


def adapted(count: int, width: int) -> tuple[list[AdaptedLayer], dict[str, Delta]]:
    """Return layers with an adapter, and the weights of their adapters."""
    layers = [
        AdaptedLayer(
            logical=f"l{i}.up", key=f"model.layers.{i}.mlp.up_proj.weight", shape=(width, width)
        )
        for i in range(count)
    ]
    deltas = {
        one.logical: Delta(
            A_RI=torch.randn(RANK, width), B_OR=torch.randn(width, RANK) * 1e-3, scale=2.0
        )
        for one in layers
    }
    return layers, deltas


def make(path: Path, count: int, width: int) -> None:
    """Write the model."""
    outline = Outline(dtype="BF16", shape=(width, width))
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(count)]
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        writer = SafetensorsWriter(file, dict.fromkeys(names, outline), {"format": "pt"})
        for name in names:
            for _ in range(0, width, ROWS):
                weight = torch.randn(ROWS, width, generator=generator) * 0.02
                writer.write(name, weight.bfloat16().view(torch.uint8).numpy().data)
        writer.close()


def bare(planned: list[Place], out: Path) -> None:
    """Read, convert to f32, cast and write, in chunks of rows sized for speed."""
    with out.open("wb") as file:
        for place in planned:
            stored = StoredRows(place.shard, place.key, place.info)
            for first in range(0, stored.rows, ROWS):
                weight = stored.read(first, first + ROWS).float().bfloat16()
                file.write(weight.view(torch.uint8).numpy().data)


def bitsandbytes(planned: list[Place]) -> None:
    """Quantize and dequantize the merged tensors, each in one call."""
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


if __name__ == "__main__":
    main()
