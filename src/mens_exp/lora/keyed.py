"""Random numbers keyed by layer name, so that runs with common layers draw the same numbers.

No global generator is used, so there is no generator state to save.
"""

from __future__ import annotations

import functools
import hashlib
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mens_exp.layout.modules import LinearModule

# The generators of masks, as records name them.
SFC64 = "SFC64, 15 bits"
OF_DEVICE = "torch's generator of the device"
LOWBIAS32 = "lowbias32 twice, 15 bits"
GENERATORS = (SFC64, OF_DEVICE, LOWBIAS32)
_LEVELS = 32768  # dropout compares 15 random bits per element
_Result = TypeVar("_Result", torch.Tensor, "Dropped")
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


def usual_generator(device: torch.device) -> str:
    """Return the generator of masks in layers that are not compiled.

    Outside a compiled kernel, the hash takes 5 to 9 ns for each number on a CPU, and SFC64 takes 1;
    in one kernel with the rest of dropout, the hash takes 0.7 (measured: experiments/LOG.md).
    """
    return SFC64 if device.type == "cpu" else OF_DEVICE


def hashed(count: int, key: int, device: torch.device) -> torch.Tensor:
    """Return 15 random bits for each counter below ``count``, int32; the same on every device.

    Each is ``h(h(counter ^ low) + high) >> 17`` modulo 2³², where low and high are the halves of a
    63-bit key and h is lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018,
    https://nullprogram.com/blog/2018/07/31/). One round would give all keys the same numbers in
    another order.
    """
    return _hashed(count, *_halves(key), device)


def _hashed(count: int, low: int, high: int, device: torch.device) -> torch.Tensor:
    counter = torch.arange(count, dtype=torch.int32, device=device)
    return (_lowbias32(_lowbias32(counter ^ low) + high) >> 17) & (_LEVELS - 1)


def _lowbias32(x: torch.Tensor) -> torch.Tensor:
    """Hash int32 numbers; products wrap around, and the shifts are made logical by a mask."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def _halves(key: int) -> tuple[int, int]:
    """Return the low 32 bits of a key as a signed number, and the other 31."""
    low = key & 0xFFFFFFFF
    return low - ((low >> 31) << 32), key >> 32


def _cleared(values_N: torch.Tensor, low: int, high: int, threshold: int) -> torch.Tensor:
    draws_N = _hashed(values_N.shape[0], low, high, values_N.device)
    return torch.where(draws_N >= threshold, values_N, 0)


@functools.cache
def _compiled_cleared() -> Callable[[torch.Tensor, int, int, int], torch.Tensor]:
    """Return `_cleared` as one kernel for all keys and numbers of elements."""
    from mens_exp.model.compiled import read_no_stored_graphs

    read_no_stored_graphs()
    return torch.compile(_cleared, dynamic=True)


@dataclass(frozen=True, slots=True)
class Mask:
    """The elements that dropout drops, as a function of a key.

    Draws of SFC64 are made on the CPU and kept as one bit for each element. Those of the other
    generators are made again from the key wherever they are needed, which takes no memory.

    Attributes:
        key: seed of the draws, 63 bits.
        threshold: an element is dropped if its draw is less.
        generator: one of `GENERATORS`.
        is_compiled: whether LOWBIAS32 draws and applies a mask in one compiled kernel; the numbers
            are the same.
    """

    key: int
    threshold: int
    generator: str = SFC64
    is_compiled: bool = False

    @property
    def gain(self) -> float:
        """The factor on kept elements that preserves the expectation."""
        return _LEVELS / (_LEVELS - self.threshold)

    def draw(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return a set bit for each kept element, packed into bytes; None except with SFC64."""
        if self.generator != SFC64:
            return None
        words = np.random.SFC64(self.key).random_raw((like.numel() + 3) // 4)
        draws = words.view(np.int16)[: like.numel()]
        np.bitwise_and(draws, _LEVELS - 1, out=draws)
        return torch.from_numpy(np.packbits(draws >= self.threshold)).to(like.device)

    def clear(self, values: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
        """Set dropped elements to zero, in place, even if they are NaN or infinite.

        A bitwise AND is far faster than a boolean fill on CPU.

        Args:
            values: in any floating-point format of 2 or 4 bytes.
            bits: what :meth:`draw` returned for values of this shape.
        """
        if self.is_compiled:
            return values.copy_(self.cleared(values, bits))
        keep = self._keep(values, bits)
        values.view(keep.dtype).bitwise_and_(keep)
        return values

    def cleared(self, values: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
        """Return a copy with dropped elements set to zero; see :meth:`clear`."""
        if self.is_compiled:
            made = _compiled_cleared()(values.reshape(-1), *_halves(self.key), self.threshold)
            return made.view(values.shape)
        keep = self._keep(values, bits)
        return (values.view(keep.dtype) & keep).view(values.dtype)

    def _keep(self, like: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
        """Return integers as wide as the elements: all bits set if kept, none if dropped."""
        integer = {2: torch.int16, 4: torch.int32}[like.element_size()]
        if bits is not None:
            ones = torch.from_numpy(np.unpackbits(bits.cpu().numpy(), count=like.numel()))
            return ones.to(like.device).view(like.shape).to(integer).neg_()
        if self.generator == LOWBIAS32:
            draws = hashed(like.numel(), self.key, like.device).view(like.shape)
        else:
            generator = torch.Generator(like.device).manual_seed(self.key)
            draws = torch.randint(
                _LEVELS, like.shape, generator=generator, device=like.device, dtype=torch.int16
            )
        return (draws >= self.threshold).to(integer).neg_()


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tensor with dropped elements set to zero, not yet scaled by ``mask.gain``.

    ``mask`` is None if dropout is off; the values are then the tensor itself.
    """

    values: torch.Tensor
    mask: Mask | None = None
    bits: torch.Tensor | None = None

    @property
    def gain(self) -> float:
        """The factor that is still to be applied."""
        return 1.0 if self.mask is None else self.mask.gain


class _Drop(torch.autograd.Function):
    """``x · gain`` with dropped elements set to zero; saves only the mask for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: Mask) -> torch.Tensor:
        """Scale, then zero dropped elements."""
        bits = mask.draw(x)
        ctx.save_for_backward(bits)
        ctx.mask = mask
        return mask.clear((x * mask.gain).contiguous(), bits)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Propagate the gradient through the kept elements."""
        (bits,) = ctx.saved_tensors
        return ctx.mask.clear((upstream[0] * ctx.mask.gain).contiguous(), bits), None


class KeyedDropout(torch.nn.Module):
    """Dropout whose mask is a function of (seed, layer, micro-batch), shared by equal inputs.

    Projections that read the same tensor (q, k, v; gate, up) share one instance and get the same
    mask, which is drawn once. The probability is rounded to a multiple of 1/32768, and the scale
    uses the rounded value, so that the expectation is exact.
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
        self.generator: str | None = None  # None: the usual one of the input's device
        self.is_compiled = False
        self.micro_batch = 0
        self.sharers = 1  # projections that call it in turn with the same tensor
        self._last: tuple[torch.Tensor, torch.Tensor | Dropped] | None = None
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
        if not self.is_on:
            return x

        def drawn() -> torch.Tensor:
            found: torch.Tensor = _Drop.apply(x, self.mask(x.device))  # type: ignore[no-untyped-call]
            return found

        return self._shared(x, torch.Tensor, drawn, self.sharers)

    def dropped(self, x: torch.Tensor, dtype: torch.dtype, *, sharers: int) -> Dropped:
        """Return ``x`` detached and in a dtype, with elements dropped in training.

        The caller is responsible for the gradient and the scale.

        Args:
            x: the input.
            dtype: dtype of the result.
            sharers: number of consecutive calls with the same tensor.
        """
        values = x.detach().to(dtype)
        if not self.is_on:
            return Dropped(values)

        def drawn() -> Dropped:
            mask = self.mask(x.device)
            bits = mask.draw(values)
            return Dropped(mask.cleared(values, bits), mask, bits)

        return self._shared(x, Dropped, drawn, sharers)

    @property
    def is_on(self) -> bool:
        """Whether any element is dropped."""
        return self.training and self.threshold > 0

    def mask(self, device: torch.device) -> Mask:
        """Return the mask of the next tensor, which is on a device."""
        generator = self.generator or usual_generator(device)
        is_compiled = self.is_compiled and generator == LOWBIAS32
        return Mask(self.key(), self.threshold, generator, is_compiled)

    def _shared(
        self, x: torch.Tensor, kind: type[_Result], computed: Callable[[], _Result], sharers: int
    ) -> _Result:
        """Return the result for ``x``, computed once for all callers that share it."""
        if self._last is not None and self._last[0] is x and isinstance(self._last[1], kind):
            found = self._last[1]
            self._calls_left -= 1
            if not self._calls_left:
                self._last = None  # keeping it would retain memory that checkpointing should free
            return found
        made = computed()
        self._calls_left = sharers - 1
        self._last = (x, made) if self._calls_left else None
        return made


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

    def _shared(
        self, x: torch.Tensor, kind: type[_Result], computed: Callable[[], _Result], sharers: int
    ) -> _Result:
        """Compute the result of the rows ``x``, which follow those of the previous call."""
        del kind, sharers
        made = computed()
        self.rows += x.shape[0]
        return made


class EmbeddingNoise(torch.nn.Module):
    """Noise on the embeddings of a training pass (NEFTune, arXiv:2310.05914, Algorithm 1).

    Each value is uniform between ±alpha / sqrt(L · D), with L the tokens of its document and D the
    width. transformers' hook takes L from the whole sequence, so that packing or padding would
    reduce a document's noise. The noise is a function of (seed, micro-batch). Passes without
    gradients have none: validation, generation, and the base that an objective compares with.
    """

    def __init__(self, alpha: float, *, seed: int) -> None:
        """Set the strength and the key of the stream."""
        super().__init__()
        self.alpha, self.seed = alpha, seed
        self.micro_batch = 0
        self._lengths_BT: torch.Tensor | None = None

    def begin(self, micro_batch: int) -> None:
        """Start a micro-batch."""
        self.micro_batch = micro_batch

    @contextmanager
    def over(self, lengths: Callable[[], torch.Tensor]) -> Iterator[None]:
        """Add noise inside the block, in training.

        Args:
            lengths: returns the tokens of each position's document, ``[B, T]``; 0 at padding.
        """
        is_on = self.alpha > 0 and self.training and torch.is_grad_enabled()
        self._lengths_BT = lengths() if is_on else None
        try:
            yield
        finally:
            self._lengths_BT = None

    def unit(self, embedded_BTD: torch.Tensor) -> torch.Tensor:
        """Draw the noise before scaling: f32 between ±1, ``[B, T, D]``."""
        device = embedded_BTD.device
        key = key_of(self.seed, "neftune", self.micro_batch)
        generator = torch.Generator(device).manual_seed(key)
        noise_BTD = torch.empty(embedded_BTD.shape, dtype=torch.float32, device=device)
        return noise_BTD.uniform_(-1, 1, generator=generator)

    def forward(self, embedded_BTD: torch.Tensor) -> torch.Tensor:
        """Return the embeddings with noise, in their own format."""
        if self._lengths_BT is None:
            return embedded_BTD
        size_BT = (self._lengths_BT * embedded_BTD.shape[-1]).float()
        most_BT = torch.where(size_BT > 0, self.alpha * size_BT.rsqrt(), 0.0)  # none at padding
        noise_BTD = self.unit(embedded_BTD).mul_(most_BT[..., None])
        return embedded_BTD + noise_BTD.to(embedded_BTD.dtype)

    def put_on(self, embedding: torch.nn.Module) -> None:
        """Add the noise to an embedding's outputs, with a forward hook."""
        embedding.register_forward_hook(lambda _, __, embedded_BTD: self(embedded_BTD))


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
