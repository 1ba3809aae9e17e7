"""Adapters that change their base as trained ones do; in a fresh adapter B = 0."""

from __future__ import annotations


def fill_b(backend, std=0.1):
    """Fill every B with draws from the CPU, equal on each device; return the backend."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, parameter in backend.trainable().items():
        if name.endswith("lora_b"):
            draws = torch.empty(parameter.shape).normal_(std=std, generator=generator)
            parameter.data.copy_(draws)
    return backend
