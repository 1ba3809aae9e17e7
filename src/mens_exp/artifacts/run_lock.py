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

__all__ = ["awaited", "held"]

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


def _clear_stale(path: Path) -> None:
    try:
        holder = json.loads(path.read_bytes())
        pid, started = int(holder["pid"]), float(holder["started"])
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError):
        path.unlink(missing_ok=True)  # torn by the death of its writer
        return
    try:
        alive = abs(psutil.Process(pid).create_time() - started) < 1
    except psutil.Error:
        alive = False
    if alive:
        raise _taken(path, f"process {pid}")
    path.unlink(missing_ok=True)


def _taken(path: Path, holder: str) -> RequestError:
    return RequestError(
        "a process is still working on this run",
        where=str(path.parent),
        found=holder,
        remedy="wait for it, or end it first",
    )
