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
