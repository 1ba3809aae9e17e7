"""Random numbers keyed by name: arms that share layers share their draws, whatever else differs.

Nothing here touches a global generator, so there is no generator state to save either.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["KeyedDropout", "initialise", "key_of", "share_dropout"]

_LEVELS = 65536  # dropout compares 16 random bits an element


def key_of(*parts: object) -> int:
    """Hash parts into a 63-bit seed."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def initialise(A_RI: torch.Tensor, B_OR: torch.Tensor, *, seed: int, layer: str) -> None:
    """Draw A uniformly within ``±1/sqrt(in)`` and set B to zero, in place.

    The bound is that of ``kaiming_uniform_(a=sqrt(5))``, PEFT's own initialisation of A
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


class KeyedDropout(torch.nn.Module):
    """Dropout whose mask is a function of (seed, layer, micro-batch), shared by equal inputs.

    Projections that read the same tensor (q, k, v; gate, up) hold the same instance and get the
    same mask, which is drawn once. On CPU the bits come from SFC64, an order of magnitude
    faster than torch's generator there. The probability is rounded to 1/65536, and the scale
    uses the rounded value, so that the expectation is exact.
    """

    def __init__(self, p: float, *, seed: int, layer: str) -> None:
        """Name the stream.

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
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, micro_batch: int) -> None:
        """Move to a micro-batch and forget the last mask."""
        self.micro_batch = micro_batch
        self._last = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of ``x`` in training, and return it unchanged otherwise."""
        if not self.training or self.threshold == 0:
            return x
        if self._last is not None and self._last[0] is x:
            return self._last[1]
        scale = _LEVELS / (_LEVELS - self.threshold)
        kept = (x * scale).masked_fill(self._dropped(x), 0)
        self._last = (x, kept)
        return kept

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        """Mark the elements that are dropped, ``bool`` in x's shape."""
        key = key_of(self.seed, "dropout", self.layer, self.micro_batch)
        if x.device.type == "cpu":
            words = np.random.SFC64(key).random_raw((x.numel() + 3) // 4)
            bits = torch.from_numpy(words.view(np.int16))[: x.numel()].view(x.shape)
            return bits < self.threshold - _LEVELS // 2
        generator = torch.Generator(x.device).manual_seed(key)
        draws = torch.randint(
            _LEVELS, x.shape, generator=generator, device=x.device, dtype=torch.int32
        )
        return draws < self.threshold


def share_dropout(
    adapted: Iterable[tuple[str, torch.nn.Module]], *, p: float, seed: int, adapter: str
) -> list[KeyedDropout]:
    """Replace PEFT's dropout modules; projections of one input get one instance.

    Args:
        adapted: PEFT's LoRA layers by module path.
        p: dropout probability.
        seed: the run's seed.
        adapter: PEFT's name of the adapter.

    Returns:
        The instances, to be moved along with :meth:`KeyedDropout.begin`.
    """
    shared: dict[str, KeyedDropout] = {}
    for path, module in adapted:
        parent, _, leaf = path.rpartition(".")
        inputs = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv"} | {
            "gate_proj": "gate_up",
            "up_proj": "gate_up",
        }
        stream = f"{parent}.{inputs.get(leaf, leaf)}"
        if stream not in shared:
            shared[stream] = KeyedDropout(p, seed=seed, layer=stream)
        module.lora_dropout[adapter] = shared[stream]  # type: ignore[index,operator]
    return list(shared.values())
