"""Slurm's states of the jobs of a sweep: asked once for all of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.sweeps.slurm_script import call

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Seen", "queue_of"]

_FIELDS = ("ArrayJobID", "ArrayTaskID", "State", "Reason", "exit_code", "Command")
# Every other state is one that a job waits or works in.
_OVER = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"}
    | {"OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "TIMEOUT"}
)
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One task of an array.

    Attributes:
        queue_id: Slurm's number of it, ``<array>_<index>``.
        number: its index, that of the job in its sweep.
        state: in Slurm's word.
        reason: why it is in that state, likewise.
        exit_code: of its script; None where it has none.
    """

    queue_id: str
    number: int
    state: str
    reason: str
    exit_code: int | None

    @property
    def is_over(self) -> bool:
        """Whether it will not run again."""
        return self.state in _OVER

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue and does not run."""
        return self.state in _WAITING


def queue_of(batch: Path) -> dict[str, Seen]:
    """Return what Slurm knows of the tasks whose scripts lie in a directory, by their ids.

    It forgets a job some minutes after its end (``MinJobAge``).

    Raises:
        OSError: Slurm does not answer.
    """
    columns = ",".join(f"{name}:|" for name in _FIELDS)
    text = call(["squeue", "--me", "--noheader", "--array", "--states=all", f"--Format={columns}"])
    seen = {}
    for line in text.splitlines():
        array, index, state, reason, status, script = line.split("|", maxsplit=5)
        if not index.isdecimal() or not script.startswith(f"{batch}{os.sep}"):
            continue  # of another sweep, or of none
        one = Seen(
            queue_id=f"{array}_{index}",
            number=int(index),
            state=state,
            reason=reason,
            exit_code=_exit_code(status),
        )
        seen[one.queue_id] = one
    return seen


def _exit_code(status: str) -> int | None:
    """Read a status as wait() gives it."""
    try:
        return os.waitstatus_to_exitcode(int(status))
    except ValueError:  # none yet
        return None
