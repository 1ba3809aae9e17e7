"""One of two processes that hold a base in parts; run by test_sharding.py, not a test itself.

``python sharded_process.py <port> <rank> <file>``: the file has the overrides and a batch; what
this process holds and computes goes to ``<file>.<rank>``.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.tensor import DTensor

from mens_exp.config.compose import compose, typed
from mens_exp.model.sources import resolve
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.machine import Rank
from mens_exp.rows.cache import cache_root
from mens_exp.training.build import build_backend
from mens_exp.training.distributed import averaged, joined, store_at


def held(layers):
    """Return the bytes of each frozen decoder weight that this process holds."""
    return {
        name: (weight.to_local() if isinstance(weight, DTensor) else weight).nbytes
        for name, weight in layers.named_parameters()
        if not weight.requires_grad
    }


def main(port, number, file):
    given = torch.load(file, weights_only=False)
    config = typed(compose([given["overrides"]])[0].values)
    rank = Rank(rank=number, world_size=2, local_rank=number, local_world_size=2)
    with joined(rank, torch.device("cpu"), store_at(port, 2)):
        backend = build_backend(config, resolve(config.model, cache_root()), rank)
        with torch.no_grad():
            for name, parameter in backend.trainable().items():
                if name in given["adapter"]:
                    parameter.copy_(given["adapter"][name])
        layers = backend.causal_lm.model.layers
        seen = {"at_rest": held(layers), "inside": []}

        def look(*_):
            seen["inside"].append([sum(held(layer).values()) for layer in layers])

        layers[1].self_attn.register_forward_pre_hook(look)
        backend.begin(0)
        hidden_MD = backend(given["batch"])
        objective = CrossEntropy(name="ce", chunk_tokens=16)
        loss = objective(hidden_MD, given["batch"].targets_M, backend.head)
        # As for two micro-batches, where that of the other process has three times the weight.
        (loss.total * (1 + 2 * number)).backward()
        gradients = {n: p.grad for n, p in backend.trainable().items() if p.grad is not None}
        averaged(list(gradients.values()))
        with torch.no_grad(), backend.base_only():
            base_MD = backend(given["batch"])
        answer = backend.generate([[5, 6, 7]], max_new_tokens=4, end_ids=set())
        torch.save(
            {
                **seen,
                "after": held(layers),
                "hidden": hidden_MD.detach(),
                "base": base_MD,
                "gradients": gradients,
                "answer": answer,
                "facts": backend.facts(),
                "adapter": backend.adapter(config)[1],
            },
            f"{file}.{number}",
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
