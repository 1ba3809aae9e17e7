"""Signals stay with the run, which closes its record and ends the processes beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning import Trainer

__all__ = ["keep_signals"]


def keep_signals(trainer: Trainer) -> None:
    """Have a trainer leave the process's signal handlers alone.

    Lightning's own for SIGTERM tells the other processes by a broadcast from inside the signal.
    They wait in another collective by then, so that none of them would ever end.
    """
    connector = trainer._signal_connector  # noqa: SLF001  # Lightning has no other name for it
    connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
