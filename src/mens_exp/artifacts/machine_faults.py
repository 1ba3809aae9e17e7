"""Errors of the disk and the memory, reported as such instead of as bugs or wrong requests."""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING, Final

from mens_exp.errors import MensError, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_of_disk", "machine_fault"]

# Of each error: what is wrong, and what to do first.
_AGAIN: Final = ", then go on with: "
_ELSEWHERE: Final = "use another disk (hydra.run.dir, or MENS_EXP_CACHE for the cache)"
_FULL: Final = ("the disk is full", f"free some space, or {_ELSEWHERE}")
_DENIED: Final = ("access is denied", "change the file's permissions, or use another directory")
_MEMORY: Final = (
    "there is not enough memory",
    "end other programs, or choose a smaller model, batch or sequence length",
)
_BY_NUMBER: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: ("the disk quota is used up", _FULL[1]),
    errno.EFBIG: ("a file would exceed the size limit", "raise the limit (ulimit -f)"),
    errno.EROFS: ("the file system is read-only", _ELSEWHERE),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EIO: ("the disk failed to read or write", "check the disk, or write elsewhere"),
    errno.EMFILE: ("too many files are open", "raise the limit (ulimit -n)"),
    errno.ENFILE: ("too many files are open", "end other programs"),
    errno.ENOMEM: _MEMORY,
}
# Libraries in other languages raise no OSError: Rust has the number in its text, torch words alone.
_IN_RUST: Final = re.compile(r"\(os error (\d+)\)|Os \{ code: (\d+)")
_BY_TEXT: Final = {
    "No space left on device": _FULL,
    "PytorchStreamWriter failed writing": _FULL,
    "DefaultCPUAllocator: can't allocate memory": _MEMORY,
    "CUDA out of memory": _MEMORY,
}


def machine_fault(error: BaseException, again: str = "the same command") -> SetupError | None:
    """Return the error as one of the machine, or None where it is another one.

    An error that has a message for the user keeps it.

    Args:
        error: as it reached the outermost place; the errors that it came of count, too.
        again: what to go on with once the machine is well.
    """
    if isinstance(error, MensError):
        return None
    for one in _chain(error):
        found = _fault(one)
        if found is not None:
            where = one.filename if isinstance(one, OSError) else None
            return SetupError(
                found[0],
                where=os.fsdecode(where) if isinstance(where, str | bytes) else None,
                found=" ".join(str(one).split())[:300] or None,
                remedy=f"{found[1]}{_AGAIN}{again}",
            )
    return None


def is_of_disk(remedy: str | None) -> bool:
    """Tell from the remedy on record whether an error was one of files, and not of the memory."""
    first = (remedy or "").partition(_AGAIN)[0]
    return first != _MEMORY[1] and first in {its for _, its in _BY_NUMBER.values()}


def _fault(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, MemoryError):
        return _MEMORY
    number = error.errno if isinstance(error, OSError) else None
    in_rust = _IN_RUST.search(str(error))
    if in_rust:
        number = int(in_rust[1] or in_rust[2])
    if number in _BY_NUMBER:
        return _BY_NUMBER[number]
    if isinstance(error, OSError):
        return None
    return next((its for text, its in _BY_TEXT.items() if text in str(error)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, as a traceback shows them."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
