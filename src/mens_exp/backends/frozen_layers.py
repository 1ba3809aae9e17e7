"""The weights of a frozen base while an adapter learns, and the layers that multiply with them.

Layers of the base compute with :mod:`mens_exp.model.kernels` where that is faster; those with an
adapter with :mod:`mens_exp.lora.linear`, which asks for their weights here.

Shapes: I inputs and O outputs of a layer.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.model.kernels import frozen_linear, is_rounded, products_dtype, rms_norm
from mens_exp.quant.bnb import binding_that_holds

if TYPE_CHECKING:
    from mens_exp.quant.binding import Binding


class FrozenWeights:
    """The weights that linear layers of a frozen base multiply with, for `lora.linear`.

    A layer is known if it is a plain linear layer, or quantized by a binding that says so.
    """

    def __init__(self, *, dense: bool) -> None:
        """Know no layer yet.

        Args:
            dense: whether to keep dequantized copies of quantized weights.
        """
        self.dense = dense
        self._bindings: dict[Any, Binding | None] = {}  # looking one up again takes too long
        self._copies: dict[Any, tuple[Any, torch.Tensor]] = {}

    def are_known(self, layer: Any) -> bool:
        """Return whether a layer computes ``W x + b`` with the weight of :meth:`of`."""
        if layer.weight.requires_grad or layer._forward_hooks:  # noqa: SLF001  # no public name
            return False
        binding = self._binding(layer)
        return _is_plain(layer) if binding is None else binding.multiplies(layer)

    def of(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return W, ``[O, I]``, in a dtype."""
        binding = self._binding(layer)
        if binding is not None:
            return self._copy(binding, layer, dtype) if self.dense else binding.weight(layer, dtype)
        weight: torch.Tensor = layer.weight.to(dtype)
        return weight if isinstance(layer, torch.nn.Linear) else weight.t()

    def take_over(self, model: torch.nn.Module) -> None:
        """Replace the forward pass of linear layers and norms by ours, where that is faster.

        A linear layer's is if its weight is kept in the dtype of products, or if the device has no
        instructions for it. ``del module.forward`` undoes it.
        """
        from transformers.pytorch_utils import Conv1D

        for module in model.modules():
            if isinstance(module, torch.nn.Linear | Conv1D) and not hasattr(module, "lora_A"):
                module.forward = _FrozenForward(module, self)  # type: ignore[method-assign]
            elif _is_rms_norm(module):
                module.forward = _NormForward(module)

    def forget(self) -> None:
        """Drop copies; they are made again when weights are asked for."""
        self._copies.clear()

    def keeps(self, layer: Any) -> bool:
        """Return whether a dequantized copy of a layer's weight is kept while it learns."""
        return self.dense and torch.is_grad_enabled() and self._binding(layer) is not None

    def _copy(self, binding: Binding, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        known = self._copies.get(layer)
        if known is not None and known[0] is layer.weight and _is_like(known, dtype):
            return known[1]
        made = binding.weight(layer, dtype)
        self._copies[layer] = (layer.weight, made)
        return made

    def _binding(self, layer: Any) -> Binding | None:
        if layer not in self._bindings:
            self._bindings[layer] = binding_that_holds(layer)
        return self._bindings[layer]


def _is_like(known: tuple[Any, torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether the copy of a stored weight is in a dtype, and where the weight is."""
    stored, copy = known
    return copy.dtype is dtype and copy.device == stored.device


class _FrozenForward:
    """The forward pass of a frozen linear layer: ours where it is faster, otherwise its own."""

    def __init__(self, layer: Any, weights: FrozenWeights) -> None:
        self.layer, self.weights = layer, weights
        self.own = layer.forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, layer, dtype = self.weights, self.layer, products_dtype(x)
        faster = is_rounded(dtype, x.device) or weights.keeps(layer)
        if not faster or not weights.are_known(layer):
            found: torch.Tensor = self.own(x)
            return found
        y = frozen_linear(x, functools.partial(weights.of, layer), layer.bias)
        return y.to(x.dtype) if hasattr(layer.weight, "quant_state") else y


class _NormForward:
    """The forward pass of a frozen norm: ours if it learns, otherwise its own."""

    def __init__(self, norm: Any) -> None:
        self.norm, self.own = norm, norm.forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.norm.weight
        if torch.is_grad_enabled() and not weight.requires_grad and weight.dtype is x.dtype:
            return rms_norm(x, weight, self.norm.variance_epsilon)
        found: torch.Tensor = self.own(x)
        return found


def _is_rms_norm(module: torch.nn.Module) -> bool:
    """Return whether a module computes what Llama's norm does, by the code of its class."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = (getattr(one.forward, "__code__", None) for one in (LlamaRMSNorm, type(module)))
    return theirs is not None and all(
        getattr(ours, part) == getattr(theirs, part)
        for part in ("co_code", "co_names", "co_consts", "co_varnames")
    )


def _is_plain(layer: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(layer).forward in {torch.nn.Linear.forward, Conv1D.forward}
