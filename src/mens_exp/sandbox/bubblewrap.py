"""Programs in separate Linux namespaces, which bubblewrap creates for each program.

A program sees /usr, the interpreter and the paths that it declares, read-only, and one private
tmpfs. If started by root, bubblewrap creates no user namespace. The program then gets a unique user
id, because the kernel exempts root from the process limit, in a user namespace too, and because
that limit is counted per user id. If started by another user, the new user namespace has a separate
count.

A seccomp filter refuses system calls that no program needs and that would circumvent a limit:
memory that belongs to no process (memfd, System V segments and queues), new namespaces (which could
mount a tmpfs of any size), keys, which no namespace isolates, sockets of families that a network
namespace does not isolate (AF_VSOCK reaches a virtual machine's host), and access to other
processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import secrets
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mens_exp.errors import MensError, SetupError
from mens_exp.sandbox.program import Service, kill_tree
from mens_exp.sandbox.supervise import execution_of, found_tool, limiting_command, supervise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.sandbox.program import Execution, Limits, Program
    from mens_exp.sandbox.supervise import Ended

WORK: Final = "/tmp/program"  # noqa: S108  # on the sandbox's own tmpfs
_ENVIRONMENT: Final = {
    "HOME": WORK,
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "TMPDIR": "/tmp",  # noqa: S108  # as above
}
_DIES_WITH_PARENT: Final = "--die-with-parent"  # precisely: with the thread that started it
_ISOLATED: Final = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--hostname", "sandbox", _DIES_WITH_PARENT, "--new-session", "--cap-drop", "ALL"),
)
# The first process is bubblewrap's own. Without root it has the program's user id but no system
# call filter: a program that could write to its memory would escape the filter.
_HIDDEN_FIRST_PROCESS: Final = (
    *("--perms", "0555", "--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"),
)
_NOBODY: Final = "65534"
_LOWEST_UID, _UIDS = 2**30, 2**30  # above any user id assigned to users or containers
_READ_ONLY: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_DEATH_S: Final = 10.0


class Bubblewrap:
    """A sandbox that creates new namespaces for each execution."""

    kind = "bubblewrap"

    def __init__(self) -> None:
        """Find the tools.

        Raises:
            SetupError: a tool is not installed, or the system call table is unknown here.
        """
        self._bwrap = found_tool("bwrap", package="bubblewrap")
        self._prlimit = found_tool("prlimit", package="util-linux")
        self._setpriv = found_tool("setpriv", package="util-linux")
        self._filter = syscall_filter()
        self._by_root = os.geteuid() == 0 and _every_uid_is_mapped()
        self._isolated = (*_ISOLATED, *self._user_options())
        self._system = _system_options()

    def run(self, program: Program, limits: Limits) -> Execution:
        """Execute one program; safe to call from several threads.

        Raises:
            SetupError: bubblewrap could not create the sandbox; the program did not start.
        """
        with contextlib.ExitStack() as fds:
            status_read, status_write = os.pipe()
            fds.callback(os.close, status_read)
            with contextlib.ExitStack() as given:
                given.callback(os.close, status_write)
                stdin = _input_of(program, given)
                command, passed = self._command(program, limits, given)
                started = time.monotonic()
                process = subprocess.Popen(  # noqa: S603  # the command is built here
                    [self._bwrap, "--json-status-fd", str(status_write), *command],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},  # programs can read the environment of the sandbox's first process
                    pass_fds=(status_write, *passed),
                    start_new_session=True,
                )
            ended = supervise(
                process,
                limits,
                started=started,
                kill=lambda: kill_tree(process.pid),
                private="/tmp",  # noqa: S108  # its own
            )
            os.set_blocking(status_read, False)
            status = _read_status(status_read)
        _await_death(status.get("child-pid"))
        return execution_of(ended, _status(ended, status), sandbox=self.kind)

    def start(self, program: Program, limits: Limits) -> Service:
        """Start a program that runs until its channel is closed, even if its thread ends."""
        with contextlib.ExitStack() as given:
            command, passed = self._command(program, limits, given)
            process = subprocess.Popen(  # noqa: S603  # the command is built here
                [self._bwrap, *(word for word in command if word != _DIES_WITH_PARENT)],
                stdin=_input_of(program, given),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                pass_fds=passed,
                start_new_session=True,
            )
        return Service(process=process, resources=contextlib.ExitStack())

    def _command(
        self, program: Program, limits: Limits, fds: contextlib.ExitStack
    ) -> tuple[list[str], list[int]]:
        """Return bubblewrap's arguments, with the files that they refer to by descriptor."""
        passed = [_file_of(self._filter, fds)]
        size = str(limits.file_mib * 2**20)
        words = [*self._isolated, "--seccomp", str(passed[0])]
        words += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]  # noqa: S108  # its own
        words += ["--perms", "0777", "--dir", WORK, *self._system]
        for path in program.visible:  # mounted over the private /tmp if below it
            words += _visible_options(path)
        for name, content in program.files.items():
            passed.append(_file_of(content, fds))
            words += ["--perms", "0444", "--file", str(passed[-1]), f"{WORK}/{name}"]
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
        for key, value in {**_ENVIRONMENT, **program.env}.items():
            words += ["--setenv", key, value]
        return [*words, "--", *self._limiting(limits), *program.argv], passed

    def _user_options(self) -> tuple[str, ...]:
        if self._by_root:
            return ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
        return ("--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY)

    def _limiting(self, limits: Limits) -> list[str]:
        if not self._by_root:  # the namespace's first process counts too
            return limiting_command(self._prlimit, limits, processes=limits.processes + 1)
        uid = str(_LOWEST_UID + secrets.randbelow(_UIDS))
        return [
            *limiting_command(self._prlimit, limits, processes=limits.processes),
            *(self._setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups"),
            *("--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs"),
        ]


def _every_uid_is_mapped() -> bool:
    """Return whether this is the machine's root, not the root of a user namespace."""
    lines = Path("/proc/self/uid_map").read_text("ascii").splitlines()
    return [line.split() for line in lines] == [["0", "0", str(2**32 - 1)]]


def _system_options() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, ("/bin", "/lib", "/lib32", "/lib64", "/sbin")):
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    words += ["--perms", "0755", "--dir", "/etc"]
    for name in ("/etc/alternatives", "/etc/ld.so.cache"):  # used by compilers and libraries
        words += ["--ro-bind-try", name, name]
    words += [*_visible_options(sys.base_prefix), "--proc", "/proc", "--dev", "/dev"]
    return [*words, *_HIDDEN_FIRST_PROCESS]


def _visible_options(path: str) -> list[str]:
    """Bind a path read-only at its own location; parent directories are created empty."""
    place = Path(path)
    if place.is_relative_to("/usr"):
        return []
    words = []
    for parent in reversed(place.parents[:-1]):
        words += ["--perms", "0755", "--dir", str(parent)]
    return [*words, "--ro-bind", path, path]


def _file_of(content: str | bytes, fds: contextlib.ExitStack) -> int:
    """Return a read-only in-memory file; it is closed with ``fds``."""
    fd = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fds.callback(os.close, fd)
    left = memoryview(
        content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    )
    while left:
        left = left[os.write(fd, left) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _READ_ONLY)
    return fd


def _input_of(program: Program, fds: contextlib.ExitStack) -> int:
    return _file_of(program.stdin, fds) if program.channel is None else program.channel


def _read_status(fd: int) -> dict[str, int]:
    """Return bubblewrap's report: the child's pid, and its exit code if it started."""
    try:
        text = os.read(fd, 65_536).decode("ascii")
    except BlockingIOError:
        return {}
    status: dict[str, int] = {}
    for line in text.splitlines():
        status.update(json.loads(line))
    return status


def _status(ended: Ended, status: Mapping[str, int]) -> int:
    if "exit-code" in status:
        return status["exit-code"]
    if ended.by_limit is not None or ended.returncode < 0:
        return ended.returncode
    raise SetupError(
        "bubblewrap could not make the sandbox",
        found=bytes(ended.written["stderr"]).decode("utf-8", errors="replace").strip(),
        expected="bubblewrap 0.7 or newer, and user namespaces or root",
        remedy="see `task=doctor`; in a container, allow user namespaces (--privileged); "
        "sandbox=none measures what needs no execution; sandbox=unsafe executes without isolation",
    )


def _await_death(first_process: int | None) -> None:
    """Wait until the sandbox's first process, and with it all others, has died.

    Raises:
        MensError: it is still alive after ten seconds.
    """
    if first_process is None:
        return
    try:
        fd = os.pidfd_open(first_process)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(_DEATH_S * 1000):
            raise MensError("a killed sandbox is still alive", found=f"process {first_process}")
    finally:
        os.close(fd)
    with contextlib.suppress(ChildProcessError):  # our child if this is a container's first process
        os.waitpid(first_process, os.WNOHANG)


# Classic BPF, linux/bpf_common.h and linux/seccomp.h.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT: Final = 0x40000000  # x86-64's second table of the same calls

_NEW_NAMESPACES: Final = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_FAMILIES: Final = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: the network namespace isolates these


@dataclass(frozen=True, kw_only=True, slots=True)
class _Calls:
    audit: int
    clone: int
    socket: int
    refused: tuple[int, ...]


# The same in every table since Linux 5.1: memfd_secret, io_uring_setup, open_tree, move_mount,
# fsopen, mount_setattr, pidfd_getfd.
_RECENT: Final = (447, 425, 428, 429, 430, 442, 438)
_CLONE3: Final = 435

_TABLES: Final = {
    "x86_64": _Calls(
        audit=0xC000003E,
        clone=56,
        socket=41,
        refused=(
            *(319, 29, 68, 64, 240),  # memfd_create, shmget, msgget, semget, mq_open
            *(272, 308, 165, 166, 155, 161),  # unshare, setns, mount, umount2, pivot_root, chroot
            *(248, 249, 250),  # add_key, request_key, keyctl
            *(101, 310, 311),  # ptrace, process_vm_readv, process_vm_writev
            *(321, 298, 323),  # bpf, perf_event_open, userfaultfd
        ),
    ),
    "aarch64": _Calls(
        audit=0xC00000B7,
        clone=220,
        socket=198,
        refused=(
            *(279, 194, 186, 190, 180),
            *(97, 268, 40, 39, 41, 51),
            *(217, 218, 219),
            *(117, 270, 271),
            *(280, 241, 282),
        ),
    ),
}


def syscall_filter(machine: str | None = None) -> bytes:
    """Return the seccomp filter for a machine, by default this one.

    Raises:
        SetupError: its system call table is not known here.
    """
    machine = machine or platform.machine()
    calls = _TABLES.get(machine)
    if calls is None:
        raise SetupError(
            "the sandbox has no system call filter for this machine",
            found=machine,
            expected=" or ".join(_TABLES),
            remedy="run it on one of these; sandbox=none measures what needs no execution",
        )
    return b"".join(struct.pack("<HBBI", *line) for line in _program(calls))


def _program(calls: _Calls) -> list[tuple[int, int, int, int]]:
    """Return BPF instructions: code, jump if true, jump if false, constant."""
    lines = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, calls.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_BIT),
        _refuse(errno.ENOSYS),
        (_EQUAL, 0, 1, _CLONE3),  # its flags are in memory; libraries then fall back to clone
        _refuse(errno.ENOSYS),
    ]
    for number in (*calls.refused, *_RECENT):
        lines += [(_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    lines += [
        (_EQUAL, 0, 4, calls.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        _refuse(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 2 + len(_FAMILIES), calls.socket),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
    ]
    for place, family in enumerate(_FAMILIES):
        lines.append((_EQUAL, len(_FAMILIES) - place, 0, family))
    return [*lines, _refuse(errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]


def _refuse(number: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _REFUSE | number)
