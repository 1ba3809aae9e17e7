"""One process at a time works on a run directory."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

from mens_exp.artifacts.wait_lock import waiting
from mens_exp.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["held", "holder", "is_alive"]


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock file inside the block; one left by a process that died is taken over.

    Raises:
        RequestError: a living process of this machine holds it.
    """
    # One at a time: of two that find the lock of a dead process, only the first takes it over.
    with waiting(path.with_name(f".{path.name}.taking")):
        _take(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def holder(path: Path) -> tuple[int, float] | None:
    """Return the living process of this machine that holds a lock, and when it started."""
    try:
        record = json.loads(path.read_bytes())
        pid, started = int(record["pid"]), float(record["started"])
    except (OSError, ValueError, KeyError, TypeError):  # absent, or torn by its writer's death
        return None
    return (pid, started) if is_alive(pid, started) else None


def is_alive(pid: int, started: float) -> bool:
    """Tell whether the process of that number is still the one that started then.

    One that has ended and was not waited for counts as dead.
    """
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _take(path: Path) -> None:
    found = holder(path)
    if found is not None:
        raise RequestError(
            "a process is still working on this run",
            where=str(path.parent),
            found=f"process {found[0]}",
            remedy="wait for it, or end it first",
        )
    me = psutil.Process()
    path.write_text(json.dumps({"pid": me.pid, "started": me.create_time()}), encoding="ascii")
