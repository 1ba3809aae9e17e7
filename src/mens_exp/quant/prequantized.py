"""Bases that were published quantized: their own codes, kept as they are.

transformers builds the model with empty places for the layers of codes and loads the rest; the
codes are read from the files, translated to a codebook's without a change of any value.
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
    """The place of a layer whose codes transformers does not read; it reads its bias."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.bias = layer.bias


def _empty(found: StoredCodes, bias: torch.nn.Parameter | None) -> Any:
    outputs, inputs = found.codes_OI.shape
    layer = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.bias = bias  # type: ignore[assignment]
    return layer


def _plain(dtype: torch.dtype, found: StoredCodes, bias: torch.nn.Parameter | None) -> Any:
    """Return a linear layer of what stored codes stand for."""
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
    """Return a configuration for transformers' loader that gives layers of codes plain weights.

    Args:
        weights: the base's weights on disk.
        dtype: of the plain weights.

    Returns:
        The configuration; None where no layer is stored as codes.
    """
    if not weights.coded_weights:
        return None
    config, _ = _classes()
    return config(weights, functools.partial(_plain, dtype))


@functools.cache
def _classes() -> tuple[type, type]:
    """Return transformers' classes of a quantization of ours, registered with its loader."""
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
    """Layers of a base's own codes."""

    @property
    def library(self) -> str:
        """This module; the number is raised if it reads other values."""
        return "mens_exp stored codes 1"

    def loading_config(
        self, quant: QuantConfig, skip: Sequence[str], weights: StoredWeights | None
    ) -> Any:
        """Return a configuration that has the layers of codes read here."""
        del skip
        assert weights is not None, "the loader of bases gives them"
        config, _ = _classes()
        return config(weights, functools.partial(_layer, compute_dtype(quant)))


PREQUANTIZED = _Prequantized(_NAME)
