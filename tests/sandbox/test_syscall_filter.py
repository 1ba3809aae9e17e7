from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from mens_exp.errors import SetupError
from mens_exp.sandbox.bubblewrap import syscall_filter

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = [
    "memfd_create",
    "memfd_secret",
    "shmget",
    "msgget",
    "semget",
    "mq_open",
    "io_uring_setup",
    "unshare",
    "setns",
    "mount",
    "pivot_root",
    "chroot",
    "add_key",
    "request_key",
    "keyctl",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "open_tree",
    "move_mount",
    "fsopen",
    "mount_setattr",
    "pidfd_getfd",
    "umount2",
]
ALLOWED = [
    "read",
    "write",
    "openat",
    "execve",
    "futex",
    "prlimit64",
    "mmap",
    "exit_group",
    "setresuid",
    "getrandom",
]
ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS, EAFNOSUPPORT = 0x50001, 0x50026, 0x50061


def verdict(program, *, number, audit, argument=0):
    """Run a filter as the kernel does: classic BPF over nr, arch, ip and the arguments."""
    data = struct.pack("<IIQ6Q", number, audit, 0, argument, 0, 0, 0, 0, 0)
    lines = list(struct.iter_unpack("<HBBI", program))
    at, held = 0, 0
    while True:
        code, if_true, if_false, constant = lines[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            (held,) = struct.unpack_from("<I", data, constant)
            continue
        holds = {0x15: held == constant, 0x35: held >= constant, 0x45: bool(held & constant)}[code]
        at += if_true if holds else if_false


def numbers(machine):
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is missing: apt-get install linux-libc-dev")
    text = header.read_text("utf-8")
    return {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)
    }


@pytest.mark.parametrize("machine", HEADERS)
def test_filter_refuses_and_allows_by_the_kernel_s_own_numbers(machine):
    """The numbers come from the C headers."""
    program, calls = syscall_filter(machine), numbers(machine)
    for name in REFUSED:
        assert verdict(program, number=calls[name], audit=AUDIT[machine]) == EPERM, name
    for name in ALLOWED:
        assert verdict(program, number=calls[name], audit=AUDIT[machine]) == ALLOW, name


@pytest.mark.parametrize("machine", HEADERS)
def test_filter_looks_at_flags_and_families(machine):
    """Threads and forks are allowed; namespaces and other socket families are not."""
    program, calls, audit = syscall_filter(machine), numbers(machine), AUDIT[machine]
    for flags, expected in {17: ALLOW, 0x3D0F00: ALLOW, 0x10000011: EPERM, 0x20000: EPERM}.items():
        assert verdict(program, number=calls["clone"], audit=audit, argument=flags) == expected
    assert verdict(program, number=calls["clone3"], audit=audit) == ENOSYS
    families = {1: ALLOW, 2: ALLOW, 10: ALLOW, 16: EAFNOSUPPORT, 17: EAFNOSUPPORT, 40: EAFNOSUPPORT}
    for family, expected in families.items():
        assert verdict(program, number=calls["socket"], audit=audit, argument=family) == expected


def test_filter_kills_32_bit_calls_and_has_no_x32_calls():
    """By the filter's verdicts: both use other numbers than those of x86-64."""
    program = syscall_filter("x86_64")
    assert verdict(program, number=0, audit=0x40000003) == KILL
    assert verdict(program, number=0x40000000 | 1, audit=AUDIT["x86_64"]) == ENOSYS


def test_unknown_machine_has_no_sandbox():
    """Nothing runs without the filter; the exit code is 3."""
    with pytest.raises(SetupError, match="x86_64 or aarch64"):
        syscall_filter("riscv64")
