"""Runs with random settings, killed at random moments, equal an uninterrupted run.

The reference is an uninterrupted run of one process, judged by independent code. A killed run has
to end with the same bytes. Runs of two processes, and runs resumed with another number of them,
have to train the same micro-batches in each step, with losses equal up to rounding.
"""

from __future__ import annotations

import json
import os
import random
import sys

import fork_server
import planned_signals
import pytest

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events

RELATIVE = 1e-4  # sums over two processes round differently; measured: 6e-8
FEW = [48]  # of the seeds, those for CI; it failed with a fault that is now fixed


def seeds():
    return [
        pytest.param(seed, marks=() if seed in FEW else pytest.mark.soak) for seed in range(100)
    ]


def rows(draw, path, many):
    """Write pairs or conversations, some of which are too long for a document."""
    answers = ["word " * draw.randint(1, 12) + str(n) for n in range(many)]
    for n in draw.sample(range(many), many // 8):
        answers[n] = "long " * 80
    if draw.random() < 0.3:
        made = [
            {
                "messages": [
                    {"role": "user", "content": f"Begin {n}."},
                    {"role": "assistant", "content": f"begun {n}"},
                    {"role": "user", "content": "Go on."},
                    {"role": "assistant", "content": answer},
                ]
            }
            for n, answer in enumerate(answers)
        ]
    else:
        made = [{"prompt": f"Say {n}.", "response": answer} for n, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")


def drawn(draw, place):
    """Draw a run's settings; two processes can share the micro-batches of a step."""
    rows(draw, place / "a.jsonl", draw.randint(25, 90))
    micro_batches = draw.choice([2, 4, 6, 8])
    found = {
        "model": draw.choice(["tiny_llama", "tiny_gpt2", "tiny_qwen2"]),
        "trainer": "cpu",
        "logger": "none",
        "suite": "none",
        "suite.items": 0,
        "data": "jsonl",
        "data.path": "a.jsonl",
        "data.seq_len": draw.choice([64, 128, 192]),
        "data.micro_batch_size": draw.choice([1, 2, 3]),
        "data.packing": draw.choice(["true", "false"]),
        "data.val_frac": 0.1,
        "data.heldout_frac": 0.1,
        "trainer.accumulate_grad_batches": micro_batches,
        "trainer.max_steps": draw.randint(3, 9),
        "optim.lr": 1e-3,
        "schedule": draw.choice(["cosine", "linear", "constant"]),
        "schedule.warmup_steps": draw.choice([0, 1, 2]),
        "lora.dropout": draw.choice([0, 0.05, 0.3]),
        "objective": draw.choice(["assistant", "assistant", "causal", "last_k"]),
        "quant.compute_dtype": "f32",
        "checkpoint.every_n_steps": draw.choice([1, 2, 3]),
        "seed": draw.randint(1, 99),
    }
    if draw.random() < 0.4:
        found["trainer.val_check_interval"] = micro_batches * draw.choice([1, 2])
    kind = draw.choice(["steps", "steps", "epochs", "streamed", "mixed"])
    if kind == "epochs":
        found |= {"trainer.max_steps": -1, "trainer.max_epochs": draw.choice([1, 2, 3])}
    elif kind == "streamed":
        found["data.streaming"] = "true"
    elif kind == "mixed":
        rows(draw, place / "b.jsonl", draw.randint(20, 40))
        del found["data.path"]
        parts = [f"{{name:{x},path:{x}.jsonl,weight:{draw.choice([1, 2])}}}" for x in "ab"]
        found |= {"data": "mix", "data.sources": f"[{','.join(parts)}]"}
    return found


@pytest.fixture
def typed(tmp_path, cache):
    """Run a command in the test's directory, with signals at planned places."""

    def run(*words, kill_at=None):
        planned = [{"at": "micro-batch", "call": kill_at, "signal": "SIGKILL"}]
        return fork_server.run(
            [sys.executable, "-m", "mens_exp", *words],
            cwd=tmp_path,
            env={**os.environ, "MENS_EXP_CACHE": str(cache)},
            capture_output=True,
            text=True,
            before=None if kill_at is None else planned_signals.source(planned),
        )

    return run


def words(settings, run, **more):
    return [f"{key}={value}" for key, value in (settings | more).items()] + [f"hydra.run.dir={run}"]


def steps(place):
    events = read_events(RunDir(place).telemetry)
    return [event["payload"] for event in events if event["event"] == "step"]


def well(done):
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", seeds())
def test_a_killed_run_of_any_settings_goes_on_to_the_same_end(typed, tmp_path, seed):
    """With one process, and with a number of processes that may change at each resume."""
    draw = random.Random(seed)
    settings = drawn(draw, tmp_path)
    well(typed(*words(settings, "whole")))
    whole = steps(tmp_path / "whole")
    taken = len(whole) * settings["trainer.accumulate_grad_batches"]

    if typed(*words(settings, "killed"), kill_at=draw.randint(1, taken - 1)).returncode != 0:
        well(typed("resume=killed"))
    assert adapter(tmp_path / "killed") == adapter(tmp_path / "whole")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")

    before, after = draw.choice([(2, 1), (1, 2), (2, 2)])
    two = {"trainer": "ddp", "trainer.accelerator": "cpu"} if before == 2 else {}
    kill_at = draw.randint(1, max(1, taken // before - 1))
    if typed(*words(settings, "several", **two), kill_at=kill_at).returncode != 0:
        well(typed("resume=several", f"trainer.devices={after}"))
    several = steps(tmp_path / "several")
    assert [one["batches_sha256"] for one in several] == [one["batches_sha256"] for one in whole]
    for ours, theirs in zip(several, whole, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=RELATIVE)


def adapter(place):
    return (RunDir(place).adapter / "adapter.safetensors").read_bytes()


def losses(place):
    return [one["train/loss"] for one in steps(place)]
