"""Counts of the parameters that a backend would train, without building it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.backend import ProxyConfig, trains_base
from mens_exp.config.model import HfModel
from mens_exp.layout import hub
from mens_exp.layout.proxy_stack import ProxyStack, stack_of
from mens_exp.layout.targets import adapter_parameters, chosen, described

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape

__all__ = ["described_modules", "frozen_linears", "proxy_stack", "trained_parameters"]


def proxy_stack(config: RunConfig, shape: Shape) -> ProxyStack | None:
    """Return the proxy's stack; None for other backends.

    A checkpoint that is made here is whole, and so is taken to be one whose headers are not here.

    Raises:
        MensError: the stack cannot be built, or a directory's headers cannot be read.
    """
    backend = config.backend
    if not isinstance(backend, ProxyConfig):
        return None
    keys = hub.describe(config.model).tensors if isinstance(config.model, HfModel) else None
    return stack_of(shape, backend, keys or None)


def trained_parameters(config: RunConfig, shape: Shape) -> int:
    """Count the parameters that learn; of a family that is not verified, no norms and biases."""
    base = shape.parameters + shape.small_parameters
    if config.backend.name == "full":
        return base
    stack = proxy_stack(config, shape)
    if stack is None:
        learns = trains_base(config.backend, config.model.source)
        return adapter_parameters(config.lora, shape) + learns * base
    d = shape.hidden_size
    return config.lora.r * (len(stack.middle) * 2 * d + shape.vocab_size + d)


def frozen_linears(config: RunConfig, shape: Shape) -> int:
    """Count the weights of linear layers that a token goes through, the head left out."""
    stack = proxy_stack(config, shape)
    if stack is None:
        return shape.linear_parameters
    return len(stack.middle) * shape.hidden_size**2


def described_modules(config: RunConfig, shape: Shape) -> str:
    """Say in a line which modules learn."""
    if config.backend.name == "full":
        return "every weight"
    stack = proxy_stack(config, shape)
    if stack is None:
        return described(chosen(config.lora, shape), shape.num_hidden_layers)
    middle = len(stack.middle)
    return f"mid in {middle} of {shape.num_hidden_layers} layers; lm_head: {middle + 1} modules"
