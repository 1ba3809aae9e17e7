"""Work on pieces of a stream in several processes, results in order and few of them in memory."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, TypeVar

from mens_exp.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

__all__ = ["in_order", "pieces"]

T = TypeVar("T")
R = TypeVar("R")


def pieces(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Cut a stream into lists of so many, the last one shorter."""
    stream = iter(items)
    while piece := list(islice(stream, size)):
        yield piece


def in_order(work: Callable[[T], R], stream: Iterable[T], processes: int) -> Iterator[R]:
    """Yield what `work` makes of each piece of a stream, in its order.

    Args:
        work: a function that can be pickled.
        stream: the pieces; at most two for each process are read ahead.
        processes: how many work; with one, or with one piece, it is this one.

    Raises:
        SetupError: the system ended one of the processes.
        Exception: whatever `work` raises.
    """
    source = iter(stream)
    first = list(islice(source, 2))
    if processes == 1 or len(first) < 2:  # noqa: PLR2004 - a second piece
        yield from map(work, chain(first, source))
        return
    # Spawned: a fork would copy whatever threads of ours hold at that moment.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_end_with_parent)
    try:
        waiting: deque[Future[R]] = deque()
        for piece in chain(first, source):
            waiting.append(pool.submit(work, piece))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise SetupError(
            "a process that worked on the rows was ended from outside",
            found="no result of it",
            expected="memory for each process, some hundred MB",
            remedy="free memory, or ask for fewer processes",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Leave when the process that started this one is gone: nobody else would end it."""

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
