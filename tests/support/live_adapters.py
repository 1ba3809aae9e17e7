"""Adapters that change their base as trained ones do; in a fresh adapter B = 0."""

from __future__ import annotations


def fill_b(backend, std=0.1):
    """Fill every B, and move tuned norms, by draws from the CPU; return the backend."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, parameter in backend.trainable().items():
        if name.endswith("lora_b"):
            draws = torch.empty(parameter.shape).normal_(std=std, generator=generator)
            parameter.data.copy_(draws)
        elif name.endswith("ln_tuning"):
            draws = torch.empty(parameter.shape).normal_(std=std, generator=generator)
            parameter.data.add_(draws.to(parameter.device))
    return backend


def training_pass(backend, batch):
    """Pass a micro-batch forward and backward; return its loss and each parameter's gradient."""
    from mens_exp.objective.causal import CrossEntropy

    backend.train()
    backend.begin(batch.index)
    loss = CrossEntropy("causal", 16)(backend(batch), batch.targets_M, backend.head).total
    loss.backward()
    found = {name: one.grad.clone() for name, one in backend.trainable().items()}
    for parameter in backend.trainable().values():
        parameter.grad = None
    return float(loss.detach()), found
