"""Run an attack in a separate process, so that it can neither hang nor exhaust the machine.

The process is forked, may allocate a limited amount of memory, and is killed at the time limit.
The outcome is returned and not raised, so that a test can state which one it expects.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import traceback
import warnings
from dataclasses import dataclass

from mens_exp.errors import MensError

MIB = 2**20


@dataclass(frozen=True)
class End:
    """The outcome of an attack: `returned`, `refused` (one of our errors), `raised` or `killed`."""

    how: str
    message: str = ""


def attack(work, *given, seconds=10, memory_mib=1024, cpu_s=0):
    """Call ``work(*given)`` in a forked process, and return its `End`.

    Args:
        work: the function.
        *given: its arguments.
        seconds: of the clock that it may take.
        memory_mib: that it may allocate.
        cpu_s: seconds of processor time that it may take, on however busy a machine; 0: any.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads
        child = os.fork()
    if child == 0:
        os.close(reading)
        gc.freeze()  # the collector skips the test process's objects, so their pages are not copied
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        _work(work, given, writing, memory_mib)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], seconds)
            told = pipe.read() if ready else b""
        return (
            End(*json.loads(told)) if told else End("killed", f"not done in {cpu_s or seconds} s")
        )
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _work(work, given, writing, memory_mib):
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        most = used + memory_mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            end = ("returned", str(work(*given))[:1000])
        except MensError as error:
            end = ("refused", str(error)[:5000])
        except BaseException:  # reported to the parent, whatever it is
            end = ("raised", traceback.format_exc()[-2000:])
        os.write(writing, json.dumps(end).encode("utf-8"))
    finally:
        os._exit(0)
