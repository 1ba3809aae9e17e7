"""Results of a run's probes, computed once for equal models and documents.

Most tests train the same tiny model on the same rows, and a run's two probes, of its first batches
and of its PEFT directory, take a third of the time. Their results depend only on the tensors, the
micro-batches and the settings of the graph, whose digest names the file that keeps a result. A
probe that refuses keeps nothing. A test that changes code, which the digest does not cover,
computes its own; see the fixture `_probes` in conftest.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from dataclasses import fields

import torch

FIRST = {"probe": 8, "view": 1}  # micro-batches that each reads
MACHINE = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # variables that change rounding


def is_usable():
    """Return whether known results may be used now; a test of changed code replaces this."""
    return True


def install(directory):
    """Let this process keep the results of both probes in a directory."""
    from mens_exp.training import contract_probe, peft_view

    probe, compare = contract_probe.probe, peft_view.view_differences

    def probed(config, module, data, reference=None):
        def made():
            return probe(config, module, data, reference)

        found = known(directory, "probe", module, data.train_dataloader(), made)
        if reference is not None:
            found["reference"], found["reference_unknown"] = reference
        return found

    def compared(module, data):
        def made():
            return compare(module, data)

        return tuple(known(directory, "view", module, data.val_dataloader(), made))

    contract_probe.probe, peft_view.view_differences = probed, compared


def known(directory, kind, module, stream, make):
    """Return a result that is kept, or make it and keep it."""
    has_teacher = module.teacher is not None or module.known_teachers is not None
    if not is_usable() or has_teacher or torch.distributed.is_initialized():
        return make()
    batches = [stream.batch(number) for number in range(min(FIRST[kind], stream.total))]
    place = directory / f"{digest_of(kind, module, batches)}.json"
    if place.exists():
        return json.loads(place.read_text("utf-8"))
    made = make()
    part = place.with_suffix(f".{uuid.uuid4().hex}")
    part.write_text(json.dumps(made), "utf-8")
    part.replace(place)
    return made


def digest_of(kind, module, batches):
    """Return the digest of all that a result depends on."""
    config = module.config
    parts = [config.model, config.backend, config.quant, config.lora, config.objective]
    rows = re.sub(r"'/[^']*'", "'a path'", repr(config.data))
    machine = [os.environ.get(name) for name in MACHINE]
    digest = hashlib.sha256(repr([kind, parts, rows, config.trainer.precision, machine]).encode())
    for name, tensor in tensors_of(module.backend):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.device}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    for batch in batches:
        for field in fields(batch):
            value = getattr(batch, field.name)
            listed = value.tolist() if isinstance(value, torch.Tensor) else value
            if isinstance(value, dict):
                listed = {name: one.tolist() for name, one in value.items()}
            digest.update(f"{field.name} {listed!r}".encode())
    return digest.hexdigest()


def tensors_of(backend):
    """Yield parameters, buffers, and the scales of quantized parameters, by name."""
    for name, parameter in backend.named_parameters():
        yield name, parameter
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            yield f"{name} scales", state.absmax
            state = state.state2
    yield from backend.named_buffers()
