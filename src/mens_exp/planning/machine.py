"""This machine and this process, without importing torch: devices, memory, cores, rank.

Facts that only torch or the driver can determine (whether a library loads, whether a kernel runs)
are not guessed here; `task=doctor` tests them. The first process of a run writes the record and
starts the other processes on its machine. On several machines, torchrun starts them and sets the
rank in the environment.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

_ASK_S = 3.0  # nvidia-smi takes a tenth of a second with a healthy driver
_QUERY = "name,memory.total,memory.free,compute_cap"
_LIBRARY = re.compile(r"libbitsandbytes_(cpu|cuda\d+|rocm\d+|xpu\d*)\.")
_CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The device a run would compute on; unknown values are None.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        name: as reported by the system.
        total_bytes: total memory.
        free_bytes: memory that is currently free.
        capability: CUDA compute capability, such as ``9.0``.
        has_bf16: whether it has bf16 matrix products in hardware.
        torch: version of the installed torch.
        torch_cuda: CUDA version that torch was built for; None for a CPU build.
        libraries: names of the libraries in bitsandbytes (``cpu``, ``cuda128``); None without it.
    """

    kind: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    capability: str | None = None
    has_bf16: bool | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    libraries: frozenset[str] | None = None


def look(accelerator: str) -> Machine:
    """Describe the device that ``trainer.accelerator`` would select.

    Args:
        accelerator: ``auto``, ``cpu`` or ``gpu``.
    """
    version, cuda = _torch()
    libraries = _libraries()
    gpu = _gpu() if accelerator != "cpu" else None
    if accelerator == "gpu" or (gpu is not None and cuda is not None):
        name, total, free, capability = gpu or ("GPU", None, None, None)
        return Machine(
            kind="cuda",
            name=name,
            total_bytes=total,
            free_bytes=free,
            capability=capability,
            has_bf16=None if capability is None else float(capability) >= 8.0,  # noqa: PLR2004  # Ampere, the first with bf16
            torch=version,
            torch_cuda=cuda,
            libraries=libraries,
        )
    total, free = host_memory()
    model, flags = _processor()
    return Machine(
        kind="cpu",
        name=model,
        total_bytes=total,
        free_bytes=free,
        has_bf16=None if flags is None else bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}),
        torch=version,
        torch_cuda=cuda,
        libraries=libraries,
    )


def space(path: Path) -> tuple[Path, int]:
    """Return the nearest existing parent directory of a path, and the bytes free there."""
    existing = next(parent for parent in (path, *path.resolve().parents) if parent.is_dir())
    return existing, shutil.disk_usage(existing).free


def gpu_ids() -> tuple[str, ...]:
    """List the GPUs available to this process, as named in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    return tuple(line.strip() for line in _ask("index"))


def _gpu() -> tuple[str, int, int, str] | None:
    """Query the driver about the first GPU."""
    try:
        name, total, free, capability = _ask(_QUERY)[0].split(", ")
        return name, int(total) << 20, int(free) << 20, str(float(capability))
    except (ValueError, IndexError):
        return None


def _ask(query: str) -> list[str]:
    """Return the driver's answer, one line per GPU; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603  # the driver's own executable, by its full path
            [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _torch() -> tuple[str | None, str | None]:
    """Read torch's version and CUDA version from its version.py, without importing it."""
    try:
        distribution = metadata.distribution("torch")
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text("utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return None, None
    version = re.search(r"^__version__\s*=\s*'([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    return version and version[1], cuda and cuda[1]


def _libraries() -> frozenset[str] | None:
    """List the compiled libraries installed with bitsandbytes."""
    try:
        folder = Path(str(metadata.distribution("bitsandbytes").locate_file("bitsandbytes")))
        names = [file.name for file in folder.iterdir()]
    except (metadata.PackageNotFoundError, OSError):
        return None
    return frozenset(match[1] for name in names if (match := _LIBRARY.match(name)))


def _processor() -> tuple[str, set[str] | None]:
    try:
        text = _CPUINFO.read_text("utf-8", "replace")
    except OSError:
        return platform.processor() or platform.machine(), None
    found = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in text.splitlines())
    }
    flags = found.get("flags") or found.get("Features")
    name = found.get("model name") or platform.processor() or platform.machine()
    return name, set(flags.split()) if flags else None


def host_memory() -> tuple[int, int]:
    """Return total and free memory, subject to the container's limits."""
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    limit = _number(_CGROUP / "memory.max")
    used = _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return total, free
    try:
        statistics = (_CGROUP / "memory.stat").read_text("ascii").split()
        used -= int(statistics[statistics.index("inactive_file") + 1])  # reclaimable page cache
    except (OSError, ValueError, IndexError):
        pass
    return min(total, limit), max(0, min(free, limit - used))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):  # absent, or "max"
        return None


def cores() -> int:
    """Return the number of cores available to this process, at least one."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
        return max(1, min(allowed, psutil.cpu_count(logical=False) or 1))
    return psutil.cpu_count(logical=False) or 1


def may_use_gpu(accelerator: str) -> bool:
    """Return whether a GPU may be used; importing torch to find out would take seconds."""
    if accelerator == "auto":
        return shutil.which("nvidia-smi") is not None
    return accelerator == "gpu"


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One of the processes that train together.

    Attributes:
        rank: its index among all processes, from 0.
        world_size: number of processes on all machines.
        local_rank: its index on its machine.
        local_world_size: number of processes on its machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes the record."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes."""
        return self.world_size == 1


ALONE = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1)


def of_torchrun() -> Rank | None:
    """Return the rank set by torchrun; None without torchrun or for a single process."""
    said = [os.environ.get(name, "") for name in _VARIABLES]
    numbers = said[:4]
    if not all(said) or not all(text.isdecimal() for text in numbers):
        return None
    rank, world_size, local_rank, local_world_size = map(int, numbers)
    if world_size == 1:
        return None
    return Rank(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )
