"""Bindings: the objects that load, describe and dequantize base weights, one for each quantizer.

:mod:`mens_exp.config.quant` has the facts of a quantizer that need no torch, and names its
binding. The bindings of bitsandbytes are in :mod:`mens_exp.quant.bnb`.

Shapes: O outputs and I inputs of a layer, N rows of a weight.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.config.plugins import named_object

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.config.quant import QuantConfig, QuantizerSpec
    from mens_exp.model.stored_weights import StoredWeights


DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def compute_dtype(config: QuantConfig) -> torch.dtype:
    """Return the compute format as a torch dtype."""
    return DTYPES[config.compute_dtype.value]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTrip:
    """A weight after quantization and dequantization.

    Attributes:
        values: dequantized values in the weight's shape, f32.
        stored_bytes: size of the codes and their scales.
    """

    values: torch.Tensor
    stored_bytes: int


class Binding:
    """Interface to the layers of one quantizer; the defaults leave weights unquantized."""

    @property
    def library(self) -> str:
        """Name and version of the binding's package, for the record."""
        package = type(self).__module__.partition(".")[0]
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:  # no distribution has the module's name
            return package

    def loading_config(
        self, quant: QuantConfig, skip: Sequence[str], weights: StoredWeights | None
    ) -> Any:
        """Return the configuration for transformers' loader; None loads weights unquantized.

        Args:
            quant: the `quant` group.
            skip: paths of modules that stay unquantized, in addition to the head.
            weights: the base's weights on disk.
        """
        del quant, skip, weights

    def quantize(self, model: torch.nn.Module, paths: Collection[str], quant: QuantConfig) -> None:
        """Quantize modules of a loaded model in place, if the loader did not.

        Args:
            model: transformers' model, with weights in the compute format.
            paths: the linear modules of decoder layers to quantize.
            quant: the settings of these modules.
        """

    def holds(self, module: torch.nn.Module) -> bool:
        """Return whether a module is a layer of this quantizer."""
        del module
        return False

    def keep_trainable(self, layers: Collection[Any]) -> None:
        """Make layers compute the same in evaluation as in training, and keep their backward."""

    def finish(
        self,
        layers: Mapping[str, Any],
        quant: QuantConfig,
        read: Callable[[str, torch.device], torch.Tensor],
    ) -> None:
        """Apply the settings that the loader does not support.

        Args:
            layers: by path.
            quant: the `quant` group.
            read: returns the published weight of a path on a device, ``[O, I]``.
        """

    def facts(self, layer: Any) -> dict[str, Any]:
        """Read back how a layer is stored: ``quant``, ``double_quant`` and other known facts."""
        raise NotImplementedError

    def dequantized(self, layer: Any) -> torch.Tensor:
        """Return the dequantized weight of a layer, f32 ``[O, I]``."""
        raise NotImplementedError

    def round_trip(self, weight_OI: torch.Tensor, quant: QuantConfig) -> RoundTrip:
        """Quantize and dequantize a weight by itself, on its own device.

        Args:
            weight_OI: f32; its width is a multiple of the block.
            quant: the `quant` group.
        """
        raise NotImplementedError

    def rows(
        self,
        read: Callable[[int, int], torch.Tensor],
        shape: tuple[int, int],
        quantizer: Quantizer,
    ) -> Callable[[int, int], torch.Tensor]:
        """Quantize a weight piece by piece; return a reader of dequantized rows, f32 ``[N, I]``.

        Args:
            read: returns rows ``first`` to ``last`` (exclusive) of the weight, ``[N, I]``.
            shape: ``(O, I)``; blocks divide the width.
            quantizer: the record of the quantizer.
        """
        raise NotImplementedError

    def multiplies(self, layer: Any) -> bool:
        """Return whether the training forward is a product with :meth:`weight`, plus a bias."""
        del layer
        return False

    def weight(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight that a layer multiplies inputs of a dtype by, ``[O, I]``."""
        raise NotImplementedError

    def quantizes_inputs(self, layer: Any) -> bool:
        """Return whether a layer quantizes its inputs."""
        del layer
        return False

    def differs_in_evaluation(self, layer: Any) -> bool:
        """Return whether other programs that load the base evaluate this layer differently."""
        del layer
        return False

    def as_published(self, layers: Collection[Any]) -> AbstractContextManager[None]:
        """Within the context, evaluate as other programs that load the base do."""
        del layers
        return nullcontext()

    def quantizing_on(self, device: torch.device) -> AbstractContextManager[None]:
        """Within the context, quantize on a device other than the one the base is loaded to."""
        del device
        return nullcontext()


def as_linear(layer: Any) -> torch.nn.Linear:
    """Return transformers' `Conv1D`, whose weight is ``[I, O]``, as a linear layer."""
    if isinstance(layer, torch.nn.Linear):
        return layer
    inputs, outputs = layer.weight.shape
    made = torch.nn.Linear(inputs, outputs, device="meta")
    made.weight = torch.nn.Parameter(layer.weight.data.T.contiguous(), requires_grad=False)
    made.bias = layer.bias
    return made


UNQUANTIZED = Binding()
_LOADED: dict[str, Binding] = {}


def binding_of(spec: QuantizerSpec) -> Binding:
    """Return the binding that a quantizer names.

    Raises:
        SetupError: it cannot be imported, or is not a binding.
    """
    if spec.name in _LOADED:
        return _LOADED[spec.name]
    found = named_object(spec.binding, Binding, of=f"the quantizer {spec.name}")
    return _LOADED.setdefault(spec.name, found)


def loaded_bindings() -> tuple[Binding, ...]:
    """Return the bindings requested so far in this process, in order."""
    return tuple(_LOADED.values())
