from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mens_exp.artifacts.adapter_v3 import AdapterManifest
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.scorecard import Scorecard

STARTED = "2026-11-20T05:58:01.123Z"
ENDED = "2026-11-20T06:05:00.000Z"
SHA = "ab" * 32


@pytest.fixture
def golden():
    return Path(__file__).parents[1] / "golden"


@pytest.fixture
def manifest():
    """A run that succeeded on its second attempt, one value unknown; golden/manifest_v1.json."""
    return Manifest(
        run_id="20261120T055801_abcd1234",
        task="train",
        experiment=None,
        status=Status.SUCCEEDED,
        started_utc=STARTED,
        ended_utc=ENDED,
        attempts=[
            {
                "started_utc": STARTED,
                "ended_utc": None,
                "status": Status.STARTED,
                "resumed_from_step": None,
            },
            {
                "started_utc": "2026-11-20T06:00:00.000Z",
                "ended_utc": ENDED,
                "status": Status.SUCCEEDED,
                "resumed_from_step": 20,
            },
        ],
        overrides=["lora.r=8"],
        choices={"backend": "qlora", "experiment": None},
        config_digest=SHA,
        seed=7,
        provenance={"commit": "c" * 40, "dirty": False},
        inputs={"base_model": "tiny_llama", "data": {"source": "stdlib", "train_rows": 3}},
        facts={"seq_len": 512, "packing": True},
        results={"steps": 60, "tuned_val_loss": 1.48, "peak_cuda_bytes": None},
        unknown={"results.peak_cuda_bytes": "no CUDA device"},
        outputs={"adapter/adapter.safetensors": SHA},
        notes=["the base is a 4-bit demonstration model"],
    )


@pytest.fixture
def scorecard():
    """A scorecard of two conditions over three items; golden/scorecard_v3.json."""
    return Scorecard(
        suite="heldout_syntax",
        suite_digest=SHA,
        items=3,
        conditions={
            "base": {"parse_rate": 0.0, "parsed": 0, "completed": 1, "tokens_out_mean": None},
            "tuned": {"parse_rate": 1.0, "parsed": 3, "completed": 3, "tokens_out_mean": 41.5},
        },
        metrics={"probe/recall": 0.5, "probe/seen": None},
        declared={"own/points": {"unit": "points", "direction": "max", "note": "of ten"}},
        generation={"engine": "hf", "temperature": 0.0, "samples": 1, "max_retries": 0},
        unknown={"conditions.base.tokens_out_mean": "the tokenizer failed"},
    )


@pytest.fixture
def adapter():
    """An adapter of two layers, of ranks 2 and 1; golden/adapters/v3."""
    return AdapterManifest(
        adapter_method="qlora",
        quant={"base_quant": "nf4", "double_quant": True},
        base_key_map={
            "l0.q": "model.layers.0.self_attn.q_proj.weight",
            "l0.v": "model.layers.0.self_attn.v_proj.weight",
        },
        layer_order=["l0.q", "l0.v"],
        vocab=131,
        d_model=3,
        rank=2,
        alpha=4,
        mens_exp={"rank_pattern": {"l0.v": 1}},
    )


@pytest.fixture
def tensors():
    """The matrices of both layers, deliberately out of order."""
    return {
        "l0.v.lora_b": np.array([[9.0], [8.0]], dtype=np.float32),
        "l0.q.lora_b": np.zeros((3, 2), dtype=np.float32),
        "l0.q.lora_a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "l0.v.lora_a": np.array([[1.0, 2.0, 3.0]], dtype=np.float32),
    }
