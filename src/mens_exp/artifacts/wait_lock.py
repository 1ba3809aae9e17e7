"""One process at a time makes or changes a thing that several want; the others wait for it."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if sys.platform == "win32":
    import msvcrt
    import time
else:
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["waiting"]


@contextmanager
def waiting(path: Path) -> Iterator[None]:
    """Hold a lock file inside the block, as soon as nobody else does.

    The kernel holds the lock for the process, so one that dies lets go of it. The file is gone
    afterwards.

    Args:
        path: the lock file; missing parent directories are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = _locked(path)
    try:
        yield
    finally:
        _let_go(path, handle)


def _locked(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            _wait_for(handle)
            if _is_still(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # of a file that its last holder removed while we waited


if sys.platform == "win32":

    def _wait_for(handle: int) -> None:
        while True:
            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            except OSError:
                time.sleep(0.01)
            else:
                return

    def _let_go(path: Path, handle: int) -> None:
        os.close(handle)  # a file that is open is not removed, so another's stays
        with suppress(OSError):
            path.unlink()

else:

    def _wait_for(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX)

    def _let_go(path: Path, handle: int) -> None:
        path.unlink(missing_ok=True)  # before another one gets the lock
        os.close(handle)


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
