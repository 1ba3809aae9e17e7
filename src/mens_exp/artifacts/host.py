"""Locks, processes, memory and hardware faults of the host.

A file lock blocks until it is free; a run lock refuses a second process in the same run directory.
Disk and memory errors are reported as such instead of as bugs or invalid requests.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import re
import socket
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import IO, TYPE_CHECKING, Final

import psutil

from mens_exp.errors import MensError, RequestError, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

if sys.platform == "win32":
    import msvcrt
    import time
else:
    import fcntl

_RARELY: Final = 100_000  # new objects between two collections; Python's own default is 700
_AS_USUAL: Final = gc.get_threshold()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock file within the context, waiting until no other process holds it.

    The kernel owns the lock on behalf of the process, so it is released if the process dies. The
    file is deleted afterwards.

    Args:
        path: the lock file; missing parent directories are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = _locked(path)
    try:
        yield
    finally:
        _let_go(path, handle)


def _locked(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            _wait_for(handle)
            if _is_still(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the last holder removed this file while we waited


if sys.platform == "win32":

    def _wait_for(handle: int) -> None:
        while True:
            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            except OSError:
                time.sleep(0.01)
            else:
                return

    def _let_go(path: Path, handle: int) -> None:
        os.close(handle)  # an open file is not removed, so another process's lock stays
        with suppress(OSError):
            path.unlink()

else:

    def _wait_for(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX)

    def _let_go(path: Path, handle: int) -> None:
        path.unlink(missing_ok=True)  # before another process gets the lock
        os.close(handle)


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


@contextmanager
def run_lock(path: Path) -> Iterator[None]:
    """Hold a lock file within the context; a lock left by a dead process is taken over.

    Raises:
        RequestError: a live process on this machine holds it.
    """
    # One at a time: if two processes find a dead process's lock, only the first takes it over.
    with file_lock(path.with_name(f".{path.name}.taking")):
        _take(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


# Errors from a lock file that is missing, truncated, from an earlier version, or nested too deeply.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)


def lock_holder(path: Path) -> tuple[int, float] | None:
    """Return the live process on this machine that holds a lock, and its start time."""
    try:
        record = json.loads(path.read_bytes())
        pid, started = int(record["pid"]), float(record["started"])
    except _UNREADABLE:
        return None
    return (pid, started) if is_alive(pid, started) else None


def is_left_behind(path: Path) -> bool:
    """Return whether the process that took a run lock on this machine was killed.

    False for a lock of another machine, whose processes cannot be seen from here.
    """
    try:
        host = json.loads(path.read_bytes())["host"]
    except _UNREADABLE:
        return False
    return bool(host == socket.gethostname()) and lock_holder(path) is None


def is_alive(pid: int, started: float) -> bool:
    """Return whether the process with this id is still the one that started at this time.

    A process that has ended but was not waited for counts as dead.
    """
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _take(path: Path) -> None:
    found = lock_holder(path)
    if found is not None:
        raise RequestError(
            "a process is still working on this run",
            where=str(path.parent),
            found=f"process {found[0]}",
            remedy="wait for it, or end it first",
        )
    me = psutil.Process()
    record = {"pid": me.pid, "started": me.create_time(), "host": socket.gethostname()}
    path.write_text(json.dumps(record), encoding="ascii")


_SOURCE = Path(__file__).resolve().parents[2]


def python_path(environment: Mapping[str, str]) -> str:
    """Return the PYTHONPATH of an environment, prefixed with the directory of this package."""
    return os.pathsep.join(filter(None, [str(_SOURCE), environment.get("PYTHONPATH", "")]))


def spawn_python(
    arguments: Sequence[str],
    *,
    output: IO[bytes] | int,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    before: Sequence[str] = (),
) -> Popen[bytes]:
    """Start this interpreter in a new session, without input.

    The process survives Ctrl-C in the terminal and closing the terminal.

    Args:
        arguments: arguments of ``python``.
        output: file for standard output and standard error.
        environment: environment of the process, by default this one's; this package is importable.
        cwd: working directory of the process, by default this one's.
        before: a command to which the interpreter's command line is appended, such as ``srun``.

    Raises:
        OSError: the system cannot start another process.
    """
    environment = os.environ if environment is None else environment
    return Popen(  # noqa: S603  # our own interpreter and modules
        [*before, sys.executable, *arguments],
        stdin=DEVNULL,
        stdout=output,
        stderr=STDOUT,
        env={**environment, "PYTHONPATH": python_path(environment)},
        cwd=cwd,
        start_new_session=True,
    )


_RESET_PEAK = "5"  # proc(5): clear_refs, 5 resets the peak resident set size


def collect_rarely() -> None:
    """Collect garbage rarely until :func:`collect_as_usual`: startup creates little garbage.

    By default, Python repeatedly scans the million imported objects (measured: 1.7 of the 11 s of
    three tiny steps; 0.6 s with this setting).
    """
    gc.set_threshold(_RARELY, *_AS_USUAL[1:])


def collect_as_usual() -> None:
    """Undo :func:`collect_rarely` before tensors take memory; no effect if it was not called."""
    if gc.get_threshold()[0] == _RARELY:
        gc.freeze()
        gc.set_threshold(*_AS_USUAL)


def rss_bytes() -> int:
    """Return the resident set size."""
    return int(psutil.Process().memory_info().rss)


def reset_peak_rss() -> bool:
    """Reset the peak resident set size, so that the next job does not inherit earlier peaks.

    Returns:
        Whether the peak could be reset; only Linux can.
    """
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def peak_rss_bytes(pid: int | None = None) -> int | None:
    """Return the peak resident set size since :func:`reset_peak_rss`; None if unknown.

    Args:
        pid: a process id; None means this process.
    """
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text("utf-8", "replace")
    except OSError:
        return _peak_wset(pid)
    line = next((x for x in status.splitlines() if x.startswith("VmHWM:")), None)
    return int(line.split()[1]) * 1024 if line is not None else None


def _peak_wset(pid: int | None) -> int | None:
    """Return Windows' peak working set of a process, which may have ended."""
    try:
        peak = getattr(psutil.Process(pid).memory_info(), "peak_wset", None)
    except psutil.Error:
        return None
    return int(peak) if peak is not None else None


# For each error: the problem, and the first remedy.
_AGAIN: Final = ", then continue with: "
_ELSEWHERE: Final = "use another disk (hydra.run.dir, or MENS_EXP_CACHE for the cache)"
_FULL: Final = ("the disk is full", f"free some space, or {_ELSEWHERE}")
_DENIED: Final = ("access is denied", "change the file's permissions, or use another directory")
_MEMORY: Final = (
    "there is not enough memory",
    "end other programs, or choose a smaller model, batch or sequence length",
)
_BY_NUMBER: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: ("the disk quota is used up", _FULL[1]),
    errno.EFBIG: ("a file would exceed the size limit", "raise the limit (ulimit -f)"),
    errno.EROFS: ("the file system is read-only", _ELSEWHERE),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EIO: ("the disk failed to read or write", "check the disk, or write elsewhere"),
    errno.EMFILE: ("too many files are open", "raise the limit (ulimit -n)"),
    errno.ENFILE: ("too many files are open", "end other programs"),
    errno.ENOMEM: _MEMORY,
}
# Native libraries raise no OSError: Rust's message has the errno, and torch's only describes it.
_IN_RUST: Final = re.compile(r"\(os error (\d+)\)|Os \{ code: (\d+)")
_BY_TEXT: Final = {
    "No space left on device": _FULL,
    "PytorchStreamWriter failed writing": _FULL,
    "DefaultCPUAllocator: can't allocate memory": _MEMORY,
    "CUDA out of memory": _MEMORY,
}


def machine_fault(error: BaseException, again: str = "the same command") -> SetupError | None:
    """Return the error as a machine fault; None if it is not one.

    An error that already has a message for the user keeps it.

    Args:
        error: the error as caught at the top level; its causes are examined too.
        again: the command to continue with once the fault is fixed.
    """
    if isinstance(error, MensError):
        return None
    for one in _causes(error):
        found = _fault(one)
        if found is not None:
            where = one.filename if isinstance(one, OSError) else None
            return SetupError(
                found[0],
                where=os.fsdecode(where) if isinstance(where, str | bytes) else None,
                found=" ".join(str(one).split())[:300] or None,
                remedy=f"{found[1]}{_AGAIN}{again}",
            )
    return None


def is_of_disk(remedy: str | None) -> bool:
    """Return whether a recorded remedy belongs to a file error rather than a memory error."""
    first = (remedy or "").partition(_AGAIN)[0]
    return first != _MEMORY[1] and first in {its for _, its in _BY_NUMBER.values()}


def _fault(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, MemoryError):
        return _MEMORY
    number = error.errno if isinstance(error, OSError) else None
    in_rust = _IN_RUST.search(str(error))
    if in_rust:
        number = int(in_rust[1] or in_rust[2])
    if number in _BY_NUMBER:
        return _BY_NUMBER[number]
    if isinstance(error, OSError):
        return None
    return next((its for text, its in _BY_TEXT.items() if text in str(error)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, as in a traceback."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def release_free() -> bool:
    """Return freed pages to the operating system.

    Documents of many lengths leave holes that glibc retains: the process grew by 40 MB per
    optimizer step, without a leak (measured: experiments/LOG.md).

    Returns:
        Whether the C library supports this; only glibc does.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(0) in {0, 1})


def reset_peak() -> bool:
    """Reset peak memory, so that jobs in one process do not inherit each other's peaks.

    Returns:
        Whether the host's peak could be reset; only Linux can.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return reset_peak_rss()


def held_bytes() -> dict[str, int]:
    """Return the memory in use now, by kind of device: resident pages and the GPU allocator's."""
    found = {"cpu": rss_bytes()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["cuda"] = int(torch.cuda.memory_allocated())
    return found


def load() -> dict[str, float]:
    """Return the load of the machine and of this process's GPU, under their metric names.

    The CPU load covers the time since the last call. Unknown values are omitted; without NVIDIA's
    ``nvidia-ml-py`` or its driver, these are all values of the GPU.
    """
    found = {
        "system/cpu_percent": psutil.cpu_percent(interval=None),
        "system/memory_percent": psutil.virtual_memory().percent,
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        found |= _gpu_load(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    return found


def _gpu_load(uuid: str) -> dict[str, float]:
    """Query the driver; a GPU may lack a sensor, and a container may hide the driver."""
    try:
        import pynvml
    except ImportError:
        return {}
    found: dict[str, float] = {}
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()  # counts; only the first call takes time
        device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        found["system/gpu_memory_percent"] = 100 * memory.used / memory.total
        with suppress(pynvml.NVMLError):
            use = pynvml.nvmlDeviceGetUtilizationRates(device)
            found["system/gpu_percent"] = float(use.gpu)
        with suppress(pynvml.NVMLError):
            found["system/gpu_power_w"] = pynvml.nvmlDeviceGetPowerUsage(device) / 1000
    return found


def peak_cuda_bytes() -> int | None:
    """Return the GPU allocator's peak; None if no GPU is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.max_memory_allocated())
