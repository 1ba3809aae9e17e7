"""Seven hostile programs, run before any other: is each contained?

A program's own word is not taken where this side can look: at its outcome, at files, at processes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mens_exp.sandbox.hostile import HOSTILE
from mens_exp.sandbox.program import Limits, Outcome, python_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mens_exp.sandbox.program import Execution, Sandbox

__all__ = ["PROBE_LIMITS", "ProbeResult", "probe"]

PROBE_LIMITS: Final = Limits(
    memory_mib=64, cpu_s=10, wall_s=10, processes=12, output_kib=64, file_mib=1
)
_IGNORING_WALL_S: Final = 0.5
_CLOSED: Final = ("/", "/dev", "/dev/shm", "/etc", "/proc/sys/kernel", "/usr")  # noqa: S108  # named, not used
_SHOWN_CHARS: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The result of one probe."""

    name: str
    contained: bool
    found: str  # how it was contained, or what it reached


def probe(sandbox: Sandbox) -> list[ProbeResult]:
    """Run the seven hostile programs, at once, and tell of each whether it was contained.

    Raises:
        SetupError: the sandbox cannot be made at all.
    """
    with ThreadPoolExecutor(len(_PROBES), thread_name_prefix="probe") as pool:
        return list(pool.map(lambda run: run(sandbox), _PROBES))


def _run(
    sandbox: Sandbox,
    name: str,
    *,
    limits: Limits = PROBE_LIMITS,
    word: str = "",
    **values: object,
) -> Execution:
    program = python_program(HOSTILE[name].substitute({k: str(v) for k, v in values.items()}))
    return sandbox.run(replace(program, argv=(*program.argv, *([word] if word else []))), limits)


def _judged(name: str, execution: Execution, expected: Outcome, reached: str = "") -> ProbeResult:
    """Hold an execution against the outcome that a contained one has."""
    told = execution.stdout + execution.stderr
    if not reached and "escaped" in told:
        reached = told[told.index("escaped") :].splitlines()[0]
    if not reached and execution.outcome is not expected:
        reached = f"it ended as {execution.outcome}, not {expected}: {execution.stderr.strip()}"
    return ProbeResult(
        name=name,
        contained=not reached,
        found=reached[:_SHOWN_CHARS] or f"contained, ended as {execution.outcome}",
    )


def _network(sandbox: Sandbox) -> ProbeResult:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        done = _run(sandbox, "network", port=listener.getsockname()[1])
        reached = ""
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
            reached = "it connected to this machine"
    return _judged("network", done, Outcome.ok, reached)


def _write_outside(sandbox: Sandbox) -> ProbeResult:
    mark = f".sandbox-probe-{secrets.token_hex(8)}"
    home = Path.home().resolve()
    with tempfile.TemporaryDirectory(prefix="sandbox-probe-") as private:
        secret = Path(private) / "secret"
        secret.write_text(mark, encoding="utf-8")
        outside = {str(path) for path in (private, home, Path.cwd())}
        done = _run(
            sandbox,
            "write_outside",
            places=sorted({*_CLOSED, *outside}),
            mark=mark,
            secret=secret,
            home=home,
            shown=_shown_of_home(home),
        )
        written = [path for place in outside if (path := Path(place) / mark).exists()]
        for path in written:
            path.unlink()
    reached = f"it wrote into {written[0].parent}" if written else ""
    return _judged("write_outside", done, Outcome.ok, reached)


def _shown_of_home(home: Path) -> set[str]:
    """Return what a home directory shows of the interpreter that is bound below it."""
    prefix = Path(sys.base_prefix).resolve()
    return {prefix.relative_to(home).parts[0]} if prefix.is_relative_to(home) else {""}


def _fork_bomb(sandbox: Sandbox) -> ProbeResult:
    done = _run(sandbox, "fork_bomb", processes=PROBE_LIMITS.processes)
    return _judged("fork_bomb", done, Outcome.ok)


def _memory_bomb(sandbox: Sandbox) -> ProbeResult:
    done = _run(sandbox, "memory_bomb", memory_bytes=PROBE_LIMITS.memory_mib * 2**20)
    return _judged("memory_bomb", done, Outcome.memory)


def _endless_output(sandbox: Sandbox) -> ProbeResult:
    done = _run(sandbox, "endless_output")
    return _judged("endless_output", done, Outcome.output)


def _ignored_signals(sandbox: Sandbox) -> ProbeResult:
    word = f"sandbox-probe-{secrets.token_hex(8)}"
    limits = replace(PROBE_LIMITS, wall_s=_IGNORING_WALL_S)
    done = _run(sandbox, "ignored_signals", limits=limits, word=word)
    alive = [pid for pid, words in _command_lines() if word.encode() in words]
    reached = f"processes that outlived it: {len(alive)}" if alive else ""
    return _judged("ignored_signals", done, Outcome.timeout, reached)


def _command_lines() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_bytes()


def _parent_environment(sandbox: Sandbox) -> ProbeResult:
    done = _run(sandbox, "parent_environment", host_pid=os.getpid())
    return _judged("parent_environment", done, Outcome.ok)


_PROBES: Final[tuple[Callable[[Sandbox], ProbeResult], ...]] = (
    _network,
    _write_outside,
    _fork_bomb,
    _memory_bomb,
    _endless_output,
    _ignored_signals,
    _parent_environment,
)
