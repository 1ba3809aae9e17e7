"""Shares of the machine for each job of a sweep: threads, and GPUs in turn."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mens_exp.config.launcher import SlurmLauncher
from mens_exp.errors import MensError, RequestError
from mens_exp.plan.machine import cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.launcher import Launcher
    from mens_exp.config.overrides import Cell
    from mens_exp.config.root import RunConfig

__all__ = [
    "VISIBLE",
    "environment_of",
    "gpu_problems",
    "gpus_of",
    "gpus_per_job",
    "jobs_at_a_time",
    "processes_of",
    "threads_per_job",
]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def jobs_at_a_time(launcher: Launcher) -> int:
    """Return how many jobs run beside each other, at most."""
    if isinstance(launcher, SlurmLauncher):
        return launcher.array_parallelism
    if launcher.n_jobs > 0:
        return launcher.n_jobs
    return max(1, cores() + 1 + launcher.n_jobs)


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


def processes_of(config: RunConfig) -> int:
    """Count the processes of a job on its machine."""
    return config.trainer.devices if config.task.name == "train" else 1


def gpus_per_job(cells: Sequence[Cell]) -> int:
    """Return how many GPUs the widest job may use; 0 where none may."""
    configs = [cell.config for cell in cells]
    many = [processes_of(one) for one in configs if one.trainer.accelerator != "cpu"]
    return max(many, default=0)


def gpus_of(slot: int, gpus: Sequence[str], each: int) -> tuple[str, ...]:
    """Return the GPUs of a slot.

    Args:
        slot: the place among the jobs that run at a time.
        gpus: those that all jobs share.
        each: GPUs of a slot; slots of one may take the same one in turn.
    """
    if each == 1:
        return (gpus[slot % len(gpus)],) if gpus else ()
    return tuple(gpus[slot * each : (slot + 1) * each])


def gpu_problems(gpus: Sequence[str], each: int, n_jobs: int) -> list[MensError]:
    """Refuse more jobs of several GPUs at a time than there are GPUs for.

    Args:
        gpus: those that all jobs share; none where that is unknown.
        each: GPUs of a slot.
        n_jobs: jobs at a time.
    """
    if each == 1 or not gpus or n_jobs * each <= len(gpus):
        return []
    most = len(gpus) // each
    return [
        RequestError(
            "so many jobs at a time need more GPUs than there are",
            where="hydra.launcher.n_jobs",
            found=f"{n_jobs} of {each} GPUs each (trainer.devices), and {len(gpus)} are here",
            expected=f"at most {most}",
            remedy=f"choose hydra.launcher.n_jobs={most}" if most else "choose fewer processes",
        )
    ]


def environment_of(
    slot: int, *, threads: int, gpus: Sequence[str], each: int = 1, processes: int = 1
) -> dict[str, str]:
    """Return the environment of a job.

    Args:
        slot: the place among the jobs that run at a time.
        threads: of the job, shared out among its processes; torch takes the number from here.
        gpus: devices, taken in turn by the slots.
        each: GPUs of a slot.
        processes: of the job.
    """
    made = {**os.environ, **dict.fromkeys(_THREADS, str(max(1, threads // processes)))}
    made.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # as the command line sets it
    if mine := gpus_of(slot, gpus, each):
        made[VISIBLE] = ",".join(mine[:processes])
    return made
