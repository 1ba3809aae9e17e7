"""Progress of Lightning's loops, for another number of processes than those that saved it."""

from __future__ import annotations

from typing import Any

__all__ = ["for_processes"]


def for_processes(checkpoint: dict[str, Any], world_size: int) -> None:
    """Count a checkpoint's micro-batches as those of one of so many processes, in place.

    Lightning counts what one process has taken, and goes by it where a step ends and where
    validation is due. All processes together have taken the same: a step holds as many
    micro-batches however many processes share them.

    Args:
        checkpoint: saved at the end of an optimizer step; one that says nothing of processes is of
            one.
        world_size: processes that go on.
    """
    saved = checkpoint.get("world_size", 1)
    if saved == world_size:
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["current"], progress["total"]):
        for name, value in counts.items():
            counts[name] = value * saved // world_size
