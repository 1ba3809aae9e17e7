"""One process at a time makes a thing that several want; the others wait for it."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["waiting"]


@contextmanager
def waiting(path: Path) -> Iterator[None]:
    """Hold a lock file inside the block, as soon as nobody else does.

    The kernel holds the lock for the process, so one that dies lets go of it. The file is gone
    afterwards. Windows has no such lock: there, two processes do the same work side by side.

    Args:
        path: the lock file; missing parent directories are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = _locked(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _locked(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            if sys.platform != "win32":
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_still(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # of a file that its last holder removed while we waited


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
