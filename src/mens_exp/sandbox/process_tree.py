"""Resource use of a living process tree, and its termination."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Use", "files_in", "kill_tree", "tree_of", "use_of"]

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_GONE: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Memory that a tree holds now, and CPU time that it has spent."""

    memory_bytes: int
    cpu_s: float


def tree_of(pid: int) -> Iterator[int]:
    """Yield a process and all its living descendants."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        with contextlib.suppress(*_GONE):
            for task in Path(f"/proc/{one}/task").iterdir():
                with contextlib.suppress(*_GONE):
                    children = (task / "children").read_text("ascii")
                    waiting += map(int, children.split())


def use_of(pid: int, *, memory_above: int) -> Use:
    """Measure a tree.

    Pages that several of its processes share are counted once, but only where the quick count,
    which takes them for each, is above ``memory_above`` bytes.
    """
    pids = list(tree_of(pid))
    memory = sum(map(_resident_bytes, pids))
    if memory > memory_above:
        memory = sum(map(_proportional_bytes, pids))
    return Use(memory_bytes=memory, cpu_s=sum(map(_cpu_s, pids)))


def files_in(pid: int, place: str) -> int:
    """Return how many files lie on the file system that a tree alone sees at ``place``.

    A process that still sees this machine's own, because its sandbox is not made yet, says nothing.
    """
    ours = Path(place).stat().st_dev
    for one in tree_of(pid):
        with contextlib.suppress(OSError):
            seen = Path(f"/proc/{one}/root{place}")
            if seen.stat().st_dev != ours:
                found = os.statvfs(seen)
                return found.f_files - found.f_ffree
    return 0


def kill_tree(pid: int) -> None:
    """Kill a process and every descendant that can be found; one that is gone already is fine."""
    for one in list(tree_of(pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * _PAGE_BYTES
    except _GONE:
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
        sizes = [line.split()[1] for line in text.splitlines() if line.startswith("Pss:")]
    except PermissionError:
        return _resident_bytes(pid)  # it hides itself: counted in full
    except _GONE:
        return 0
    return sum(map(int, sizes)) * 1024


def _cpu_s(pid: int) -> float:
    """Return the time of a process and of the children that it has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except _GONE:
        return 0.0
    after_name = stat.rpartition(")")[2].split()  # a name may hold blanks and parentheses
    return sum(map(int, after_name[11:15])) / _TICKS_PER_S
