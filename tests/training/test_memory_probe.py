from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mens_exp.artifacts import host

MIB = 1 << 20
linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux can reset a process's peak"
)


def fresh(size):
    """Write to fresh pages, since the heap of a large process may reuse freed ones."""
    block = mmap.mmap(-1, size)
    np.frombuffer(block, np.uint8)[:] = 1
    return block


def test_resident_memory_grows_with_what_is_written():
    """Writing 64 MiB shows as at least 60 MiB."""
    before = host.rss_bytes()
    with fresh(64 * MIB):
        assert host.rss_bytes() - before > 60 * MIB


@linux
def test_the_peak_remembers_what_is_gone():
    """Memory that was freed again still counts."""
    assert host.reset_peak()
    before = host.rss_bytes()
    fresh(64 * MIB).close()
    peak = host.peak_rss_bytes()
    assert peak is not None
    assert peak - before > 60 * MIB


@linux
def test_a_reset_forgets_earlier_peaks():
    """After a reset the peak is the current resident memory to within a few MiB."""
    fresh(128 * MIB).close()
    assert host.reset_peak()
    peak = host.peak_rss_bytes()
    assert peak is not None
    assert abs(peak - host.rss_bytes()) < 16 * MIB


def test_a_system_that_cannot_reset_says_so(monkeypatch):
    """The result is False and not an error."""

    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert host.reset_peak() is False


@pytest.mark.parametrize(("own", "expected"), [({"peak_wset": 123}, 123), ({}, None)])
def test_without_proc_the_peak_is_windows_own_or_unknown(monkeypatch, own, expected):
    """If the system reports nothing, the result is None and not a guess."""

    def absent(*_, **__):
        raise FileNotFoundError

    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(**own))
    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(host.psutil, "Process", lambda _pid: process)
    assert host.peak_rss_bytes() == expected


def test_without_torch_there_is_no_gpu_peak(monkeypatch):
    """The probe does not import torch to find out."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert host.peak_cuda_bytes() is None
    assert "torch" not in sys.modules


@pytest.mark.parametrize(("available", "expected"), [(True, 4096), (False, None)])
def test_the_gpu_peak_is_the_allocator_s(monkeypatch, available, expected):
    """Without a GPU it is None; it is reset together with the host's peak."""
    peaks = [4096]
    cuda = SimpleNamespace(
        is_available=lambda: available,
        max_memory_allocated=lambda: peaks[-1],
        reset_peak_memory_stats=lambda: peaks.append(0),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert host.peak_cuda_bytes() == expected
    host.reset_peak()
    assert host.peak_cuda_bytes() == (0 if available else None)


def test_the_load_of_processors_is_that_since_the_last_call():
    """A busy process uses some CPU, and some memory is in use."""
    host.load()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        sum(range(1000))
    found = host.load()
    assert 0 < found["system/cpu_percent"] <= 100
    assert 0 < found["system/memory_percent"] < 100


def test_the_load_of_a_gpu_is_what_its_driver_says(monkeypatch):
    """The fields are those of nvidia-ml-py's documentation; missing sensors are left out."""

    class NVMLError(Exception):
        pass

    def no_sensor(_):
        raise NVMLError

    driver = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1234": "handle"}[uuid],
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=20, total=80),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=97, memory=40),
        nvmlDeviceGetPowerUsage=no_sensor,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        get_device_properties=lambda _: SimpleNamespace(uuid="1234"),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    found = {name: value for name, value in host.load().items() if "gpu" in name}
    assert found == {"system/gpu_percent": 97.0, "system/gpu_memory_percent": 25.0}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert not [name for name in host.load() if "gpu" in name]
