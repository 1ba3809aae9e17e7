"""Resident and peak memory of this process, in bytes."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil

__all__ = ["peak_cuda_bytes", "peak_rss_bytes", "release_free", "reset_peak", "rss_bytes"]

_RESET_PEAK = "5"  # proc(5): clear_refs, 5 resets the peak resident set size


def rss_bytes() -> int:
    """Return the resident set size."""
    return int(psutil.Process().memory_info().rss)


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
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def peak_rss_bytes() -> int | None:
    """Return the peak resident set size since :func:`reset_peak`, or None where unknown."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        peak = getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows' own name
        return int(peak) if peak is not None else None
    line = next((x for x in status.splitlines() if x.startswith("VmHWM:")), None)
    return int(line.split()[1]) * 1024 if line is not None else None


def peak_cuda_bytes() -> int | None:
    """Return the GPU allocator's peak, or None without a GPU in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.max_memory_allocated())
