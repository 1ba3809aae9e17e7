"""Codes of a frozen base in host memory, copied to the compute device layer by layer.

Only the codes move: scales, which are a thirtieth of a 4-bit base, stay on the device, as do all
parts that are not quantized. A pass reads one layer's codes at a time. While the device computes
with them, the next layer's are copied, on a stream of their own.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Collection

# Reads that determine the next. More than a layer has, because the first pass and the one that is
# computed again for the backward pass continue differently after the last read of a layer.
_CONTEXT = 16


def codes_of(layer: Any) -> torch.Tensor:
    """Return the codes of a quantized layer on its compute device."""
    host: HostCodes | None = getattr(layer, "host_codes", None)
    codes: torch.Tensor = layer.weight.data
    return codes if host is None else host.on_device(layer)


def is_offloaded(layer: Any) -> bool:
    """Return whether the codes of a layer are in host memory."""
    return hasattr(layer, "host_codes")


class HostCodes:
    """The codes of layers, in page-locked memory if the device is a GPU.

    The order in which passes read layers repeats from one micro-batch to the next. The layer that
    followed the last `_CONTEXT` reads is expected to follow them again; a wrong guess costs a copy.

    The codes are no parameters of their modules any more, because Lightning moves parameters to the
    device.
    """

    def __init__(self, layers: Collection[Any], device: torch.device) -> None:
        """Take over the codes of layers that are in host memory.

        Args:
            layers: quantized layers; all their codes are in ``layer.weight``.
            device: the compute device.

        Raises:
            SetupError: the system cannot lock so much memory.
        """
        self.device = device
        self.stored_bytes = sum(one.weight.data.nbytes for one in layers)
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._before: deque[Any] = deque(maxlen=_CONTEXT)
        self._after: dict[tuple[Any, ...], Any] = {}
        self._ahead: tuple[Any, torch.Tensor] | None = None
        for layer in layers:
            if self._stream is not None:
                layer.weight.data = _page_locked(layer.weight.data, self.stored_bytes)
            vars(layer)["weight"] = layer._parameters.pop("weight")  # noqa: SLF001  # no public name
            layer.host_codes = self

    def on_device(self, layer: Any) -> torch.Tensor:
        """Return a layer's codes on the device, and start to copy those expected next."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is layer:
            codes = ahead[1]
            if self._stream is not None:
                computing = torch.cuda.current_stream(self.device)
                computing.wait_stream(self._stream)
                codes.record_stream(computing)
        else:
            codes = self._copied(layer)
        self._after[tuple(self._before)] = layer
        self._before.append(layer)
        following = self._after.get(tuple(self._before))
        if following is not None:
            with torch.cuda.stream(self._stream):  # of None, this does nothing
                self._ahead = following, self._copied(following)
        return codes

    def _copied(self, layer: Any) -> torch.Tensor:
        codes: torch.Tensor = layer.weight.data
        return codes.to(self.device, non_blocking=True, copy=True)


def _page_locked(codes: torch.Tensor, needed: int) -> torch.Tensor:
    try:
        return codes.pin_memory()
    except RuntimeError as error:
        raise SetupError(
            "the system cannot lock the base's codes in host memory",
            where="model.offload",
            found=str(error).partition("\n")[0],
            expected=f"{needed / 2**30:.1f} GiB of free host memory, and no lower limit on locking",
            remedy="free host memory, or set model.offload=false on a GPU that holds the base",
        ) from error
