"""Resident and peak memory of this process and of its GPU, in bytes."""

from __future__ import annotations

import ctypes
import sys

from mens_exp.artifacts.host_memory import peak_rss_bytes, reset_peak_rss, rss_bytes

__all__ = ["peak_cuda_bytes", "peak_rss_bytes", "release_free", "reset_peak", "rss_bytes"]


def release_free() -> bool:
    """Give freed pages back to the system.

    Documents of many lengths leave holes that glibc keeps: the process grew by 40 MB an optimizer
    step, without a leak (measured: experiments/LOG.md).

    Returns:
        Whether the C library can; only glibc's can.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(0) in {0, 1})


def reset_peak() -> bool:
    """Forget earlier peaks, so that jobs in one process do not inherit each other's.

    Returns:
        Whether the host's peak could be reset; only Linux can.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return reset_peak_rss()


def peak_cuda_bytes() -> int | None:
    """Return the GPU allocator's peak, or None without a GPU in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.max_memory_allocated())
