"""Interface to bitsandbytes: configuration, requirements of its CPU kernels, and a self-test.

The self-test compares a forward and a backward pass of a 4-bit linear layer with torch.

Shapes of the self-test: B rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.config.quant import QuantConfig, StorageDtype
from mens_exp.model.offload import codes_of
from mens_exp.model.quiet import quiet
from mens_exp.quant.binding import (
    Binding,
    RoundTrip,
    as_linear,
    binding_of,
    compute_dtype,
)
from mens_exp.quant.round_trip import FourBitRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from transformers import BitsAndBytesConfig

    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.model.stored_weights import StoredWeights

INT8_THRESHOLD = 6.0  # arXiv:2208.07339, section 3.2, and the default of transformers
_STORAGE = {
    StorageDtype.u8: torch.uint8,
    StorageDtype.bf16: torch.bfloat16,
    StorageDtype.f32: torch.float32,
}


def quantization_config(
    config: QuantConfig, skip: Sequence[str] = (), weights: StoredWeights | None = None
) -> Any:
    """Translate the `quant` group for transformers' loader; None leaves weights unquantized.

    Args:
        config: the `quant` group; its block size cannot be set through the loader.
        skip: paths of modules that stay unquantized, in addition to the head.
        weights: the base's weights on disk, which a base that was published quantized needs.
    """
    return binding_of(config.spec).loading_config(config, skip, weights)


def _left_out(skip: Sequence[str]) -> list[str] | None:
    """Name the modules that stay unquantized; a list replaces transformers' default, the head."""
    return [*skip, "lm_head"] if skip else None


class _OfBitsandbytes(Binding):
    @property
    def library(self) -> str:
        """Name and version of bitsandbytes."""
        return f"bitsandbytes {metadata.version('bitsandbytes')}"


class _FourBit(_OfBitsandbytes):
    """bitsandbytes' 4-bit layers."""

    def loading_config(
        self, quant: QuantConfig, skip: Sequence[str], weights: StoredWeights | None
    ) -> BitsAndBytesConfig:
        """Return bitsandbytes' configuration, in which the block size cannot be set."""
        del weights
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quant.quant_type.value,
            bnb_4bit_use_double_quant=quant.double_quant,
            bnb_4bit_compute_dtype=compute_dtype(quant),
            bnb_4bit_quant_storage=_STORAGE[quant.storage_dtype],
            llm_int8_skip_modules=_left_out(skip),
        )

    def quantize(self, model: torch.nn.Module, paths: Collection[str], quant: QuantConfig) -> None:
        """Quantize the layers that transformers' loader skipped."""
        from bitsandbytes.nn import Linear4bit, Params4bit

        for path in paths:
            layer = as_linear(model.get_submodule(path))
            made = Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=compute_dtype(quant),
                device="meta",
            )
            values_OI = layer.weight.data
            made.weight = Params4bit(
                values_OI,
                requires_grad=False,
                blocksize=quant.block,
                compress_statistics=quant.double_quant,
                quant_type=quant.quant_type.value,
                quant_storage=_STORAGE[quant.storage_dtype],
                module=made,
            ).to(values_OI.device)
            made.bias = layer.bias
            model.set_submodule(path, made)

    def holds(self, module: torch.nn.Module) -> bool:
        """Return whether a module is a 4-bit layer."""
        return isinstance(module, _classes()[0])

    def keep_trainable(self, layers: Collection[Any]) -> None:
        """Keep evaluation from repacking weights.

        With AVX512-BF16, one evaluation forward repacks a 4-bit module's weight for inference. From
        then on its backward returns no input gradient, and adapters in earlier layers silently stop
        learning.
        """
        for layer in layers:
            layer.support_avx512bf16_for_cpu = False

    def finish(
        self,
        layers: Mapping[str, Any],
        quant: QuantConfig,
        read: Callable[[str, torch.device], torch.Tensor],
    ) -> None:
        """Requantize layers to the configured block size.

        ``BitsAndBytesConfig`` has no block size, so the loader uses the default. Other sizes are
        quantized from the published weights: requantizing the loaded codes would round twice.
        """
        for path, layer in layers.items():
            if layer.weight.quant_state.blocksize != quant.block:
                values_OI = read(path, layer.weight.device)
                layer.weight = quantized_like(layer.weight, values_OI, block_size=quant.block)

    def facts(self, layer: Any) -> dict[str, Any]:
        """Read back quantization type, block size, double quantization and storage dtype."""
        state = _state(layer)
        return {
            "quant": str(state.quant_type),
            "block_size": int(state.blocksize),
            "double_quant": bool(state.nested),
            "storage_dtype": str(layer.weight.dtype).removeprefix("torch."),
        }

    def dequantized(self, layer: Any) -> torch.Tensor:
        """Return the dequantized weight, f32 ``[O, I]``."""
        from bitsandbytes.functional import dequantize_4bit

        values: torch.Tensor = dequantize_4bit(codes_of(layer), _state(layer))
        return values.float()

    def round_trip(self, weight_OI: torch.Tensor, quant: QuantConfig) -> RoundTrip:
        """Quantize and dequantize a weight with the library's own functions."""
        with quiet():
            from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        codes, state = quantize_4bit(
            weight_OI.contiguous(),
            blocksize=quant.block,
            compress_statistics=quant.double_quant,
            quant_type=quant.quant_type.value,
        )
        stored = [codes, state.absmax]
        if state.nested:
            stored += [state.state2.absmax, state.offset]
        return RoundTrip(
            values=dequantize_4bit(codes, state),
            stored_bytes=sum(part.numel() * part.element_size() for part in stored),
        )

    def rows(
        self,
        read: Callable[[int, int], torch.Tensor],
        shape: tuple[int, int],
        quantizer: Quantizer,
    ) -> Callable[[int, int], torch.Tensor]:
        """Quantize in pieces with the library's own functions."""
        return FourBitRows(read, shape, quantizer).read

    def multiplies(self, layer: Any) -> bool:
        """Return whether the codes are as loaded; a CPU kernel for evaluation may repack them."""
        state = _state(layer)
        return not getattr(state, "packing_format_for_cpu", False)

    def weight(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the codes dequantized to the dtype of the inputs, as the library does."""
        from bitsandbytes.functional import dequantize_blockwise

        state = _state(layer)
        scales = state.absmax
        if state.nested:
            scales = dequantize_blockwise(scales, state.state2).add_(state.offset)
        found: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            codes_of(layer), scales, state.blocksize, state.quant_type, state.shape, dtype
        )
        return found

    def quantizing_on(self, device: torch.device) -> AbstractContextManager[None]:
        """Have transformers' loader quantize on a device."""
        return quantizing_on(device)


class _EightBit(_OfBitsandbytes):
    """bitsandbytes' 8-bit layers, with the changes in :mod:`mens_exp.quant.int8`."""

    def loading_config(
        self, quant: QuantConfig, skip: Sequence[str], weights: StoredWeights | None
    ) -> BitsAndBytesConfig:
        """Return bitsandbytes' configuration."""
        del quant, weights
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_8bit=True,
            llm_int8_threshold=INT8_THRESHOLD,
            llm_int8_skip_modules=_left_out(skip),
        )

    def holds(self, module: torch.nn.Module) -> bool:
        """Return whether a module is an 8-bit layer."""
        return isinstance(module, _classes()[1])

    def keep_trainable(self, layers: Collection[Any]) -> None:
        """Make layers compute the same in training and in evaluation."""
        from mens_exp.quant.int8 import in_one_mode

        in_one_mode(layers)

    def facts(self, layer: Any) -> dict[str, Any]:
        """Read back whether inputs are quantized."""
        quantizes = f"int8, outliers above {INT8_THRESHOLD} in f16"
        inputs = quantizes if self.quantizes_inputs(layer) else "as computed"
        return {"quant": "int8", "double_quant": False, "int8_inputs": inputs}

    def dequantized(self, layer: Any) -> torch.Tensor:
        """Return the dequantized weight, f32 ``[O, I]``."""
        return dequantized(layer.weight)

    def multiplies(self, layer: Any) -> bool:
        """Return whether inputs stay unquantized and the state holds the codes."""
        return not self.quantizes_inputs(layer) and layer.state.CB is not None

    def weight(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the codes times their scales, as the library computes them in training."""
        scales_O: torch.Tensor = layer.state.SCB
        found: torch.Tensor = layer.state.CB.data.to(dtype, copy=True)
        return found.mul_(scales_O.unsqueeze(1).mul(1 / 127))

    def quantizes_inputs(self, layer: Any) -> bool:
        """Return whether a layer quantizes its inputs, as it does on a GPU."""
        return bool(layer.weight.device.type != "cpu")

    def differs_in_evaluation(self, layer: Any) -> bool:
        """Return whether the layer is on a CPU, where the library quantizes evaluation inputs."""
        return not self.quantizes_inputs(layer)

    def as_published(self, layers: Collection[Any]) -> AbstractContextManager[None]:
        """Evaluate as the library does."""
        from mens_exp.quant.int8 import as_the_library_has_it

        return as_the_library_has_it(layers)


def _state(layer: Any) -> Any:
    """Return the quantization state of a 4-bit layer.

    A sharded weight is a plain tensor without a state; see `keep_quantization_state`.
    """
    return getattr(layer.weight, "quant_state", None) or layer.quant_state


FOUR_BIT, EIGHT_BIT = _FourBit(), _EightBit()


@functools.cache
def _classes() -> tuple[type, type]:
    with quiet():  # the first import of bitsandbytes if nothing is quantized
        from bitsandbytes.nn import Linear4bit, Linear8bitLt
    return Linear4bit, Linear8bitLt


@contextmanager
def quantizing_on(device: torch.device) -> Iterator[None]:
    """Make transformers' loader quantize on a device other than the one it loads to.

    A base loaded into host memory then has the codes that this device computes, and loads much
    faster. By default the loader quantizes on the device that it loads to.
    """
    with quiet():
        from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    convert = Bnb4bitQuantize.convert

    def converted(self: Any, input_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        home = {name: _tensor(values).device for name, values in input_dict.items()}
        there = {name: [_tensor(values).to(device)] for name, values in input_dict.items()}
        made = convert(self, there, **options)
        return {name: weight.to(home[name]) for name, weight in made.items()}

    Bnb4bitQuantize.convert = converted
    try:
        yield
    finally:
        Bnb4bitQuantize.convert = convert


def _tensor(values: Any) -> torch.Tensor:
    found: torch.Tensor = values[0] if isinstance(values, list) else values
    return found


def dequantized(weight: Any) -> torch.Tensor:
    """Return the dequantized values of a quantized weight, f32 ``[O, I]``.

    Args:
        weight: bitsandbytes' untyped ``Params4bit``, or the ``Int8Params`` of a module passed to
            :func:`keep_trainable`.
    """
    if weight.dtype == torch.int8:
        from mens_exp.quant.int8 import LEVELS

        stands_for: torch.Tensor = weight.data.float() * (weight.SCB / LEVELS)[:, None]
        return stands_for
    from bitsandbytes.functional import dequantize_4bit

    values: torch.Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return values.float()


def quantized_like(weight: Any, values_OI: torch.Tensor, *, block_size: int | None = None) -> Any:
    """Quantize other values with the settings of an existing 4-bit weight.

    The values are first rounded to the dtype to which the loader rounds weights, so that the result
    computes like any other 4-bit weight of the model.
    """
    from bitsandbytes.nn import Params4bit

    fresh = Params4bit(
        values_OI.to(weight.quant_state.dtype),
        requires_grad=False,
        blocksize=block_size or weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
    )
    return fresh.to(values_OI.device)


_ROWS, _INPUTS, _OUTPUTS = 8, 128, 64
# f32 sums of 128 products differ by about 1e-6 between kernels; a broken one is off by 0.1 or more.
_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBitTest:
    """Relative errors of the layer's output and of its input gradient, compared with torch."""

    device: str
    forward_error: float | None
    backward_error: float | None
    reason: str | None

    @property
    def passed(self) -> bool:
        """Whether both passes ran and agree with torch."""
        errors = (self.forward_error, self.backward_error)
        return all(error is not None and error < _TOLERANCE for error in errors)


def four_bit_test(device: str) -> FourBitTest:
    """Quantize a small layer to NF4 on a device and compare it with its own dequantized weight.

    Args:
        device: torch device name, such as ``cpu`` or ``cuda:0``.

    Returns:
        The errors, or the reason why they could not be measured.
    """
    try:
        with quiet():
            forward, backward = _errors(torch.device(device))
    except Exception as error:  # noqa: BLE001  # any exception of a broken kernel is the result
        reason = f"{type(error).__name__}: {error}"
        return FourBitTest(device=device, forward_error=None, backward_error=None, reason=reason)
    return FourBitTest(device=device, forward_error=forward, backward_error=backward, reason=None)


def _errors(device: torch.device) -> tuple[float, float]:
    import bitsandbytes as bnb

    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(_OUTPUTS, _INPUTS, generator=generator)
    layer = bnb.nn.Linear4bit(
        _INPUTS, _OUTPUTS, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    layer.weight = bnb.nn.Params4bit(weight_OI, requires_grad=False, quant_type="nf4")
    layer = layer.to(device)
    dequantized_OI = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    x_BI = torch.randn(_ROWS, _INPUTS, generator=generator).to(device).requires_grad_()
    upstream_BO = torch.randn(_ROWS, _OUTPUTS, generator=generator).to(device)
    output_BO = layer(x_BI)
    (gradient_BI,) = torch.autograd.grad(output_BO, x_BI, upstream_BO)
    expected_BO = x_BI.detach() @ dequantized_OI.float().T
    expected_BI = upstream_BO @ dequantized_OI.float()
    return _relative(output_BO, expected_BO), _relative(gradient_BI, expected_BI)


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.detach() - expected).norm() / expected.norm())
