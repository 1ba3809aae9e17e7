"""What each job of a sweep gets of the machine: threads, and a GPU in turn."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mens_exp.config.launcher import SlurmLauncher
from mens_exp.plan.machine import cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.launcher import Launcher

__all__ = ["environment_of", "jobs_at_a_time", "threads_per_job"]

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def jobs_at_a_time(launcher: Launcher) -> int:
    """Return how many jobs run beside each other, at most."""
    if isinstance(launcher, SlurmLauncher):
        return launcher.array_parallelism
    if launcher.n_jobs > 0:
        return launcher.n_jobs
    return max(1, cores() + 1 + launcher.n_jobs)  # as joblib counts


def threads_per_job(launcher: Launcher) -> int:
    """Share the cores out among the jobs that run at a time, unless the user has."""
    if isinstance(launcher, SlurmLauncher):
        return launcher.cpus_per_task
    if launcher.threads is not None:
        return launcher.threads
    given = os.environ.get(_THREADS[0], "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, cores() // jobs_at_a_time(launcher))


def environment_of(slot: int, *, threads: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of a job.

    Args:
        slot: the place among the jobs that run at a time.
        threads: of the job; torch takes the number from here.
        gpus: devices, taken in turn by the slots.
    """
    made = {**os.environ, **dict.fromkeys(_THREADS, str(threads))}
    made.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # as the command line sets it
    if gpus:
        made["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return made
