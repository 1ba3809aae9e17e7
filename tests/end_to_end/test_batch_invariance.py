"""An item's answer does not depend on the other items of its batch."""

from __future__ import annotations

from mens_exp.config.suite import MiniPythonSuite
from mens_exp.evals.engines import Generation, GraphEngine, Request
from mens_exp.evals.program_suite import mini_python
from mens_exp.tokenizer.implementations import HfTokenizer

SMOL = ("model=smollm2_135m", "backend=lora", "quant.compute_dtype=f32")


def test_greedy_answers_are_the_same_alone_and_in_a_batch_of_sixteen(
    smollm2,
    tiny_backend,
):
    """SmolLM2 in float32, prompts of several lengths; see also benchmarks/batch_invariance."""
    tokenizer = HfTokenizer.from_directory(smollm2.directory)
    backend = tiny_backend(*SMOL)
    items = mini_python(MiniPythonSuite(items=6)).items
    requests = [Request(messages=item.messages, seed=0) for item in items]
    prompts = tokenizer.encode_prompts([list(one.messages) for one in requests])
    assert len(set(map(len, prompts))) > 3
    alone, together = (
        [one.text for one in GraphEngine(backend, tokenizer, made).complete(requests)]
        for made in (Generation(max_new_tokens=8, batch_size=size) for size in (1, 16))
    )
    assert alone == together
    assert len(set(alone)) > 1
