"""Greedy answers of vLLM's engine on a CUDA machine, compared with the in-process model."""

from __future__ import annotations

from importlib.util import find_spec

import live_adapters
import pytest

from mens_exp.config.quant import ComputeDtype
from mens_exp.evals.engines import Generation, GraphEngine, Request, Served, VllmEngine, open_vllm
from mens_exp.model.sources import resolve
from mens_exp.tokenizer.implementations import HfTokenizer
from mens_exp.training.build import build_backend

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vllm is missing: pip install 'mens-exp[vllm]'"
)


def test_greedy_answers_begin_as_those_of_the_graph_at_hand(cache, tiny_config, tmp_path):
    """Base and tuned in float32 agree for eight tokens, before rounding matters."""
    config = tiny_config("model=smollm2_135m", "backend=lora", "quant.compute_dtype=f32")
    base = resolve(config.model, cache)
    backend = build_backend(config, base)
    live_adapters.fill_b(backend, std=0.05)
    backend.write_peft(tmp_path / "peft")
    tokenizer = HfTokenizer.from_directory(base.directory)
    generation = Generation(max_new_tokens=8, batch_size=4)
    requests = [
        Request(messages=({"role": "user", "content": text},), seed=0)
        for text in ("What is 2 + 2?", "Name a colour.", "Write f(x).", "The capital of France?")
    ]
    served = Served(
        base=base.directory,
        max_lora_rank=config.lora.r,
        dtype=ComputeDtype.f32,
        max_positions=256,
    )
    engine = open_vllm(served)
    ours = GraphEngine(backend, tokenizer, generation)
    for adapter in (None, tmp_path / "peft"):
        theirs = VllmEngine(engine, tokenizer, generation, 256, adapter).complete(requests)
        if adapter is None:
            with backend.base_only():
                expected = ours.complete(requests)
        else:
            expected = ours.complete(requests)
        same = sum(a.text == b.text for a, b in zip(theirs, expected, strict=True))
        assert same >= 3, (theirs, expected)
