"""Random numbers keyed by layer name, so that runs with common layers draw the same numbers.

No global generator is used, so there is no generator state to save.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mens_exp.layout.targets import LinearModule

_LEVELS = 32768  # dropout compares 15 random bits per element
_STREAMS = "base_model.model."  # prefix of every stream's name; changing it would change the masks


def key_of(*parts: object) -> int:
    """Hash the parts to a 63-bit seed."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def initialise(A_RI: torch.Tensor, B_OR: torch.Tensor, *, seed: int, layer: str) -> None:
    """Draw A uniformly from ``±1/sqrt(in)`` and set B to zero, in place.

    The bound is that of ``kaiming_uniform_(a=sqrt(5))``, PEFT's own initialization of A
    (https://github.com/huggingface/peft, LoraLayer.reset_lora_parameters).
    """
    generator = torch.Generator().manual_seed(key_of(seed, "lora_a", layer))
    bound = 1 / math.sqrt(A_RI.shape[1])
    draws = torch.empty(A_RI.shape, dtype=torch.float32).uniform_(
        -bound, bound, generator=generator
    )
    with torch.no_grad():
        A_RI.copy_(draws)
        B_OR.zero_()


class _Drop(torch.autograd.Function):
    """``x · scale`` with dropped elements set to zero; saves only the mask for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
        """Scale, then zero dropped elements in place."""
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return _scaled_and_cleared(x, keep, scale)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Propagate the gradient through the kept elements."""
        (keep,) = ctx.saved_tensors
        return _scaled_and_cleared(upstream[0], keep, ctx.scale), None, None


def _scaled_and_cleared(x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """Zero elements by a bitwise AND, which is far faster than a boolean fill on CPU."""
    kept = (x * scale).contiguous()
    integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
    kept.view(integer).bitwise_and_(keep.to(integer))
    return kept


def _keep(key: int, threshold: int, like: torch.Tensor) -> torch.Tensor:
    """Draw the mask, int16 in the shape of ``like``: all bits set if kept, none if dropped."""
    if like.device.type == "cpu":
        return torch.from_numpy(_keep_mask(key, threshold, like.numel())).view(like.shape)
    generator = torch.Generator(like.device).manual_seed(key)
    draws = torch.randint(
        _LEVELS, like.shape, generator=generator, device=like.device, dtype=torch.int16
    )
    return torch.where(draws < threshold, 0, -1).to(torch.int16)


def _keep_mask(key: int, threshold: int, size: int) -> np.ndarray:
    """Return the int16 mask: all bits set if an element is kept, none if it is dropped.

    A 15-bit draw minus the threshold is negative exactly for dropped elements. The mask is the
    sign bit, shifted over all bits and inverted. Integer operations on whole arrays take a tenth of
    the time of torch's CPU generator.
    """
    words = np.random.SFC64(key).random_raw((size + 3) // 4)
    bits = words.view(np.int16)[:size]
    np.bitwise_and(bits, _LEVELS - 1, out=bits)
    np.subtract(bits, threshold, out=bits)
    np.right_shift(bits, 15, out=bits)
    return np.invert(bits, out=bits)


class KeyedDropout(torch.nn.Module):
    """Dropout whose mask is a function of (seed, layer, micro-batch), shared by equal inputs.

    Projections that read the same tensor (q, k, v; gate, up) share one instance and get the same
    mask, which is drawn once. On CPU the bits come from SFC64, which is an order of magnitude
    faster there than torch's generator. The probability is rounded to a multiple of 1/32768, and
    the scale uses the rounded value, so that the expectation is exact.
    """

    def __init__(self, p: float, *, seed: int, layer: str) -> None:
        """Set the probability and the key of the stream.

        Args:
            p: probability of dropping an element, ``0 <= p < 1``.
            seed: the run's seed.
            layer: name of the input, unique in the model.
        """
        super().__init__()
        self.threshold = min(round(p * _LEVELS), _LEVELS - 1)
        self.seed = seed
        self.layer = layer
        self.micro_batch = 0
        self.sharers = 1  # projections that call it in turn with the same tensor
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self._calls_left = 0

    def begin(self, micro_batch: int) -> None:
        """Start a micro-batch and discard the last mask."""
        self.micro_batch = micro_batch
        self._last = None

    def key(self) -> int:
        """Hash the stream and the micro-batch."""
        return key_of(self.seed, "dropout", self.layer, self.micro_batch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of ``x`` in training, and return it unchanged otherwise."""
        if not self.training or self.threshold == 0:
            return x
        if self._last is not None and self._last[0] is x:
            kept = self._last[1]
            self._calls_left -= 1
            if not self._calls_left:
                self._last = None  # keeping it would retain memory that checkpointing should free
            return kept
        scale = _LEVELS / (_LEVELS - self.threshold)
        keep = _keep(self.key(), self.threshold, x)
        kept = cast("torch.Tensor", _Drop.apply(x, keep, scale))  # type: ignore[no-untyped-call]
        self._calls_left = self.sharers - 1
        self._last = (x, kept) if self._calls_left else None
        return kept


class HeadDropout(KeyedDropout):
    """Dropout before a head that processes positions chunk by chunk.

    Each chunk has a separate mask: the number of preceding rows is part of the key. Evaluation does
    not advance the count, and a micro-batch restarts it at its first row.
    """

    rows = 0

    def begin(self, micro_batch: int) -> None:
        """Start a micro-batch at its first row."""
        super().begin(micro_batch)
        self.rows = 0

    def key(self) -> int:
        """Hash the stream, the micro-batch and the index of the next row."""
        return key_of(self.seed, "dropout", self.layer, self.micro_batch, self.rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of the rows ``x``, which follow those of the previous call."""
        dropped = super().forward(x)
        if self.training:
            self._last = None  # the next chunk always has different rows
            self.rows += x.shape[0]
        return dropped


def share_dropout(
    adapted: Iterable[tuple[LinearModule, Any]], *, p: float, seed: int, adapter: str
) -> list[KeyedDropout]:
    """Replace PEFT's dropout modules, using one instance for all projections of an input.

    If the dropout probability is zero, nothing is replaced, because PEFT then skips dropout.

    Args:
        adapted: PEFT's LoRA layers, each with the module that it adapts.
        p: dropout probability.
        seed: the run's seed.
        adapter: PEFT's name of the adapter.

    Returns:
        The instances; call :meth:`KeyedDropout.begin` on each at every micro-batch.
    """
    shared: dict[str, KeyedDropout] = {}
    for target, module in adapted:
        if p == 0:
            continue
        stream = f"{_STREAMS}{target.reads}"
        if stream not in shared:
            kind = HeadDropout if target.layer is None else KeyedDropout
            shared[stream] = kind(p, seed=seed, layer=stream)
            shared[stream].sharers = 0
        shared[stream].sharers += 1
        module.lora_dropout[adapter] = shared[stream]
    return list(shared.values())
