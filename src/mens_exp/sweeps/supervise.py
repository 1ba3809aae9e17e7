"""Supervision of a job that another program starts, from begin to end, with an attempt log."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from mens_exp.sweeps.process import start

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from mens_exp.artifacts.attempt_log import AttemptLog
    from mens_exp.sweeps.process import Ended

__all__ = ["supervise"]

_LOOK_S = 0.1  # a job takes seconds at least


def supervise(
    arguments: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    log: AttemptLog,
    *,
    processes: int,
    queue_id: str | None,
    signals: Callable[[], list[int]],
) -> Ended:
    """Run a job to its end; the caller notes the end, and why.

    Args:
        arguments: of ``python -m mens_exp.sweeps.job``.
        output: where the job's output goes.
        environment: of the job.
        log: of its attempts.
        processes: of the job, those that train along with its first.
        queue_id: the batch system's own number of the job.
        signals: returns those to hand on to the job, each once.

    Raises:
        OSError: the system starts no further process.
    """
    process = start(arguments, output, environment)
    process.has_others = processes > 1
    log.began(process.pid, process.started, host=socket.gethostname(), queue_id=queue_id)
    while (ended := process.ended()) is None:
        for number in signals():
            process.pass_on(number)
        time.sleep(_LOOK_S)
    return ended
