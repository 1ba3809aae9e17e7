"""Resident and peak memory of a process, in bytes."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["peak_rss_bytes", "reset_peak_rss", "rss_bytes"]

_RESET_PEAK = "5"  # proc(5): clear_refs, 5 resets the peak resident set size


def rss_bytes() -> int:
    """Return the resident set size."""
    return int(psutil.Process().memory_info().rss)


def reset_peak_rss() -> bool:
    """Forget earlier peaks, so that what is done next does not inherit them.

    Returns:
        Whether the peak could be reset; only Linux can.
    """
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def peak_rss_bytes(pid: int | None = None) -> int | None:
    """Return the peak resident set size since :func:`reset_peak_rss`, or None where unknown.

    Args:
        pid: of a process; None is this one.
    """
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text("utf-8", "replace")
    except OSError:
        return _peak_wset(pid)
    line = next((x for x in status.splitlines() if x.startswith("VmHWM:")), None)
    return int(line.split()[1]) * 1024 if line is not None else None


def _peak_wset(pid: int | None) -> int | None:
    """Return what Windows keeps of a process, which may have ended."""
    try:
        peak = getattr(psutil.Process(pid).memory_info(), "peak_wset", None)
    except psutil.Error:
        return None
    return int(peak) if peak is not None else None
