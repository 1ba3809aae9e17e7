"""The training forward of LoRA layers, in place of PEFT's.

One autograd function computes all projections of an input. They share the input's dropout mask, and
the input's gradient is accumulated in place. Saved are the input after dropout, the mask at one bit
per element, and ``A x``. Frozen weights are not saved; the backward pass requests them again.
Parameters are f32; products use copies in the compute dtype, made once per change of the
parameters.

Evaluation keeps PEFT's own forward. So do layers whose base is not a product with a known weight,
and adapters other than LoRA and DoRA.

Shapes: M tokens, I inputs and O outputs of a projection, R rank, S the ranks of all projections.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mens_exp.lora.keyed import Dropped, KeyedDropout
from mens_exp.model.kernels import (
    add_gradient,
    add_product,
    linear,
    product,
    products_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mens_exp.layout.modules import LinearModule


class Weights(Protocol):
    """The weights of frozen linear layers."""

    def are_known(self, layer: Any) -> bool:
        """Return whether a layer computes ``W x + b`` with a weight that :meth:`of` returns."""

    def of(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return W, ``[O, I]``, in a dtype."""

    def are_in_fp8(self, layer: Any) -> bool:
        """Return whether training multiplies by a layer's weight in FP8."""


@dataclass(frozen=True, slots=True)
class _Projection:
    """A PEFT LoRA layer, and its rows in the stacked A of the layers that share its input."""

    layer: Any
    adapter: str
    rows: slice

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``[R, I]`` and B ``[O, R]``, f32."""
        return self.layer.lora_A[self.adapter].weight, self.layer.lora_B[self.adapter].weight

    @property
    def magnitude(self) -> torch.Tensor | None:
        """DoRA's magnitudes ``[O]``; None in LoRA."""
        if self.adapter not in self.layer.lora_magnitude_vector:
            return None
        found: torch.Tensor = self.layer.lora_magnitude_vector[self.adapter].weight
        return found

    @property
    def scale(self) -> float:
        """The factor of ``B A``."""
        return float(self.layer.scaling[self.adapter])

    @property
    def base(self) -> Any:
        """The frozen layer."""
        return self.layer.get_base_layer()


@dataclass(frozen=True, slots=True)
class _Copies:
    """The matrices of all projections of an input, in the compute dtype.

    B includes the scale of ``B A`` and the gain of dropout. ``length_O`` has the row norms of the
    summed weight in DoRA, f32.
    """

    A_SI: torch.Tensor
    B_OR: tuple[torch.Tensor, ...]
    length_O: torch.Tensor | None


class SharedInput:
    """The projections of one input tensor.

    The first one called computes the results of all; the others return theirs. A projection with
    DoRA is alone in its group; other groups may share its dropout.
    """

    def __init__(self, layers: Sequence[Any], adapter: str, weights: Weights) -> None:
        """Group PEFT's LoRA layers that read the same tensor."""
        self.weights = weights
        starts = [0]
        for layer in layers:
            starts.append(starts[-1] + layer.lora_A[adapter].weight.shape[0])
        self.projections = tuple(
            _Projection(layer, adapter, slice(start, end))
            for layer, start, end in zip(layers, starts[:-1], starts[1:], strict=True)
        )
        found = layers[0].lora_dropout[adapter]
        self.dropout = found if isinstance(found, KeyedDropout) else None
        self.readers = 1  # groups that share the dropout
        self._copies: tuple[tuple[Any, ...], _Copies] | None = None
        self._input: torch.Tensor | None = None
        self._results: dict[int, torch.Tensor] = {}

    def forget(self) -> None:
        """Drop the copies, and the results that no projection has taken.

        Version counters do not show every change: some optimizers write to ``parameter.data``.
        """
        self._copies = self._input = None
        self._results.clear()

    def result(self, number: int, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the output of a projection, in the dtype of the products."""
        if self._input is not x or number not in self._results:
            self._results = dict(enumerate(self._computed(x, dtype)))
            self._input = x
        found = self._results.pop(number)
        if not self._results:
            self._input = None
        return found

    def _computed(self, x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        x_MI = x.reshape(-1, x.shape[-1]).to(dtype)
        dropped = Dropped(x_MI)
        if self.dropout is not None:
            dropped = self.dropout.dropped(x, dtype, sharers=self.readers)
        first = self.projections[0]
        if first.magnitude is not None:
            made = _Dora.apply(x_MI, self, dropped, *first.pair, first.magnitude)  # type: ignore[no-untyped-call]
            outputs: tuple[torch.Tensor, ...] = (made,)
        else:
            pairs = [matrix for one in self.projections for matrix in one.pair]
            outputs = _Lora.apply(x_MI, self, dropped, *pairs)  # type: ignore[no-untyped-call]
        return [y_MO.view(*x.shape[:-1], y_MO.shape[1]) for y_MO in outputs]

    def copies(self, dtype: torch.dtype, gain: float) -> _Copies:
        """Return the matrices in a dtype; copied again if a parameter has changed."""
        pairs = [one.pair for one in self.projections]
        scales = [one.scale * gain for one in self.projections]
        versions = [(m.data_ptr(), m._version) for pair in pairs for m in pair]  # noqa: SLF001
        stamp = (dtype, *scales, *versions)
        if self._copies is None or self._copies[0] != stamp:
            with torch.no_grad():
                self._copies = (stamp, self._copied(pairs, scales, dtype))
        return self._copies[1]

    def _copied(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        scales: Sequence[float],
        dtype: torch.dtype,
    ) -> _Copies:
        A_RI = pairs[0][0]
        A_SI = A_RI.new_empty((self.projections[-1].rows.stop, A_RI.shape[1]), dtype=dtype)
        for one in self.projections:
            A_SI[one.rows] = one.pair[0]
        B_OR = [torch.empty_like(B_OR, dtype=dtype) for _, B_OR in pairs]
        for (_, whole_OR), scale, into_OR in zip(pairs, scales, B_OR, strict=True):
            torch.mul(whole_OR, scale, out=into_OR)
        return _Copies(A_SI, tuple(B_OR), self._lengths(dtype))

    def _lengths(self, dtype: torch.dtype) -> torch.Tensor | None:
        one = self.projections[0]
        if one.magnitude is None:
            return None
        A_RI, B_OR = one.pair
        weight_OI = self.weights.of(one.base, dtype).float()
        with torch.autocast(weight_OI.device.type, enabled=False):
            summed_OI = weight_OI.addmm(B_OR, A_RI, alpha=one.scale)
        lengths_O: torch.Tensor = torch.linalg.vector_norm(summed_OI, dim=1)
        return lengths_O


class _Lora(torch.autograd.Function):
    """``W x + b + s · B A d(x)`` for every projection of an input; d is dropout."""

    @staticmethod
    def forward(
        ctx: Any, x_MI: torch.Tensor, shared: SharedInput, dropped: Dropped, *pairs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs, ``[M, O]`` each."""
        del pairs
        ctx.set_materialize_grads(value=False)
        copies = shared.copies(x_MI.dtype, dropped.gain)
        dropped_MI = dropped.values.reshape(x_MI.shape)
        low_MS = product(dropped_MI, copies.A_SI.t())
        outputs = []
        for one, B_OR in zip(shared.projections, copies.B_OR, strict=True):
            weight_OI = shared.weights.of(one.base, x_MI.dtype)
            in_fp8 = shared.weights.are_in_fp8(one.base)
            y_MO = linear(x_MI, weight_OI, _bias(one, x_MI), in_fp8=in_fp8)
            outputs.append(add_product(y_MO, low_MS[:, one.rows], B_OR.t()))
        ctx.save_for_backward(dropped_MI, low_MS, dropped.bits)
        ctx.shared, ctx.mask, ctx.copies = shared, dropped.mask, copies
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        """Return the gradients of the input and of each pair."""
        dropped_MI, low_MS, bits = ctx.saved_tensors
        shared, mask, copies = ctx.shared, ctx.mask, ctx.copies
        gain = 1.0 if mask is None else mask.gain
        slope_MS = torch.zeros_like(low_MS)
        of_B: list[torch.Tensor | None] = []
        for one, B_OR, g_MO in zip(shared.projections, copies.B_OR, upstream, strict=True):
            if g_MO is None:  # nobody used the output
                of_B.append(None)
                continue
            slope_MS[:, one.rows] = product(g_MO, B_OR)
            of_B.append(product(g_MO.t(), low_MS[:, one.rows]).float().mul_(one.scale * gain))
        of_A_SI = product(slope_MS.t(), dropped_MI).float()
        of_pairs = [
            part
            for one, of_B_OR in zip(shared.projections, of_B, strict=True)
            for part in (None if of_B_OR is None else of_A_SI[one.rows], of_B_OR)
        ]
        of_x_MI = None
        if ctx.needs_input_grad[0]:
            of_x_MI = product(slope_MS, copies.A_SI)
            if mask is not None:
                mask.clear(of_x_MI, bits)
            for one, g_MO in zip(shared.projections, upstream, strict=True):
                if g_MO is not None:
                    weight_OI = shared.weights.of(one.base, g_MO.dtype)
                    in_fp8 = shared.weights.are_in_fp8(one.base)
                    add_gradient(of_x_MI, g_MO, weight_OI, in_fp8=in_fp8)
        return of_x_MI, None, None, *of_pairs


class _Dora(torch.autograd.Function):
    """DoRA (arXiv:2402.09353) of one projection, with the ratio g of magnitude to length.

    ``W x + b + (g − 1) · W d(x) + g · s · B A d(x)``, where d is dropout. As in PEFT, the term in
    ``g − 1`` uses the input after dropout too. The row norm of the summed weight is a constant in
    the backward pass (section 4.3).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MI: torch.Tensor,
        shared: SharedInput,
        dropped: Dropped,
        A_RI: torch.Tensor,
        B_OR: torch.Tensor,
        magnitude_O: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output, ``[M, O]``."""
        del A_RI, B_OR
        copies, (one,) = shared.copies(x_MI.dtype, dropped.gain), shared.projections
        dropped_MI = dropped.values.reshape(x_MI.shape)
        weight_OI = shared.weights.of(one.base, x_MI.dtype)
        low_MR = product(dropped_MI, copies.A_SI.t())
        turned_MO = product(dropped_MI, weight_OI.t(), scale=dropped.gain)
        rest_MO = None if dropped.mask is None else linear(x_MI, weight_OI, None).sub_(turned_MO)
        add_product(turned_MO, low_MR, copies.B_OR[0].t())
        assert copies.length_O is not None, "DoRA has lengths"
        ratio_O = magnitude_O / copies.length_O
        y_MO = (turned_MO * ratio_O).to(x_MI.dtype)
        if rest_MO is not None:
            y_MO.add_(rest_MO)
        if one.base.bias is not None:
            y_MO.add_(one.base.bias)
        ctx.save_for_backward(dropped_MI, low_MR, turned_MO, ratio_O, dropped.bits)
        ctx.shared, ctx.mask, ctx.copies = shared, dropped.mask, copies
        return y_MO

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Return the gradients of the input, of A and B, and of the magnitude."""
        dropped_MI, low_MR, turned_MO, ratio_O, bits = ctx.saved_tensors
        (g_MO,), (one,) = upstream, ctx.shared.projections
        gain = 1.0 if ctx.mask is None else ctx.mask.gain
        B_OR, dtype = ctx.copies.B_OR[0], g_MO.dtype
        of_magnitude_O = (g_MO.float() * turned_MO).sum(0) / ctx.copies.length_O
        turned_g_MO = (g_MO * ratio_O).to(dtype)
        slope_MR = product(turned_g_MO, B_OR)
        of_A_RI = product(slope_MR.t(), dropped_MI).float()
        of_B_OR = product(turned_g_MO.t(), low_MR).float().mul_(one.scale * gain)
        of_x_MI = None
        if ctx.needs_input_grad[0]:
            weight_OI = ctx.shared.weights.of(one.base, dtype)
            of_x_MI = product(slope_MR, ctx.copies.A_SI)
            if ctx.mask is None:
                add_product(of_x_MI, turned_g_MO, weight_OI)
            else:
                add_product(of_x_MI, turned_g_MO.sub_(g_MO), weight_OI, scale=gain)
                ctx.mask.clear(of_x_MI, bits)
                add_product(of_x_MI, g_MO, weight_OI)
        return of_x_MI, None, None, of_A_RI, of_B_OR, of_magnitude_O


def _bias(one: _Projection, like: torch.Tensor) -> torch.Tensor | None:
    bias: torch.Tensor | None = one.base.bias
    return None if bias is None else bias.to(like.dtype)


class _Forward:
    """The forward of one LoRA layer: ours in training, otherwise PEFT's."""

    def __init__(self, layer: Any, adapter: str, shared: SharedInput, number: int) -> None:
        self.layer, self.adapter, self.shared, self.number = layer, adapter, shared, number
        self.of_peft = layer.forward
        self.keeps_dtype = hasattr(layer.get_base_layer().weight, "quant_state")

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or not self._applies(x):
            found: torch.Tensor = self.of_peft(x, *args, **kwargs)
            return found
        y = self.shared.result(self.number, x, products_dtype(x))
        return y.to(x.dtype) if self.keeps_dtype else y

    def _applies(self, x: torch.Tensor) -> bool:
        layer = self.layer
        converted = not torch.is_autocast_enabled(x.device.type)  # by PEFT, to the adapter's dtype
        return (
            torch.is_grad_enabled()
            and not (converted and x.dtype != layer.lora_A[self.adapter].weight.dtype)
            and not layer.disable_adapters
            and not layer.merged
            and layer.active_adapters == [self.adapter]
            and self.shared.weights.are_known(layer.get_base_layer())
        )


def take_over(
    adapted: Iterable[tuple[LinearModule, Any]], *, adapter: str, weights: Weights, together: bool
) -> list[SharedInput]:
    """Replace the training forward of PEFT's LoRA layers; ``del layer.forward`` undoes it.

    Args:
        adapted: PEFT's LoRA layers, each with the module that it adapts.
        adapter: PEFT's name of the adapter.
        weights: the frozen weights.
        together: whether modules with the same ``reads`` are known to be called with one tensor.

    Returns:
        The groups; call :meth:`SharedInput.forget` on each at every micro-batch.
    """
    groups: dict[str, list[Any]] = {}
    for target, layer in adapted:
        if _is_known(layer, adapter):
            alone = not together or adapter in layer.lora_magnitude_vector
            groups.setdefault(target.path if alone else target.reads, []).append(layer)
    made = [SharedInput(layers, adapter, weights) for layers in groups.values()]
    readers = Counter(shared.dropout for shared in made)
    for shared in made:
        shared.readers = readers[shared.dropout]
        for number, one in enumerate(shared.projections):
            one.layer.forward = _Forward(one.layer, adapter, shared, number)
    return made


def _is_known(layer: Any, adapter: str) -> bool:
    """Return whether a layer is PEFT's LoRA or DoRA on a linear layer, without a LoRA bias."""
    from peft.tuners.lora import bnb
    from peft.tuners.lora.layer import Linear
    from peft.tuners.lora.variants import DoraLinearVariant

    variant = layer.lora_variant.get(adapter)
    return (
        type(layer) in {Linear, bnb.Linear4bit, bnb.Linear8bitLt}
        and (variant is None or type(variant) is DoraLinearVariant)
        and not layer.lora_bias[adapter]
    )
