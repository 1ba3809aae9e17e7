"""The directory of a sweep as a place to write to, by one launcher at a time."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mens_exp.artifacts.run_lock import held
from mens_exp.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.artifacts.sweep_dir import SweepDir

__all__ = ["locked", "writing"]


@contextmanager
def locked(directory: SweepDir, where: str) -> Iterator[None]:
    """Keep other launchers out of a sweep inside the block; its directory is made if missing.

    Args:
        directory: of the sweep.
        where: the key that names it.

    Raises:
        RequestError: another launcher is at work on it.
        SetupError: it cannot be made, or written to.
    """
    with ExitStack() as stack:
        with writing(where):
            directory.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(directory.lock))
        yield


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Say what the system refuses inside the block: a directory, or room for its files.

    Raises:
        SetupError: it did.
    """
    try:
        yield
    except OSError as error:
        raise SetupError(
            "the directory of the sweep cannot be written to",
            where=where,
            found=str(error),
            remedy="make room or name another directory, one that you may write to",
        ) from error
