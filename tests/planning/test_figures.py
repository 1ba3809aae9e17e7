"""Time and memory that planning takes, in new processes.

Time is processor time divided by that of a plain Python loop in the same process, because a busy
or slow machine changes both alike. benchmarks/planning.py prints the seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import mens_exp
from mens_exp.layout.hub import shipped_config

SHARDS = 30
LOOPS = 40  # measured: 27 to 29 beside five other programs; the rest is for shared caches

MEASURED = """
import json, resource, sys, time
from mens_exp import cli
code = cli.main(sys.argv[1:])
cpu_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
began = time.process_time()
sum(number * number for number in range(2_000_000))
loop_s = time.process_time() - began
from pathlib import Path
# VmHWM begins anew at exec, where ru_maxrss is still that of the process that forked.
status = Path("/proc/self/status").read_text()
peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
print(json.dumps({
    "code": code,
    "loops": cpu_s / loop_s,
    "peak_bytes": int(peak.split()[1]) * 1024,
    "heavy": sorted({"torch", "transformers", "lightning", "peft", "wandb"} & sys.modules.keys()),
}), file=sys.stderr)
"""


def measured(directory, *overrides):
    """Plan in a new process; return its cost and the plan."""
    environment = {**os.environ, "PYTHONPATH": str(Path(mens_exp.__file__ or "").parents[1])}
    command = [*overrides, "task=plan", "logger=none", f"hydra.run.dir={directory / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    cost = json.loads(done.stderr.strip().splitlines()[-1])
    return cost, json.loads((directory / "run" / "plan.json").read_text("utf-8"))


def llama_70b(directory, tokenizer):
    """Write a 70B model with real headers in 30 sparse files."""
    config = shipped_config("meta-llama/Llama-3.1-70B-Instruct")
    assert config is not None
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    shutil.copy(tokenizer, directory / "tokenizer.json")
    d, f, kv, layers = 8192, 28672, 1024, 80
    shapes = {"model.embed_tokens.weight": [128256, d], "lm_head.weight": [128256, d]}
    for n in range(layers):
        at = f"model.layers.{n}"
        shapes |= {f"{at}.self_attn.{x}_proj.weight": [d, d] for x in "qo"}
        shapes |= {f"{at}.self_attn.{x}_proj.weight": [kv, d] for x in "kv"}
        shapes |= {f"{at}.mlp.{x}_proj.weight": [f, d] for x in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = [d, f]
        shapes |= {f"{at}.{x}_layernorm.weight": [d] for x in ("input", "post_attention")}
    names, places = sorted(shapes), {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        header, end = {}, 0
        for name in names[number::SHARDS]:
            size = 2
            for length in shapes[name]:
                size *= length
            entry = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + size]}
            header[name], end, places[name] = entry, end + size, file
        raw = json.dumps(header).encode()
        with (directory / file).open("wb") as sparse:
            sparse.write(struct.pack("<Q", len(raw)) + raw)
            sparse.truncate(8 + len(raw) + end)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def test_seventy_billion_parameters_are_planned_from_headers(tiny_base, rows_file, tmp_path):
    """30 shards of 141 GB in all: quickly, under 200 MB, and without torch."""
    model = tmp_path / "llama_70b"
    llama_70b(model, tiny_base.directory / "tokenizer.json")
    assert sum(file.stat().st_size for file in model.iterdir()) > 140e9
    cost, plan = measured(
        tmp_path,
        *("model=hf", f"model.id={model}", "trainer=cpu"),
        *("data=jsonl", f"data.path={rows_file}"),
    )
    assert (cost["code"], cost["heavy"]) == (0, [])
    assert cost["loops"] < LOOPS
    assert cost["peak_bytes"] < 200e6
    assert plan["layers"] == 80
    # 80 · (2·8192² + 2·8192·1024 + 3·8192·28672) weights at 4.127 bits.
    assert plan["memory_bytes"]["components"]["base weights"] == pytest.approx(
        68_451_041_280 * 4.127 / 8, rel=1e-4
    )
    assert plan["graph_id"] == "full_causal"


def test_default_is_planned_quickly(tmp_path):
    """The command without overrides, without torch."""
    cost, plan = measured(tmp_path)
    assert (cost["code"], cost["heavy"]) == (0, [])
    assert cost["loops"] < LOOPS
    assert plan["steps"] == 60
