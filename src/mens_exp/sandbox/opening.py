"""Open the configured sandbox, after seven hostile programs have shown that it contains them.

Each program is Python using only the standard library, and prints ``escaped`` if it succeeds; the
probe fills in ``$name`` placeholders. Where possible, the result is checked from outside instead of
trusting the output: by the outcome, files and processes.
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
from string import Template
from typing import TYPE_CHECKING, Final

from mens_exp.config.evaluation import (
    BubblewrapSandbox,
    ExecutingSandbox,
    SandboxConfig,
    UnsafeSandbox,
)
from mens_exp.errors import SetupError
from mens_exp.sandbox.bubblewrap import Bubblewrap
from mens_exp.sandbox.program import Limits, Outcome, python_program
from mens_exp.sandbox.supervise import Unsafe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mens_exp.sandbox.program import Execution, Sandbox

_NETWORK: Final = """
import socket
try:
    socket.create_connection(("127.0.0.1", $port), timeout=2).close()
    print("escaped: connected to this machine")
except OSError:
    pass
lines = open("/proc/net/dev").read().splitlines()[2:]
names = {line.split(":")[0].strip() for line in lines}
if names - {"lo"}:
    print("escaped: network interfaces", *sorted(names))
try:
    socket.socket(getattr(socket, "AF_VSOCK", 40), socket.SOCK_STREAM).close()
    print("escaped: a socket to the virtual machine's host")
except OSError:
    pass
"""

_WRITE_OUTSIDE: Final = """
import os
for place in $places:
    try:
        with open(os.path.join(place, "$mark"), "x") as file:
            file.write("$mark")
    except OSError:
        continue
    if not place.startswith("/tmp"):
        print("escaped: wrote into", place)
try:
    print("escaped: read", open("$secret").read())
except OSError:
    pass
try:
    seen = set(os.listdir("$home")) - $shown
except OSError:
    seen = set()
if seen:
    print("escaped: saw in", "$home", sorted(seen)[:3])
"""

_FORK_BOMB: Final = """
import os, time
made = 0
try:
    while made < 4 * $processes:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError:
    pass
if made > $processes:
    print("escaped: processes made:", made)
"""

_MEMORY_BOMB: Final = """
import os, time
try:
    bytearray(2 * $memory_bytes)
    print("escaped: one process took twice the limit")
except MemoryError:
    pass
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(b"x") * ($memory_bytes // 2)
        time.sleep(60)
        os._exit(0)
time.sleep(2)
print("escaped: four processes took twice the limit")
"""

_ENDLESS_OUTPUT: Final = """
import os
for _ in range(4096):
    os.write(1, b"x" * 65536)
os.write(2, b"escaped: wrote 256 MiB")
"""

_IGNORED_SIGNALS: Final = """
import os, signal, time
for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
time.sleep(60)
"""

_PARENT_ENVIRONMENT: Final = """
import os
usual = {"HOME", "LANG", "LC_CTYPE", "PATH", "PWD", "PYTHONHASHSEED", "PYTHONUTF8", "TMPDIR"}
for place in [*(name for name in os.listdir("/proc") if name.isdigit()), "$host_pid"]:
    try:
        text = open(f"/proc/{place}/environ", "rb").read().decode(errors="replace")
    except OSError:
        continue
    names = {entry.split("=")[0] for entry in text.split(chr(0)) if entry}
    if names - usual:
        print("escaped: read of process", place, *sorted(names - usual)[:3])
if set(os.environ) - usual:
    print("escaped: was given", *sorted(set(os.environ) - usual)[:3])
"""

HOSTILE: Final = {
    name: Template(text)
    for name, text in {
        "network": _NETWORK,
        "write_outside": _WRITE_OUTSIDE,
        "fork_bomb": _FORK_BOMB,
        "memory_bomb": _MEMORY_BOMB,
        "endless_output": _ENDLESS_OUTPUT,
        "ignored_signals": _IGNORED_SIGNALS,
        "parent_environment": _PARENT_ENVIRONMENT,
    }.items()
}
"""The program of each probe, by name."""


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
    found: str  # how it was contained, or what it gained access to


def probe(sandbox: Sandbox) -> list[ProbeResult]:
    """Run the seven hostile programs in parallel, and return for each whether it was contained.

    Raises:
        SetupError: the sandbox cannot be created at all.
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
    """Compare an execution with the outcome expected of a contained program."""
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
    """Return the parts of a home directory that lead to the interpreter bound below it."""
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


_WITHOUT: Final = (
    "sandbox=none measures what needs no execution; sandbox=unsafe executes without isolation"
)


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Return a working sandbox of the configured kind, never of another.

    Raises:
        SetupError: it is not available, a probe was not contained, or none was configured.
    """
    match config:
        case BubblewrapSandbox():
            return probed(Bubblewrap())
        case UnsafeSandbox():
            return Unsafe()
    raise SetupError(
        "generated programs are not executed",
        where="sandbox",
        found=config.name,
        expected="bubblewrap",
        remedy="apt-get install bubblewrap, and leave sandbox= at its default",
    )


def probed(sandbox: Sandbox) -> Sandbox:
    """Return a sandbox that contains every probe.

    Raises:
        SetupError: one was not contained, or the sandbox cannot be created.
    """
    escaped = [result for result in probe(sandbox) if not result.contained]
    if escaped:
        raise SetupError(
            "the sandbox failed its own probes and is not used",
            found="; ".join(f"{result.name}: {result.found}" for result in escaped),
            expected="every probe contained",
            remedy=f"use Linux 5.14 or newer with bubblewrap 0.7 or newer; {_WITHOUT}",
        )
    return sandbox


def limits_of(config: SandboxConfig) -> Limits:
    """Return the limits of one program; the defaults if the option executes nothing."""
    if not isinstance(config, ExecutingSandbox):
        return Limits()
    limits = Limits(
        memory_mib=config.memory_mib,
        cpu_s=config.cpu_s,
        wall_s=config.wall_s,
        output_kib=config.output_kib,
        file_mib=config.file_mib,
    )
    if isinstance(config, BubblewrapSandbox):
        return replace(limits, processes=config.processes)
    return limits
