"""The programs that a sandbox is probed with; each says ``escaped`` where it got its way.

Each is Python of the standard library alone. What stands in ``$name`` is filled in by the probe.
"""

from __future__ import annotations

from string import Template
from typing import Final

__all__ = ["HOSTILE"]

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
"""Each probe's program, by the name of the probe."""
