from __future__ import annotations

import functools

import pytest

from mens_exp.config.compose import compose
from mens_exp.config.option_files import group_options

NEEDS = {
    "lora=peft": ["lora.config={peft_type:OFT}"],
    "optim=apollo": ["backend=full"],
    "optim=galore": ["backend=full"],
    "quant=none": ["backend=lora"],
    "quant=codebook": ["quant.levels=[-1,0,1]"],
    "trainer=fsdp": ["quant.storage_dtype=bf16"],
    "tokenizer=vox": ["backend=burn", "model=tiny_llama"],
    "model=hf": ["model.id=somewhere"],
    "data=jsonl": ["data.path=rows.jsonl"],
    "data=hub": ["data.id=lab/rows"],
    "data=mix": ["data.sources=[{path:a.jsonl,weight:0.7},{source:stdlib,weight:0.3}]"],
    "task=rejection_sampling": [
        "rejection_sampling.output=rounds",
        "rejection_sampling.sample=['suite=jsonl','suite.path=tasks.jsonl']",
    ],
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
    "task=push": ["path=latest", "push.repo=me/adapter"],
    "task=sync": ["path=latest"],
}


# These options set values of other groups or go with few of them; the rest share compositions.
ALONE = ("backend", "callbacks", "experiment", "preset")


@pytest.fixture(scope="session")
def combined():
    """Compose the fewest configurations that choose every option once, with its required values."""
    options = {group: names for group, names in group_options().items() if group not in ALONE}
    cells = []
    for number in range(max(map(len, options.values()))):
        chosen = [f"{group}={names[number % len(names)]}" for group, names in options.items()]
        needs = [one for option in chosen for one in NEEDS.get(option, [])]
        values = [one for one in needs if one.partition("=")[0] not in group_options()]
        cells.append([*chosen, *values])
    return compose(cells)


@pytest.fixture(scope="session")
def nodes(combined):
    """Return the node that each option puts under its group; `preset` and `experiment` put none."""
    options = group_options()
    found = {(group, name): {} for group, names in options.items() for name in names}
    blocks = compose([[f"callbacks=[{','.join(options['callbacks'])}]"]])[0].values.callbacks
    found |= {("callbacks", name): {name: block} for name, block in blocks.items()}
    for name in options["backend"]:
        found["backend", name] = compose([[f"backend={name}"]])[0].values.backend
    for one in combined:
        found |= {
            (group, name): one.values.get(group) or {}
            for group, name in one.choices.items()
            if group not in ALONE
        }
    return found


@pytest.fixture(scope="session")
def option():
    """Compose one option with its required values, once for all tests; do not change the result."""

    @functools.cache
    def composed(override):
        return compose([[override, *NEEDS.get(override, [])]])[0]

    return composed
