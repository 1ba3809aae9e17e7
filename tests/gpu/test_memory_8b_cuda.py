"""The planned memory for Llama-3.1-8B's shape, compared with a run on random weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from gpu_arms import LLAMA_8B

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir

GIB = 1 << 30
DEVICE_GIB, DISK_GIB = 60, 20  # 40 GiB without checkpointing, plus the interval's margin

RUN = [
    *("trainer=gpu", "logger=none", "suite=none", "data=jsonl", "data.seq_len=2048"),
    *("data.micro_batch_size=2", "trainer.accumulate_grad_batches=1", "trainer.max_steps=2"),
    *("data.val_frac=0.1", "data.heldout_frac=0.1", "data.val_max_tokens=2048", "lora.r=16"),
    *("schedule=constant", "schedule.warmup_steps=0"),
]


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Return a cache directory with the weights, on a machine that is large enough."""
    place = tmp_path_factory.mktemp("llama_8b")
    memory = torch.cuda.get_device_properties(0).total_memory
    if memory < DEVICE_GIB * GIB:
        pytest.skip(f"needs a GPU of {DEVICE_GIB} GiB; this one has {memory / GIB:.0f}")
    free = shutil.disk_usage(place).free
    if free < DISK_GIB * GIB:
        pytest.skip(f"needs {DISK_GIB} GiB of disk in {place}; set --basetemp to another one")
    lines = [json.dumps({"prompt": f"p{n}", "response": "word " * 800}) for n in range(40)]
    (place / "rows.jsonl").write_text("\n".join(lines), "utf-8")
    return place


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_8b_takes_what_the_plan_says(room, monkeypatch, checkpointing):
    """NF4 with double quantization, r 16 on seven projections, 2 × 2,048 tokens.

    The allocator's peak is inside the plan's interval, less the part that the allocator does not
    see, and within a quarter of the formula.
    """
    monkeypatch.setenv("MENS_EXP_CACHE", str(room))
    (room / "ledger.jsonl").unlink(missing_ok=True)
    run = RunDir(room / checkpointing)
    settings = [f"data.path={room / 'rows.jsonl'}", f"hydra.run.dir={run.path}"]
    settings.append(f"model.gradient_checkpointing={checkpointing}")
    assert cli.main([*LLAMA_8B, *RUN, *settings]) == 0
    predicted = json.loads(run.plan.read_text(encoding="utf-8"))["memory_bytes"]
    measured = Manifest.read(run.manifest).results["peak_cuda_bytes"]
    outside = predicted["estimate"] - predicted["formula"]
    assert predicted["formula"] == pytest.approx(measured, rel=0.25)
    assert predicted["low"] - outside <= measured <= predicted["high"]
