"""Programs in the sandbox: files, limits, batches, and the Rust toolchain that they use."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from mens_exp.errors import MensError, SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PYTHON: Final = str(Path(sys.executable).resolve())
"""The interpreter without its virtual environment; at the same path inside a sandbox."""

_END_S: Final = 5.0


class Outcome(StrEnum):
    """The outcome of an execution."""

    ok = "ok"  # exit code 0
    failed = "failed"  # another exit code
    killed_signal = "killed_signal"  # by a signal not sent by a limit
    timeout = "timeout"  # the wall-time limit was exceeded
    cpu_time = "cpu_time"
    memory = "memory"
    output = "output"  # more output than the limit
    files = "files"  # more files were created than the limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one execution, applied to its whole process tree."""

    memory_mib: int = 512
    cpu_s: float = 10.0
    wall_s: float = 10.0
    processes: int = 32  # threads count
    output_kib: int = 256  # stdout and stderr, each
    file_mib: int = 16  # total size of files written; without isolation, size of each file


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A command with the files in its working directory; it never has network access."""

    argv: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)  # by plain file name
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=dict)  # besides PATH, HOME, TMPDIR and LANG
    visible: tuple[str, ...] = ()  # additional paths of this machine, mounted read-only
    channel: int | None = None  # a socket used as input instead of `stdin`

    def __post_init__(self) -> None:
        """Refuse files outside the working directory.

        Raises:
            MensError: a name is not a plain file name.
        """
        for name in self.files:
            if name in {"", ".", ".."} or set(name) & {"/", "\0"}:
                raise MensError(
                    "a program's file is named by a path", found=name, expected="a plain file name"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """The result of one program."""

    outcome: Outcome
    exit_code: int | None  # None if it was killed
    signal: int | None  # the signal that ended it, on its own or because of a limit
    stdout: str
    stderr: str
    cut: tuple[str, ...]  # those of stdout and stderr that were truncated
    wall_s: float
    sandbox: str  # the kind that ran it


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A program that runs until its channel is closed; its output is not read."""

    process: subprocess.Popen[bytes]
    resources: contextlib.ExitStack  # resources released with it

    @property
    def is_running(self) -> bool:
        """Whether it is still running."""
        return self.process.poll() is None

    def close(self) -> None:
        """Wait for the program to end after its channel is closed, or kill it."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            kill_tree(self.process.pid)
            self.process.wait(_END_S)
        finally:
            self.resources.close()


class Sandbox(Protocol):
    """Interface that runs each program in a separate environment, deleted afterwards."""

    @property
    def kind(self) -> str:
        """``bubblewrap``, or ``unsafe`` for no isolation at all."""

    def run(self, program: Program, limits: Limits) -> Execution:
        """Execute one program; safe to call from several threads.

        Raises:
            SetupError: the environment could not be created; the program did not start.
        """

    def start(self, program: Program, limits: Limits) -> Service:
        """Start a service program of this package; its total time is not limited."""


def python_program(source: str, *, stdin: str = "", name: str = "main.py") -> Program:
    """Return a Python program that uses only the standard library, with a fixed hash seed."""
    return Program(
        argv=(PYTHON, "-s", "-S", "-B", name),
        files={name: source},
        stdin=stdin,
        env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
    )


_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_GONE: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Current memory and accumulated CPU time of a process tree."""

    memory_bytes: int
    cpu_s: float


def tree_of(pid: int) -> Iterator[int]:
    """Yield a process and all its live descendants."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        with contextlib.suppress(*_GONE):
            for task in Path(f"/proc/{one}/task").iterdir():
                with contextlib.suppress(*_GONE):
                    children = (task / "children").read_text("ascii")
                    waiting += map(int, children.split())


def use_of(pid: int, *, memory_above: int) -> Use:
    """Measure a process tree.

    Shared pages are counted once, but only if the fast estimate, which counts them for each
    process, is above ``memory_above`` bytes.
    """
    pids = list(tree_of(pid))
    memory = sum(map(_resident_bytes, pids))
    if memory > memory_above:
        memory = sum(map(_proportional_bytes, pids))
    return Use(memory_bytes=memory, cpu_s=sum(map(_cpu_s, pids)))


def files_in(pid: int, place: str) -> int:
    """Return the number of files on the file system that only a tree sees at ``place``.

    A process that still sees the host's file system, because its sandbox is not ready, is skipped.
    """
    ours = Path(place).stat().st_dev
    for one in tree_of(pid):
        with contextlib.suppress(OSError):
            seen = Path(f"/proc/{one}/root{place}")
            if seen.stat().st_dev != ours:
                found = os.statvfs(seen)
                return found.f_files - found.f_ffree
    return 0


def kill_tree(pid: int) -> None:
    """Kill a process and all descendants that can be found; it may have ended already."""
    for one in list(tree_of(pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * _PAGE_BYTES
    except _GONE:
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
        sizes = [line.split()[1] for line in text.splitlines() if line.startswith("Pss:")]
    except PermissionError:
        return _resident_bytes(pid)  # not readable: counted in full
    except _GONE:
        return 0
    return sum(map(int, sizes)) * 1024


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of the children that it has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except _GONE:
        return 0.0
    after_name = stat.rpartition(")")[2].split()  # a name may contain spaces and parentheses
    return sum(map(int, after_name[11:15])) / _TICKS_PER_S


_T = TypeVar("_T")


def run_all(
    sandbox: Sandbox, programs: Sequence[Program], limits: Limits, workers: int | None = None
) -> list[Execution]:
    """Execute every program.

    Args:
        sandbox: the sandbox.
        programs: the programs.
        limits: limits of each program.
        workers: number of concurrent programs; None means one per available processor.

    Returns:
        The result of each, in the order of the programs.

    Raises:
        SetupError: the sandbox failed; programs that had not started are not executed.
    """
    return call_all([partial(sandbox.run, program, limits) for program in programs], workers)


def call_all(calls: Sequence[Callable[[], _T]], workers: int | None = None) -> list[_T]:
    """Run calls in threads, and return their results in order.

    If one raises, calls that have not started are skipped.
    """
    at_once = workers or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(at_once, thread_name_prefix="sandbox") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# measured: rustc 1.95 needs 0.5 s and less than 512 MiB for a task, linking included.
_LEAST: Final = Limits(memory_mib=1024, cpu_s=30, wall_s=30, processes=64, file_mib=64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """The location of the compiler and its libraries, and its version."""

    rustc: str
    sysroot: str
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Clippy:
    """The location of Clippy's compiler and its libraries, and its version."""

    driver: str
    sysroot: str
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rustfmt:
    """The location of the formatter and its libraries, and its version."""

    tool: str
    sysroot: str
    version: str


def find_rust() -> Toolchain:
    """Find the installed Rust compiler.

    Raises:
        SetupError: the compiler or its linker is not installed.
    """
    found = shutil.which("rustc")
    if found is None or shutil.which("cc") is None:
        raise SetupError(
            "Rust programs cannot be compiled",
            found=f"no {'cc' if found else 'rustc'}",
            expected="rustc and cc",
            remedy="install Rust (https://rustup.rs, or apt-get install rustc) and gcc",
        )
    told = subprocess.run(  # noqa: S603  # found above
        [found, "--print", "sysroot"], capture_output=True, text=True, check=False, timeout=60
    )
    if told.returncode != 0:
        raise SetupError(
            "rustc does not work", found=told.stderr.strip(), remedy="rustup default stable"
        )
    sysroot = told.stdout.strip()
    rustc = f"{sysroot}/bin/rustc"
    return Toolchain(rustc=rustc, sysroot=sysroot, version=_version(rustc, "rustc", "rustc"))


def find_clippy(toolchain: Toolchain) -> Clippy:
    """Find the Clippy of a toolchain.

    Raises:
        SetupError: it is not installed, or does not start.
    """
    driver = f"{toolchain.sysroot}/bin/clippy-driver"
    return Clippy(
        driver=driver,
        sysroot=toolchain.sysroot,
        version=_version(driver, "clippy", "rust-clippy"),
    )


def find_rustfmt(toolchain: Toolchain) -> Rustfmt:
    """Find the formatter of a toolchain.

    Raises:
        SetupError: it is not installed, or does not start.
    """
    tool = f"{toolchain.sysroot}/bin/rustfmt"
    version = _version(tool, "rustfmt", "rustfmt")
    return Rustfmt(tool=tool, sysroot=toolchain.sysroot, version=version)


def _version(tool: str, component: str, package: str) -> str:
    """Return the version of a tool of the toolchain.

    Args:
        tool: its path.
        component: its name for rustup.
        package: its name for apt-get.

    Raises:
        SetupError: it is not installed, or does not start.
    """
    try:
        told = subprocess.run(  # noqa: S603  # of the toolchain that was found
            [tool, "--version"], capture_output=True, text=True, check=False, timeout=60
        )
        found = told.stderr.strip() if told.returncode else None
    except OSError as error:
        found = f"{tool}: {error.strerror}"
    if found is not None:
        raise SetupError(
            f"{component} does not work, or is not installed",
            found=found,
            expected=f"{component} of the toolchain that rustc belongs to",
            remedy=f"run: rustup component add {component}, or apt-get install {package}",
        )
    return told.stdout.strip()


def least_rust_limits(limits: Limits) -> Limits:
    """Return limits that are sufficient for a compiler, and not lower than those given."""
    return replace(
        limits,
        memory_mib=max(limits.memory_mib, _LEAST.memory_mib),
        cpu_s=max(limits.cpu_s, _LEAST.cpu_s),
        wall_s=max(limits.wall_s, _LEAST.wall_s),
        processes=max(limits.processes, _LEAST.processes),
        file_mib=max(limits.file_mib, _LEAST.file_mib),
    )
