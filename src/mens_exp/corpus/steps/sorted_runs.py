"""Lines sorted on disk: runs that fit into memory, and a merge of them."""

from __future__ import annotations

import heapq
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["sorted_lines"]

RUN_BYTES: Final = 64 * 2**20  # of lines held at once; with Python's own share some 100 MB
_MOST_RUNS: Final = 200  # merged at once: each is an open file


def sorted_lines(
    lines: Iterable[bytes], scratch: Path, run_bytes: int = RUN_BYTES
) -> Iterator[bytes]:
    """Yield lines in the order of their bytes.

    Args:
        lines: each ends with its only newline; what they are sorted by stands at their begin.
        scratch: an existing directory for the runs.
        run_bytes: how much is sorted in memory.
    """
    runs: list[Path] = []
    held: list[bytes] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= run_bytes:
            runs.append(_written(sorted(held), scratch, len(runs)))
            held, size = [], 0
    if not runs:
        yield from sorted(held)
        return
    runs.append(_written(sorted(held), scratch, len(runs)))
    held, made = [], len(runs)
    while len(runs) > _MOST_RUNS:
        first, runs = runs[:_MOST_RUNS], runs[_MOST_RUNS:]
        runs.append(_written(_merged(first), scratch, made))
        made += 1
    yield from _merged(runs)


def _written(lines: Iterable[bytes], scratch: Path, number: int) -> Path:
    path = scratch / f"run-{number:06d}"
    with path.open("xb") as file:
        file.writelines(lines)
    return path


def _merged(runs: list[Path]) -> Iterator[bytes]:
    """Merge sorted files, and remove them."""
    with ExitStack() as stack:
        files = [stack.enter_context(run.open("rb")) for run in runs]
        yield from heapq.merge(*files)
    for run in runs:
        run.unlink()
