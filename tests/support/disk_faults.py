"""Faults at chosen system calls of a process and of all its children.

A process that executes `source` has a filter in the kernel, which stops each of its calls that
change a file system until a `Watcher` in another process has answered (seccomp_unotify(2)). It
sees what Python writes and what native code does, whatever library makes the call. A change of
pages that are mapped from a file is no call, and is not seen.

The watcher lists the calls below a directory. It answers one of them, which a `Fault` names, with
an error or with half of what was to be written, or it ends the process there. It may also delay
each of them, one after the other, as a slow disk does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import platform
import re
import select
import signal
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = str(Path(__file__).parent)
VARIABLE = "DISK_WATCHER"  # tells a process and its children where the watcher is
# Name: numbers on x86_64 and aarch64, kind, and the arguments that name the file. "fd n": a file
# descriptor; "at n": a directory's descriptor and the path after it; "path n": a path.
CALLS = {
    "write": (1, 64, "write", "fd 0"),
    "pwrite64": (18, 68, "write", "fd 0"),
    "writev": (20, 66, "write", "fd 0"),
    "pwritev": (296, 70, "write", "fd 0"),
    "pwritev2": (328, 287, "write", "fd 0"),
    "sendfile": (40, 71, "copy", "fd 0"),
    "copy_file_range": (326, 285, "copy", "fd 2"),
    "open": (2, None, "create", "path 0"),
    "creat": (85, None, "create", "path 0"),
    "openat": (257, 56, "create", "at 0"),
    "mkdir": (83, None, "mkdir", "path 0"),
    "mkdirat": (258, 34, "mkdir", "at 0"),
    "rename": (82, None, "rename", "path 1"),
    "renameat": (264, 38, "rename", "at 2"),
    "renameat2": (316, 276, "rename", "at 2"),
    "link": (86, None, "link", "path 1"),
    "linkat": (265, 37, "link", "at 2"),
    "symlink": (88, None, "link", "path 1"),
    "symlinkat": (266, 36, "link", "at 1"),
    "unlink": (87, None, "unlink", "path 0"),
    "unlinkat": (263, 35, "unlink", "at 0"),
    "rmdir": (84, None, "unlink", "path 0"),
    "truncate": (76, 45, "truncate", "path 0"),
    "ftruncate": (77, 46, "truncate", "fd 0"),
    "fallocate": (285, 47, "allocate", "fd 0"),
    "fsync": (74, 82, "fsync", "fd 0"),
    "fdatasync": (75, 83, "fsync", "fd 0"),
}
OPENING = {"open": 1, "openat": 2}  # argument with an opening call's flags
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_MAKES = os.O_CREAT | os.O_TRUNC | 0o20000000  # the last one creates a file without a name
_NEEDS_SPACE = {"write", "copy", "create", "mkdir", "link", "allocate"}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_PIDFD_GETFD = 438
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
_CONTINUE = 1
_HERE = -100  # AT_FDCWD
# Parts of a name that differ from run to run: digests, process IDs, steps, dates, random text.
_CHANGING = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?:(?<=[./])|^)tmp\w{6,8}(?=/|$)|(?<=\.sync-)\w{8}"
    r"|(?<=obj/md5/)[0-9a-f/]+|(?<![0-9a-zA-Z])(?=[a-f]*\d)[0-9a-f]{6,}(?![0-9a-zA-Z])|\d+"
)


def source(address=None):
    """Return the code that a process executes before its command; its children execute it too.

    Args:
        address: of the watcher; by default what the environment names, and without it nothing.
    """
    named = f"os.environ.get({VARIABLE!r})" if address is None else repr(address)
    return (
        f"import os, sys; sys.path.append({HERE!r}); import disk_faults\n"
        f"at = {named}\n"
        "if at: disk_faults.install(at)\n"
    )


def install(address):
    """Install the filter in this process, and pass the kernel's descriptor to a watcher."""
    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = _filter()
    program = ctypes.create_string_buffer(filter_, len(filter_))
    told = struct.pack("HxxxxxxP", len(filter_) // 8, ctypes.addressof(program))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect("\0" + address)
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        # SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_NEW_LISTENER
        listener = libc.syscall(_SECCOMP[platform.machine()], 1, 8, told)
        if listener < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"no filter: {os.strerror(number)}")
        socket.send_fds(connection, [b"filter"], [listener])
        os.close(listener)


def _filter():
    """Return the BPF program: listed calls go to the watcher, and others continue."""
    column = 0 if platform.machine() == "x86_64" else 1
    lines = [(0x20, 0, 0, 4), (0x15, 1, 0, _AUDIT[platform.machine()]), (0x06, 0, 0, 0x7FFF0000)]
    lines.append((0x20, 0, 0, 0))
    ask, go_on = (0x06, 0, 0, 0x7FC00000), (0x06, 0, 0, 0x7FFF0000)
    for name, entry in CALLS.items():
        if entry[column] is None:
            continue
        if name in OPENING:  # the low half of the flags, and whether one creates a file
            low = 16 + 8 * OPENING[name]
            lines += [(0x15, 0, 4, entry[column]), (0x20, 0, 0, low), (0x45, 0, 1, _MAKES)]
            lines += [ask, go_on]
        else:
            lines += [(0x15, 0, 1, entry[column]), ask]
    return b"".join(struct.pack("<HBBI", *line) for line in [*lines, go_on])


@dataclass(frozen=True, order=True)
class Site:
    """Similar calls: the kind of change, and the class of file below the directory."""

    kind: str
    place: str


@dataclass(frozen=True)
class Fault:
    """A fault at a single call.

    ``kill`` ends the process before it, and ``torn`` after half of what it was to write. ``short``
    writes half and says so. ``full`` is ENOSPC for it and for all later calls that need space, and
    ``error`` is EIO for it alone.
    """

    site: Site
    ordinal: int
    action: str


class Watcher:
    """Answers the calls of the processes that connect to it, in a thread."""

    def __init__(self, root, fault=None, delay_s=0.0):
        self.address = f"mens_exp_disk_{uuid.uuid4().hex}"
        self.calls = []  # sites in order of occurrence
        self.fired = False
        self._root, self._fault = os.path.realpath(root), fault
        self._delay_s = delay_s
        self._seen = Counter()
        self._processes = {}  # number: the process itself, even if the number is reused
        self._is_full = False
        self._column = 0 if platform.machine() == "x86_64" else 1
        self._names = {entry[self._column]: name for name, entry in CALLS.items()}

    def __enter__(self):
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen()
        self._stop, stopped = os.pipe()
        self._stopped = stopped
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        """Kill the processes that still run under the filter, and stop the thread."""
        os.close(self._stopped)
        self._thread.join()
        self._listener.close()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
        os.close(self._stop)

    def _serve(self):
        poll = select.poll()
        poll.register(self._stop, select.POLLIN | select.POLLHUP)
        poll.register(self._listener, select.POLLIN)
        while True:
            for number, event in poll.poll():
                if number == self._stop:
                    return
                if number == self._listener.fileno():
                    asking, _ = self._listener.accept()
                    with asking:
                        _, (kernel,), _, _ = socket.recv_fds(asking, 16, 1)
                    poll.register(kernel, select.POLLIN)
                elif event & select.POLLIN:
                    self._answer(number)
                else:  # the last process under it has exited
                    poll.unregister(number)
                    os.close(number)

    def _answer(self, kernel):
        asked = bytearray(80)
        try:
            fcntl.ioctl(kernel, _RECEIVE, asked)
        except OSError:  # it died, or a signal interrupted the call
            return
        identity, pid, _, number, _, _, *arguments = struct.unpack("=QIIiIQ6Q", asked)
        call = _Call(pid, self._names[number], arguments)
        value, error, flags = 0, 0, _CONTINUE
        with contextlib.suppress(OSError, ValueError):  # the process may have exited
            value, error, flags = self._verdict(call)
        with contextlib.suppress(OSError):
            fcntl.ioctl(kernel, _SEND, struct.pack("=QqiI", identity, value, -error, flags))

    def _verdict(self, call):
        """Return the value, the error number and the flags."""
        go_on = 0, 0, _CONTINUE
        path = call.path()
        if not path.startswith(self._root + "/") or (call.kind == "mkdir" and os.path.isdir(path)):
            return go_on
        if call.group not in self._processes:
            self._processes[call.group] = os.pidfd_open(call.group)
        site = Site(call.kind, place_of(path[len(self._root) + 1 :]))
        self.calls.append(site)
        self._seen[site] += 1
        time.sleep(self._delay_s)
        fault = self._fault
        if fault is not None and (site, self._seen[site]) == (fault.site, fault.ordinal):
            self.fired = True
            return self._struck(call, fault.action)
        if self._is_full and call.kind in _NEEDS_SPACE:
            return 0, errno.ENOSPC, 0
        return (0, 0, 0) if call.kind == "fsync" else go_on  # skipped to save time

    def _struck(self, call, action):
        if action == "error":
            return 0, errno.EIO, 0
        if action == "full":
            self._is_full = True
            return 0, errno.ENOSPC, 0
        written = call.write_half() if action in ("torn", "short") else 0
        if action != "short":
            os.kill(call.group, signal.SIGKILL)
        return written, 0, 0


def place_of(relative):
    """Return the class of a file: its path without the parts that differ from run to run."""
    return _CHANGING.sub("#", relative.removesuffix(" (deleted)"))


class _Call:
    """A call that waits for its answer."""

    def __init__(self, pid, name, arguments):
        self.pid, self.name, self.arguments = pid, name, arguments
        _, _, self.kind, self._where = CALLS[name]

    @functools.cached_property
    def group(self):
        """Return the process of the calling thread."""
        status = Path(f"/proc/{self.pid}/status").read_text("ascii", "replace")
        return int(status.partition("\nTgid:")[2].split()[0])

    def path(self):
        """Return the file's absolute path."""
        how, at = self._where.split()
        at = int(at)
        if how == "fd":
            return os.readlink(f"/proc/{self.pid}/fd/{self.arguments[at]}")
        base, named = (_HERE, at) if how == "path" else (self.arguments[at], at + 1)
        text = os.fsdecode(self._text(self.arguments[named]))
        if not text.startswith("/"):
            base = ctypes.c_int(base & 0xFFFFFFFF).value
            link = "cwd" if base == _HERE else f"fd/{base}"
            text = os.path.join(os.readlink(f"/proc/{self.pid}/{link}"), text)
        parent, name = os.path.split(os.path.normpath(text))
        return os.path.join(os.path.realpath(parent), name)

    def write_half(self):
        """Write half of the data for the process, at least one byte; return the number of bytes."""
        data = self._data()
        process = os.pidfd_open(self.group)
        try:
            ours = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, self.arguments[0], 0)
        finally:
            os.close(process)
        try:
            data = data[: max(1, len(data) // 2)]
            if self.name.startswith("pw"):
                return os.pwrite(ours, data, ctypes.c_int64(self.arguments[3]).value)
            return os.write(ours, data)
        finally:
            os.close(ours)

    def _data(self):
        _, at, count, *_ = self.arguments
        if self.name in ("write", "pwrite64"):
            return self._memory(at, count)
        table = struct.iter_unpack("=QQ", self._memory(at, 16 * count))
        return b"".join(self._memory(base, length) for base, length in table)

    def _memory(self, at, size):
        with open(f"/proc/{self.pid}/mem", "rb", 0) as memory:
            memory.seek(at)
            return memory.read(size)

    def _text(self, at):
        """Read up to a zero byte, page by page, since later pages may not exist."""
        found = b""
        while b"\0" not in found:
            found += self._memory(at + len(found), 4096 - (at + len(found)) % 4096)
        return found.partition(b"\0")[0]


def actions_of(kind):
    """Return the possible faults at a call of a kind, besides killing its process."""
    more = {"write": ["torn", "short"]}.get(kind, [])
    return [*more, *(["full"] if kind in _NEEDS_SPACE else []), "error"]
