"""Bases that were published quantized: their own codes, unchanged.

transformers builds the model with placeholders for the quantized layers and loads the rest. The
codes are then read from the files and converted to codebook codes; no value changes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.quant.binding import compute_dtype
from mens_exp.quant.codebook import WITH_ZERO, Affine, Codebook, CodebookBinding, CodebookLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.config.quant import QuantConfig
    from mens_exp.model.stored_codes import StoredCodes
    from mens_exp.model.stored_weights import StoredWeights

    Made = Callable[[StoredCodes, torch.nn.Parameter | None], Any]

_NAME = "prequantized"


class _Awaited(torch.nn.Module):
    """Placeholder for a layer whose codes are read later; transformers loads only its bias."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.bias = layer.bias


def _empty(found: StoredCodes, bias: torch.nn.Parameter | None) -> Any:
    outputs, inputs = found.codes_OI.shape
    layer = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.bias = bias  # type: ignore[assignment]
    return layer


def _plain(dtype: torch.dtype, found: StoredCodes, bias: torch.nn.Parameter | None) -> Any:
    """Return a plain linear layer with dequantized stored codes."""
    layer = _empty(found, bias)
    values_OI = found.rows(0, len(found.codes_OI)).to(dtype)
    layer.weight = torch.nn.Parameter(values_OI, requires_grad=False)
    return layer


def _layer(dtype: torch.dtype, found: StoredCodes, bias: torch.nn.Parameter | None) -> Any:
    """Return a linear layer of stored codes."""
    layer = _empty(found, bias)
    layer.__class__ = CodebookLinear
    if found.zeros_ON is None:
        book, scales = Codebook(levels=found.levels), found.scales_ON
    else:
        book = Affine(levels=found.levels, scaling=WITH_ZERO)
        scales = torch.stack([found.scales_ON, found.zeros_ON], -1)
    codes = book.packed(found.codes_OI)
    layer.take(_NAME, book, codes, scales, dtype=dtype, column_I=found.column_I)
    return layer


def dequantizing_config(weights: StoredWeights, dtype: torch.dtype) -> Any:
    """Return a configuration for transformers' loader that dequantizes layers stored as codes.

    Args:
        weights: the base's weights on disk.
        dtype: dtype of the dequantized weights.

    Returns:
        The configuration; None if no layer is stored as codes.
    """
    if not weights.coded_weights:
        return None
    config, _ = _classes()
    return config(weights, functools.partial(_plain, dtype))


@functools.cache
def _classes() -> tuple[type, type]:
    """Define a configuration and a quantizer class, and register them with transformers."""
    from transformers.quantizers import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    method = f"mens_exp_{_NAME}"

    @register_quantization_config(method)
    class Config(QuantizationConfigMixin):  # type: ignore[misc]  # untyped
        def __init__(self, weights: StoredWeights, made: Made) -> None:
            self.quant_method, self.weights, self.made = method, weights, made

        def to_dict(self) -> dict[str, Any]:
            return {"quant_method": self.quant_method}

    @register_quantizer(method)
    class Quantizer(HfQuantizer):  # type: ignore[misc]  # untyped
        @property
        def is_trainable(self) -> bool:
            return True

        def is_serializable(self) -> bool:
            return False

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            modules, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
            for key in self.quantization_config.weights.coded_weights:
                path = key.removesuffix(".weight")
                path = path if path in modules else f"{prefix}{path}"
                model.set_submodule(path, _Awaited(modules[path]))

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
            config, device = self.quantization_config, model.device
            awaited = {p: m for p, m in model.named_modules() if isinstance(m, _Awaited)}
            for path, empty in awaited.items():
                codes = config.weights.codes(path, device)
                model.set_submodule(path, config.made(codes, empty.bias))
            self.remove_quantization_config(model)

    return Config, Quantizer


class _Prequantized(CodebookBinding):
    """Layers that keep the codes of a base published quantized."""

    @property
    def library(self) -> str:
        """This module; the number is raised when the values it reads change."""
        return "mens_exp stored codes 1"

    def loading_config(
        self, quant: QuantConfig, skip: Sequence[str], weights: StoredWeights | None
    ) -> Any:
        """Return a configuration that loads stored codes through this module."""
        del skip
        assert weights is not None, "the loader of bases gives them"
        config, _ = _classes()
        return config(weights, functools.partial(_layer, compute_dtype(quant)))


PREQUANTIZED = _Prequantized(_NAME)
