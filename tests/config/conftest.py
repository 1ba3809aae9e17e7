from __future__ import annotations

import functools

import pytest

from mens_exp.config.compose import compose, group_options

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
def nodes():
    """Return what each option puts under its group; options of several groups share a composition.

    Those of `preset` and `experiment` put nothing there, and would set values of other groups.
    """
    options = {group: list(names) for group, names in group_options().items()}
    found = {(group, name): {} for group, names in options.items() for name in names}
    blocks = compose([[f"callbacks=[{','.join(options['callbacks'])}]"]])[0].values.callbacks
    found |= {("callbacks", name): {name: block} for name, block in blocks.items()}
    for group in ("backend", "callbacks", "experiment", "preset"):
        names = options.pop(group)
        if group == "backend":
            composed = [compose([[f"backend={name}"]])[0].values.backend for name in names]
            found |= {(group, name): node for name, node in zip(names, composed, strict=True)}
    for number in range(max(map(len, options.values()))):
        chosen = {group: names[number % len(names)] for group, names in options.items()}
        values = compose([[f"{group}={name}" for group, name in chosen.items()]])[0].values
        found |= {one: values.get(one[0]) or {} for one in chosen.items()}
    return found


@pytest.fixture(scope="session")
def option():
    """Compose one option with the values it requires; once for all tests, so do not change it."""

    @functools.cache
    def composed(override):
        return compose([[override, *NEEDS.get(override, [])]])[0]

    return composed
