from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from mens_exp.config.compose import Composed, compose

if TYPE_CHECKING:
    from collections.abc import Callable

NEEDS = {
    "quant=none": ["backend=lora"],
    "trainer=fsdp": ["quant.storage_dtype=bf16"],
    "tokenizer=vox": ["backend=burn"],
    "model=hf": ["model.id=somewhere"],
    "data=jsonl": ["data.path=rows.jsonl"],
    "data=hub": ["data.id=lab/rows"],
    "data=mix": ["data.sources=[{path:a.jsonl,weight:0.7},{source:stdlib,weight:0.3}]"],
    "task=corpus": ["corpus.steps=[validate]", "corpus.input=rows.jsonl", "corpus.output=corpus"],
    "task=evaluate": ["path=latest"],
    "suite=rust": ["suite.path=tasks.jsonl"],
    "suite=jsonl": ["suite.path=rows.jsonl"],
    "suite=lm_eval": ["suite.path=tasks"],
    "suite=scorecard_spec": ["suite.path=spec.json", "task=evaluate"],
    "task=serve": ["path=merged"],
    "callbacks=early_stopping": ["trainer.val_check_interval=4"],
    "task=chat": ["path=latest"],
    "task=compare": ["path=latest"],
    "task=export": ["path=latest"],
    "task=inspect": ["path=latest"],
    "task=merge": ["path=latest"],
    "task=promote": ["policy=burn_rnd", "path=compare.json", "ledger=ledger.jsonl"],
    "task=push": ["path=latest", "repo=me/adapter"],
    "task=sync": ["path=latest"],
}


@pytest.fixture(scope="session")
def option() -> Callable[[str], Composed]:
    """Compose one option with the values it requires; once for all tests, so do not change it."""

    @functools.cache
    def composed(override: str) -> Composed:
        return compose([[override, *NEEDS.get(override, [])]])[0]

    return composed
