"""The system calls that no program needs and that would undo a limit, as a seccomp filter.

Memory that is no process's own (memfd, System V segments and queues), new namespaces (a tmpfs of
any size could be mounted in one), keys, which no namespace holds apart, sockets of families that
a network namespace does not isolate (AF_VSOCK reaches a virtual machine's host), and what looks
into other processes.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass
from typing import Final

from mens_exp.errors import SetupError

__all__ = ["syscall_filter"]

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
    """Return the filter for a machine, by default this one.

    Raises:
        SetupError: its table of system calls is not known here.
    """
    machine = machine or platform.machine()
    calls = _TABLES.get(machine)
    if calls is None:
        raise SetupError(
            "the sandbox knows no filter of system calls for this machine",
            found=machine,
            expected=" or ".join(_TABLES),
            remedy="run it on one of these; sandbox=none measures what needs no execution",
        )
    return b"".join(struct.pack("<HBBI", *line) for line in _program(calls))


def _program(calls: _Calls) -> list[tuple[int, int, int, int]]:
    """Return lines of code, jump if true, jump if false, constant."""
    lines = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, calls.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_BIT),
        _refuse(errno.ENOSYS),
        (_EQUAL, 0, 1, _CLONE3),  # its flags lie in memory; libraries then use clone
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
