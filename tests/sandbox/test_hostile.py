"""Hostile programs; each prints `escaped` if it succeeds."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mens_exp.sandbox.program import Limits, Outcome, Program, python_program

LIMITS = Limits(memory_mib=96, cpu_s=8, wall_s=8, processes=12, output_kib=16, file_mib=2)
SHORT = Limits(memory_mib=96, cpu_s=8, wall_s=0.5, processes=12, output_kib=16, file_mib=2)
LITTLE_CPU = Limits(memory_mib=96, cpu_s=0.3, wall_s=8, processes=12, output_kib=16, file_mib=2)

SPECIAL = {Outcome.timeout: SHORT, Outcome.cpu_time: LITTLE_CPU}

# The preamble of all attempts: OSError is containment, and anything else an escape.
PRELUDE = """
import ctypes, os, resource, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def attempt(what, *arguments):
    try:
        got = what(*arguments)
    except (OSError, PermissionError, ValueError):
        return
    print("escaped:", got)

def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result

def write(path):
    with open(path, "w") as file:
        return file.write("x")
"""

# By name: the source, and how it ends if contained. `{port}`, `{abstract}`, `{secret}`, `{home}`,
# `{host}` and `{victim}` stand for what this test has set up on the machine.
HOSTILE = {
    "connects_to_this_machine": (
        "attempt(socket.create_connection, ('127.0.0.1', {port}), 1)",
        Outcome.ok,
    ),
    "sends_a_datagram_out": (
        (
            "one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "attempt(one.sendto, b'x', ('192.0.2.1', 53))"
        ),
        Outcome.ok,
    ),
    "resolves_a_name": ("attempt(socket.gethostbyname, 'example.com')", Outcome.ok),
    "connects_to_an_abstract_socket": (
        "one = socket.socket(socket.AF_UNIX)\nattempt(one.connect, chr(0) + '{abstract}')",
        Outcome.ok,
    ),
    "opens_a_socket_to_the_hypervisor": ("attempt(socket.socket, 40, 1)", Outcome.ok),
    "opens_a_raw_socket": (
        (
            "attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)\n"
            "attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)"
        ),
        Outcome.ok,
    ),
    "writes_outside": (
        (
            "for place in '/ /usr /usr/bin /etc /dev /dev/shm /root /home'.split():\n"
            "    attempt(write, place + '/mark')"
        ),
        Outcome.ok,
    ),
    "overwrites_its_interpreter": (
        (
            "attempt(write, sys.executable)\nattempt(os.remove, os.__file__)\n"
            "attempt(os.rename, os.__file__, os.__file__ + '2')\n"
            "attempt(os.chmod, sys.executable, 0o777)"
        ),
        Outcome.ok,
    ),
    "reads_a_file_of_this_machine": (
        "attempt(open, '{secret}')\nattempt(os.listdir, os.path.dirname('{secret}'))",
        Outcome.ok,
    ),
    "reads_through_the_root_of_a_process": (
        (
            "for pid in ('1', '{host}', 'self'):\n"
            "    attempt(open, '/proc/' + pid + '/root{secret}')\n"
            "    attempt(open, '/proc/' + pid + '/cwd/../..{secret}')"
        ),
        Outcome.ok,
    ),
    "climbs_out_of_its_directory": ("attempt(open, '../' * 20 + '{secret}'[1:])", Outcome.ok),
    "reads_the_home_directory": (
        (
            "for name in ('.bashrc', '.profile', '.ssh', '.cache', '.netrc', '.gitconfig'):\n"
            "    attempt(os.stat, '{home}/' + name)"
        ),
        Outcome.ok,
    ),
    "reads_the_passwords": (
        "attempt(open, '/etc/shadow')\nattempt(open, '/etc/passwd')",
        Outcome.ok,
    ),
    "mounts": (
        (
            "def mount(*words):\n"
            "    if libc.mount(*words) < 0: raise OSError\n"
            "attempt(mount, b'none', b'/', None, 32 | 4096, None)\n"
            "attempt(mount, b'tmpfs', b'/tmp', b'tmpfs', 0, None)"
        ),
        Outcome.ok,
    ),
    "makes_a_namespace": (
        (
            "def unshare(flags):\n"
            "    if libc.unshare(flags) < 0: raise OSError\n"
            "attempt(unshare, 0x10000000)\nattempt(unshare, 0x10020000)\n"
            "clone = 56 if os.uname().machine == 'x86_64' else 220\n"
            "attempt(call, clone, 0x10000000 | 17, 0, 0, 0, 0)"
        ),
        Outcome.ok,
    ),
    "changes_its_root": ("attempt(os.chroot, '/tmp')", Outcome.ok),
    "becomes_root": (
        (
            "attempt(os.setuid, 0)\nattempt(os.setgid, 0)\nattempt(os.setgroups, [0])\n"
            "if os.getuid() == 0: print('escaped: is root')\n"
            "status = open('/proc/self/status').read()\n"
            "if 'NoNewPrivs:\\t1' not in status or 'CapEff:\\t0000000000000000' not in status:\n"
            "    print('escaped: may gain rights')"
        ),
        Outcome.ok,
    ),
    "changes_the_kernel": (
        (
            "for name in ('kernel/core_pattern', 'kernel/panic', 'vm/overcommit_memory'):\n"
            "    attempt(write, '/proc/sys/' + name)\n"
            "attempt(write, '/proc/sysrq-trigger')\nattempt(write, '/sys/power/state')"
        ),
        Outcome.ok,
    ),
    "opens_devices": (
        (
            "for name in ('mem', 'kmsg', 'sda', 'vda', 'kvm', 'fuse', 'vsock', 'net/tun'):\n"
            "    attempt(open, '/dev/' + name, 'rb')\n"
            "attempt(os.mknod, '/tmp/disk', 0o60666, os.makedev(254, 0))"
        ),
        Outcome.ok,
    ),
    "kills_processes_of_this_machine": (
        "attempt(os.kill, {victim}, 9)\nattempt(os.kill, {host}, 9)",
        Outcome.ok,
    ),
    "kills_all_that_it_can": (
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "try:\n    os.kill(-1, signal.SIGTERM)\nexcept OSError:\n    pass"
        ),
        Outcome.ok,
    ),
    "traces_a_process": (
        (
            "number, readv = (101, 310) if os.uname().machine == 'x86_64' else (117, 270)\n"
            "attempt(call, number, 16, 1, 0, 0)\nattempt(call, readv, 1, 0, 0, 0, 0, 0)"
        ),
        Outcome.ok,
    ),
    "reads_the_environment_of_its_parents": (
        (
            "for pid in ('1', str(os.getppid()), '{host}'):\n"
            "    try:\n        text = open('/proc/' + pid + '/environ').read()\n"
            "    except OSError:\n        continue\n"
            "    if '{word}' in text: print('escaped')\n"
            "if '{word}' in repr(os.environ): print('escaped')"
        ),
        Outcome.ok,
    ),
    "uses_keys_of_the_kernel": (
        "attempt(call, 248 if os.uname().machine == 'x86_64' else 217, b'user', b'k', b'v', 1, -4)",
        Outcome.ok,
    ),
    "raises_its_limits": (
        (
            "for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):\n"
            "    attempt(resource.setrlimit, kind, (-1, -1))"
        ),
        Outcome.ok,
    ),
    "forks_without_end": (
        (
            "made = 0\n"
            "try:\n"
            "    while made < 60:\n"
            "        if os.fork() == 0:\n"
            "            time.sleep(60)\n"
            "        made += 1\n"
            "except OSError:\n    pass\n"
            "if made != 11: print('escaped:', made)"
        ),
        Outcome.ok,
    ),
    "starts_threads_without_end": (
        (
            "threading.stack_size(65536)\nmade = 0\n"
            "try:\n"
            "    while made < 60:\n"
            "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
            "        made += 1\n"
            "except RuntimeError:\n    pass\n"
            "if made != 11: print('escaped:', made)\n"
            "sys.stdout.flush()\nos._exit(0)"
        ),
        Outcome.ok,
    ),
    "forks_a_tree_of_forks": (
        "while True:\n    try: os.fork()\n    except OSError: pass",
        Outcome.timeout,
    ),
    "takes_memory": ("held = bytearray(b'x') * 2**30\nprint('escaped')", Outcome.memory),
    "takes_memory_in_many_processes": (
        (
            "for _ in range(6): \n"
            "    if os.fork() == 0:\n"
            "        held = bytearray(b'x') * (48 * 2**20)\n        time.sleep(60)\n"
            "time.sleep(3)\nprint('escaped')"
        ),
        Outcome.memory,
    ),
    "takes_memory_that_could_be_shared": (
        (
            "import mmap\n"
            "for _ in range(3): os.fork()\n"
            "held = mmap.mmap(-1, 24 * 2**20)\n"
            "for place in range(0, len(held), 4096): held[place] = 1\n"
            "time.sleep(3)\nprint('escaped')"
        ),
        Outcome.memory,
    ),
    "takes_memory_of_no_process": (
        (
            "attempt(os.memfd_create, 'held')\n"
            "shmget, msgget = (29, 68) if os.uname().machine == 'x86_64' else (194, 186)\n"
            "attempt(call, shmget, 0, 2**20, 0o1600)\nattempt(call, msgget, 0, 0o1600)"
        ),
        Outcome.ok,
    ),
    "fills_its_files": (
        (
            "def fill():\n"
            "    for number in range(8):\n"
            "        with open(f'/tmp/{{number}}', 'wb') as file: file.write(bytes(2**20))\n"
            "attempt(fill)"
        ),
        Outcome.ok,
    ),
    "writes_one_huge_file": (
        (
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "attempt(os.truncate, os.open('huge', os.O_CREAT | os.O_RDWR), 2**40)"
        ),
        Outcome.ok,
    ),
    "makes_files_without_end": (
        "for number in range(10**7): open(f'/tmp/{{number}}', 'w').close()\nprint('escaped')",
        Outcome.files,
    ),
    "writes_without_end": ("while True: os.write(1, b'x' * 4096)", Outcome.output),
    "complains_without_end": ("while True: os.write(2, b'x' * 4096)", Outcome.output),
    "ignores_every_signal": (
        (
            "for number in signal.valid_signals():\n"
            "    try: signal.signal(number, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\n"
            "time.sleep(60)"
        ),
        Outcome.timeout,
    ),
    "stops_itself": ("os.kill(os.getpid(), signal.SIGSTOP)\nprint('escaped')", Outcome.timeout),
    "closes_its_output_and_waits": (
        "os.close(1)\nos.close(2)\ntime.sleep(60)",
        Outcome.timeout,
    ),
    "writes_into_its_input": (
        (
            "attempt(os.ftruncate, 0, 100)\nattempt(os.write, 0, b'x')\n"
            "one = os.open('/proc/self/fd/0', os.O_RDWR)\nattempt(os.write, one, b'x')"
        ),
        Outcome.ok,
    ),
    "looks_for_inherited_files": (
        (
            "for number in range(3, 256):\n    attempt(os.fstat, number)\n"
            "attempt(os.listdir, '/proc/1/fd')"
        ),
        Outcome.ok,
    ),
    "takes_over_the_first_process": (
        (
            "attempt(open, '/proc/1/mem', 'r+b')\nattempt(os.stat, '/proc/1/environ')\n"
            "first = os.pidfd_open(1)\nattempt(call, 438, first, 0, 0)\nattempt(write, '/proc/1/x')"
        ),
        Outcome.ok,
    ),
    "waits_for_input": ("if sys.stdin.read(): print('escaped')", Outcome.ok),
    "leaves_a_daemon": (
        (
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    if os.fork() == 0:\n"
            "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "        os.closerange(0, 3)\n        time.sleep(60)\n"
            "    os._exit(0)"
        ),
        Outcome.ok,
    ),
    "leaves_a_daemon_with_its_output": (
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)",
        Outcome.ok,
    ),
    "computes_without_end": (
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        Outcome.cpu_time,
    ),
    "computes_in_many_processes": (
        "for _ in range(2): os.fork()\nwhile True: pass",
        Outcome.cpu_time,
    ),
    "crashes": ("ctypes.string_at(0)", Outcome.killed_signal),
    "hides_from_measurement": (
        (
            "libc.prctl(4, 0, 0, 0, 0)\n"  # not dumpable, so its /proc files belong to root
            "for _ in range(6):\n"
            "    if os.fork() == 0:\n"
            "        held = bytearray(b'x') * (48 * 2**20)\n        time.sleep(60)\n"
            "time.sleep(3)\nprint('escaped')"
        ),
        Outcome.memory,
    ),
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Set up what a program must not reach: sockets, a file, a process and a secret."""
    secret = tmp_path_factory.mktemp("private") / "secret"
    word = secrets.token_hex(8)
    secret.write_text(word, "utf-8")
    with (
        pytest.MonkeyPatch.context() as patch,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as abstract,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim,
    ):
        patch.setenv("PRIVATE_WORD", word)
        abstract.bind(f"\0{word}")
        abstract.listen()
        yield {
            "port": listener.getsockname()[1],
            "abstract": word,
            "secret": secret,
            "word": word,
            "home": Path.home(),
            "host": os.getpid(),
            "victim": victim.pid,
        }
        assert victim.poll() is None
        victim.kill()
    assert secret.read_text("utf-8") == word


def run(sandbox, source, outcome, mark):
    program = python_program(PRELUDE + source)
    marked = Program(argv=(*program.argv, mark), files=program.files, env=program.env)
    return sandbox.run(marked, SPECIAL.get(outcome, LIMITS))


def processes_with(mark):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_is_contained(sandbox, machine, name):
    """It ends as expected, reaches nothing, and leaves no file or process."""
    source, outcome = HOSTILE[name]
    mark = secrets.token_hex(8)
    started = time.monotonic()
    done = run(sandbox, source.format(**machine), outcome, mark)
    assert "escaped" not in done.stdout + done.stderr, done
    assert done.outcome is outcome, done
    assert processes_with(mark) == []
    assert time.monotonic() - started < LIMITS.wall_s + 5
    assert len(done.stdout) <= 16 * 1024
    assert len(done.stderr) <= 16 * 1024


def test_there_are_enough_of_them():
    """The number of attacks must not shrink unnoticed."""
    assert len(HOSTILE) >= 25


def test_prelude_tells_an_escape(sandbox, machine):
    """Control: a successful attempt is reported, so the tests above can fail."""
    done = run(sandbox, "attempt(write, '/tmp/program/mine')", Outcome.ok, "mark")
    assert done.stdout == "escaped: 1\n"
