"""Ctrl-C and SIGTERM: the first one cancels a run in order, a second one ends at once."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["Cancelled", "cancellable", "end_at_once"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Cancelled(BaseException):
    """The user or the system asked the run to stop; not an error, so nothing may catch it."""


@contextmanager
def cancellable(is_closing: Callable[[], bool]) -> Iterator[None]:
    """Turn the first signal inside the block into :class:`Cancelled`.

    Args:
        is_closing: whether the run has its status already; the first signal then changes
            nothing, so that a closing record is never torn.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread alone
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        end_at_once()
        if not is_closing():
            raise Cancelled(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def end_at_once() -> None:
    """Let the next signal end the process."""
    if threading.current_thread() is threading.main_thread():
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
