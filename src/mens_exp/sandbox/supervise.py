"""Execute a program under supervision: resource limits, its process tree, and the outcome.

Limits are enforced by the kernel per process, and here for the whole tree. The sandbox `unsafe`
consists of this alone: plain processes with limits and no isolation, for users who explicitly
request it.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.scorecard import UNSAFE
from mens_exp.errors import MensError, SetupError
from mens_exp.sandbox.program import Execution, Outcome, Service, files_in, kill_tree, use_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.sandbox.program import Limits, Program

_MOST_FILES: Final = 10_000  # each takes a kilobyte of kernel memory, whatever its size
_SAMPLE_S: Final = 0.05  # sampling interval of memory and processor time
_DRAIN_S: Final = 1.0  # for reading the pipes of a process that has ended
_DEATH_S: Final = 10.0  # a killed process that takes longer is stuck in the kernel
_EXIT: Final = "exit"


@dataclass(kw_only=True, slots=True)
class Ended:
    """The end of a process tree, and its output."""

    by_limit: Outcome | None = None
    returncode: int = 0  # of the first process, as in `subprocess`
    wall_s: float = 0.0
    written: dict[str, bytearray] = field(default_factory=dict)  # by stdout, stderr
    cut: list[str] = field(default_factory=list)


def supervise(
    process: subprocess.Popen[bytes],
    limits: Limits,
    *,
    started: float,
    kill: Callable[[], None],
    private: str | None = None,
) -> Ended:
    """Read a process's output until it and its pipes have ended, or a limit is exceeded.

    Args:
        process: started with pipes for stdout and stderr.
        limits: limits of its tree; those enforced by the kernel are not checked here.
        started: start time on the monotonic clock.
        kill: kills the tree; called at most once, also on interruption.
        private: path at which the tree sees a private file system, whose files are counted.

    Returns:
        The output up to the limit, and the limit that ended it, if any.

    Raises:
        MensError: the process was killed but has not ended.
    """
    ended = Ended()
    done = False
    exit_fd = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert pipe is not None, "the process was started with pipes"
                ended.written[name] = bytearray()
                selector.register(pipe, selectors.EVENT_READ, name)
            selector.register(exit_fd, selectors.EVENT_READ, _EXIT)
            ended.by_limit = _watch(
                selector,
                limits,
                ended,
                started=started,
                passed=lambda: _passed(process.pid, limits, private),
            )
        done = ended.by_limit is None
    finally:
        os.close(exit_fd)
        if not done:
            kill()
        ended.wall_s = time.monotonic() - started
        _close(process)
        ended.returncode = _awaited(process)
    return ended


def _awaited(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_DEATH_S)
    except subprocess.TimeoutExpired as error:
        raise MensError(
            "a killed process is still alive", found=f"process {process.pid}"
        ) from error


def _watch(
    selector: selectors.BaseSelector,
    limits: Limits,
    ended: Ended,
    *,
    started: float,
    passed: Callable[[], Outcome | None],
) -> Outcome | None:
    deadline = started + limits.wall_s
    sample_at = started + _SAMPLE_S
    running = True
    while selector.get_map():
        until = min(deadline, sample_at) if running else deadline
        for key, _ in selector.select(max(0.0, until - time.monotonic())):
            if key.data == _EXIT:
                running = False
                selector.unregister(key.fileobj)
                deadline = time.monotonic() + _DRAIN_S
            elif not _read(key, selector, limits.output_kib * 1024, ended):
                return Outcome.output
        now = time.monotonic()
        if now >= deadline:
            return Outcome.timeout if running else None
        if running and now >= sample_at:
            limit = passed()
            if limit is not None:
                return limit
            sample_at = time.monotonic() + _SAMPLE_S
    return None


def _read(
    key: selectors.SelectorKey, selector: selectors.BaseSelector, most: int, ended: Ended
) -> bool:
    """Read the available output of a pipe; return whether it is within the limit."""
    chunk = os.read(key.fd, 65_536)
    if not chunk:
        selector.unregister(key.fileobj)
        return True
    kept = ended.written[key.data]
    kept += chunk
    if len(kept) <= most:
        return True
    del kept[most:]
    ended.cut.append(key.data)
    return False


def _passed(pid: int, limits: Limits, private: str | None) -> Outcome | None:
    most = limits.memory_mib * 2**20
    use = use_of(pid, memory_above=most)
    if use.memory_bytes > most:
        return Outcome.memory
    if private is not None and files_in(pid, private) > _MOST_FILES:
        return Outcome.files
    return Outcome.cpu_time if use.cpu_s > limits.cpu_s else None


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


_SHELL_SIGNALS: Final = 128  # bubblewrap reports a signal as 128 more than its number
# Out-of-memory messages: of CPython, and of Rust, which adds a note or the compiler's own stack.
_REFUSED_MEMORY: Final = ("MemoryError", "memory allocation of ")
_LAST_LINES: Final = 3
_BACKTRACE: Final = "stack backtrace:"


def execution_of(ended: Ended, status: int, *, sandbox: str) -> Execution:
    """Describe an execution.

    Args:
        ended: the supervised process.
        status: the program's exit status; above 128, or negative, a signal. A program that exits
            with such a number itself is considered killed.
        sandbox: the kind of sandbox that ran it.
    """
    number = _signal_of(status) if ended.by_limit is None else signal.SIGKILL
    stdout, stderr = (
        bytes(ended.written[name]).decode("utf-8", errors="replace")
        for name in ("stdout", "stderr")
    )
    return Execution(
        outcome=ended.by_limit or _outcome(status, number, stderr),
        exit_code=status if number is None else None,
        signal=None if number is None else int(number),
        stdout=stdout,
        stderr=stderr,
        cut=tuple(ended.cut),
        wall_s=ended.wall_s,
        sandbox=sandbox,
    )


def _signal_of(status: int) -> int | None:
    number = -status if status < 0 else status - _SHELL_SIGNALS
    return number if number in signal.valid_signals() else None


def _outcome(status: int, number: int | None, stderr: str) -> Outcome:
    if status == 0:
        return Outcome.ok
    if number == signal.SIGXCPU:
        return Outcome.cpu_time
    lines = stderr.rstrip().splitlines()
    end = lines.index(_BACKTRACE) if _BACKTRACE in lines else len(lines)
    last = [*lines[-_LAST_LINES:], *lines[max(end - _LAST_LINES, 0) : end]]
    if any(line.startswith(_REFUSED_MEMORY) for line in last):
        return Outcome.memory
    return Outcome.failed if number is None else Outcome.killed_signal


_OPEN_FILES: Final = 256  # a linker opens all libraries simultaneously
_KILL_AFTER_S: Final = 1  # from SIGXCPU, which can be ignored, to SIGKILL, which cannot


def found_tool(name: str, *, package: str) -> str:
    """Return the path of a program of this machine.

    Raises:
        SetupError: it is not installed.
    """
    found = shutil.which(name)
    if found is None:
        raise SetupError(
            f"{name} is not installed, and generated programs are executed only in it",
            remedy=f"apt-get install {package}; sandbox=none measures what needs no execution; "
            "sandbox=unsafe executes without isolation",
        )
    return found


def limiting_command(prlimit: str, limits: Limits, *, processes: int | None) -> list[str]:
    """Return a command prefix that lowers resource limits.

    Args:
        prlimit: path of util-linux's prlimit.
        limits: the limits.
        processes: maximum processes of the user id; None leaves that limit unchanged.
    """
    cpu_s = max(1, math.ceil(limits.cpu_s))
    words = [
        prlimit,
        f"--as={limits.memory_mib * 2**20}",
        f"--cpu={cpu_s}:{cpu_s + _KILL_AFTER_S}",
        f"--fsize={limits.file_mib * 2**20}",
        f"--nofile={_OPEN_FILES}",
        "--core=0",
    ]
    if processes is not None:
        words.append(f"--nproc={processes}")
    return words


class Unsafe:
    """A process in a temporary directory, with the user's permissions.

    It can read, write and send whatever the user can. Memory, CPU time, wall time, output and the
    size of each file are limited; processes are not, and one that leaves its group can survive.
    """

    kind = UNSAFE

    def __init__(self) -> None:
        """Find the tool.

        Raises:
            SetupError: it is not installed.
        """
        self._prlimit = found_tool("prlimit", package="util-linux")

    def run(self, program: Program, limits: Limits) -> Execution:
        """Execute one program; safe to call from several threads."""
        with tempfile.TemporaryDirectory(prefix="unsafe-", ignore_cleanup_errors=True) as work:
            _write_files(program, work)
            with tempfile.TemporaryFile() as stdin:
                stdin.write(program.stdin.encode("utf-8", "surrogatepass"))
                stdin.seek(0)
                started = time.monotonic()
                process = subprocess.Popen(  # noqa: S603  # explicitly requested
                    [*limiting_command(self._prlimit, limits, processes=None), *program.argv],
                    stdin=stdin if program.channel is None else program.channel,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=_environment(work, program),
                    cwd=work,
                    start_new_session=True,
                )
            try:
                ended = supervise(
                    process, limits, started=started, kill=lambda: kill_tree(process.pid)
                )
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # remaining processes of its group
        return execution_of(ended, ended.returncode, sandbox=self.kind)

    def start(self, program: Program, limits: Limits) -> Service:
        """Start a program that runs until its channel is closed."""
        with contextlib.ExitStack() as resources:
            work = resources.enter_context(
                tempfile.TemporaryDirectory(prefix="unsafe-", ignore_cleanup_errors=True)
            )
            _write_files(program, work)
            process = subprocess.Popen(  # noqa: S603  # explicitly requested
                [*limiting_command(self._prlimit, limits, processes=None), *program.argv],
                stdin=program.channel,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(work, program),
                cwd=work,
                start_new_session=True,
            )
            return Service(process=process, resources=resources.pop_all())


def _write_files(program: Program, work: str) -> None:
    for name, content in program.files.items():
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        (Path(work) / name).write_bytes(data)


def _environment(work: str, program: Program) -> dict[str, str]:
    path = os.environ.get("PATH", os.defpath)
    return {"HOME": work, "LANG": "C.UTF-8", "PATH": path, "TMPDIR": work, **program.env}
