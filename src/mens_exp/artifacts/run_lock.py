"""One process at a time works on a run directory."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

from mens_exp.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["awaited", "held", "holder", "is_alive"]

_PATIENCE_S = 10.0  # a line is written in a millisecond


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock file inside the block; one left by a process that died is taken over.

    Raises:
        RequestError: a living process of this machine holds it.
    """
    _clear_stale(path)
    me = psutil.Process()
    record = json.dumps({"pid": me.pid, "started": me.create_time()}).encode()
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError as error:
        raise _taken(path, "another process, just now") from error
    with os.fdopen(handle, "wb") as file:
        file.write(record)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def awaited(path: Path) -> Iterator[None]:
    """Hold a lock file inside the block, waiting up to ten seconds for whoever holds it.

    Raises:
        RequestError: it was held all that time.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        manager = held(path)
        try:
            manager.__enter__()
            break
        except RequestError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    try:
        yield
    finally:
        manager.__exit__(None, None, None)


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


def _clear_stale(path: Path) -> None:
    found = holder(path)
    if found is not None:
        raise _taken(path, f"process {found[0]}")
    path.unlink(missing_ok=True)


def _taken(path: Path, holder: str) -> RequestError:
    return RequestError(
        "a process is still working on this run",
        where=str(path.parent),
        found=holder,
        remedy="wait for it, or end it first",
    )
