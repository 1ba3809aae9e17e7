"""Errors of the disk and the memory, told as what they are: no bug, and nothing of the request."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from mens_exp.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["machine_fault"]

_FULL: Final = (
    "no space is left on the disk",
    "free some, or write elsewhere: hydra.run.dir, or MENS_EXP_CACHE for the cache",
)
_DENIED: Final = ("a file may not be read or written", "change its permissions, or write elsewhere")
_MEMORY: Final = ("the memory is not enough", "end other programs, or ask for less")
_BY_NUMBER: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: ("the quota on the disk is used up", _FULL[1]),
    errno.EFBIG: ("a file is larger than may be written", "raise the limit (ulimit -f)"),
    errno.EROFS: ("the disk can only be read", _DENIED[1]),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EIO: ("the disk reports an error", "look into the system's log; the disk may be failing"),
    errno.EMFILE: ("too many files are open", "raise the limit (ulimit -n)"),
    errno.ENFILE: ("too many files are open", "end other programs"),
    errno.ENOMEM: _MEMORY,
}
# Libraries in other languages have no number, only text: torch, safetensors, tokenizers.
_BY_TEXT: Final = {
    "No space left on device": _FULL,
    "PytorchStreamWriter failed writing": _FULL,
    "DefaultCPUAllocator: can't allocate memory": _MEMORY,
}


def machine_fault(error: BaseException) -> SetupError | None:
    """Return the error as one of the machine, or None where it is another one."""
    for one in _chain(error):
        found: tuple[str, str] | None = None
        where = None
        if isinstance(one, MemoryError):
            found = _MEMORY
        elif isinstance(one, OSError) and one.errno in _BY_NUMBER:
            found = _BY_NUMBER[one.errno]
            where = None if one.filename is None else str(one.filename)
        else:
            found = next((its for text, its in _BY_TEXT.items() if text in str(one)), None)
        if found is not None:
            reason = " ".join(str(one).split())[:300] or None
            return SetupError(found[0], where=where, found=reason, remedy=found[1])
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came of."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
