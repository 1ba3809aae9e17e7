"""Whether the jobs of a sweep together fit where they are to run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.launcher import SlurmLauncher
from mens_exp.errors import ConfigError, MensError, RequestError
from mens_exp.plan import machine
from mens_exp.plan.messages import size
from mens_exp.sweeps.threads import gpu_problems, gpus_per_job, jobs_at_a_time, processes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mens_exp.config.launcher import Launcher
    from mens_exp.config.overrides import Cell
    from mens_exp.sweeps.planning import PlannedJob

__all__ = ["device_problems", "machine_notes"]

_GIB = 2**30


def device_problems(cells: Sequence[Cell], launcher: Launcher, many: int) -> list[MensError]:
    """Return why the processes of jobs would not have a GPU, or a core, each.

    Args:
        cells: of the jobs.
        launcher: its settings.
        many: the number of jobs, as more than those never run at a time.
    """
    if isinstance(launcher, SlurmLauncher):
        return list(_slurm_problems(cells, launcher))
    return gpu_problems(machine.gpu_ids(), gpus_per_job(cells), min(many, jobs_at_a_time(launcher)))


def _slurm_problems(cells: Sequence[Cell], launcher: SlurmLauncher) -> Iterator[MensError]:
    """Yield what Slurm is not asked for, though the processes of a job each need one."""
    asked = {
        "cpus_per_task": (launcher.cpus_per_task, max(processes_of(one.config) for one in cells)),
        "gpus_per_node": (launcher.gpus_per_node, gpus_per_job(cells)),
    }
    for name, (given, needed) in asked.items():
        if given is not None and needed > max(1, given):
            yield ConfigError(
                "is less than the processes of a job (trainer.devices)",
                where=f"hydra.launcher.{name}",
                found=given,
                expected=f"{needed} at least",
                remedy=f"choose hydra.launcher.{name}={needed}, or fewer processes",
            )


def machine_notes(jobs: Sequence[PlannedJob], launcher: Launcher, root: Path) -> list[str]:
    """Say where all jobs together need more than there is, though each alone does not.

    Args:
        jobs: those that will run.
        launcher: its settings.
        root: the directory of the sweep.

    Raises:
        RequestError: even the low estimates of the jobs that run at a time are too much.
    """
    notes = _asked_for(jobs, launcher) if isinstance(launcher, SlurmLauncher) else []
    if not isinstance(launcher, SlurmLauncher):  # whose jobs run on other machines
        notes += _memory_notes(jobs, jobs_at_a_time(launcher))
        notes += _core_notes(jobs, jobs_at_a_time(launcher))
    needed = sum(job.estimate["disk_bytes"] or 0 for job in jobs)
    place, space = machine.space(root)
    if needed > space:
        notes.append(f"all jobs together write {size(needed)}; {place} has {size(space)} free")
    return notes


def _asked_for(jobs: Sequence[PlannedJob], launcher: SlurmLauncher) -> list[str]:
    """Hold what a job is expected to take against what Slurm is asked to give it."""
    lows = [job.estimate.get("memory_low_bytes") for job in jobs if _on_cpu(job)]
    low = max((one for one in lows if one is not None), default=None)
    given = None if launcher.mem_gb is None else launcher.mem_gb * _GIB
    if low is not None and given is not None and low > given:
        raise RequestError(
            "a job needs more memory than Slurm is asked for",
            where="hydra.launcher.mem_gb",
            found=f"{launcher.mem_gb:g}, and a job takes {size(low)} at least",
            remedy="ask for more, or make the jobs smaller",
        )
    times = [job.estimate["time_s"] for job in jobs if job.estimate["time_s"] is not None]
    if times and max(times) > 60 * launcher.timeout_min:
        many = launcher.max_num_timeout
        limit = f"hydra.launcher.timeout_min={launcher.timeout_min}"
        then = f"it then goes on from its last checkpoint, {many} times at most"
        return [f"a job is expected to take longer than {limit}; {then}"]
    return []


def _on_cpu(job: PlannedJob) -> bool:
    return bool(job.estimate.get("device") == "cpu")


def _memory_notes(jobs: Sequence[PlannedJob], n_jobs: int) -> list[str]:
    """Say where the jobs that run at a time may need more memory than is free.

    Raises:
        RequestError: even their low estimates are too much.
    """
    notes = []
    on_cpu = [job.estimate for job in jobs if _on_cpu(job)]
    free = min((one["free_bytes"] for one in on_cpu if one["free_bytes"]), default=None)
    low, likely = (
        sum(sorted((one[name] for one in on_cpu), reverse=True)[:n_jobs])
        for name in ("memory_low_bytes", "memory_bytes")
    )
    if free is not None and low > free:
        raise RequestError(
            "so many jobs at a time need more memory than is free",
            where="hydra.launcher.n_jobs",
            found=f"{n_jobs}, {size(low)} at least",
            expected=f"at most {size(free)}",
            remedy="choose fewer jobs at a time",
        )
    if free is not None and likely > free:
        notes.append(f"{n_jobs} jobs at a time may need {size(likely)} of {size(free)} free memory")
    return notes


def _core_notes(jobs: Sequence[PlannedJob], n_jobs: int) -> list[str]:
    """Say where several processes in each job leave no core for each; they then take turns."""
    processes = sorted((processes_of(job.cell.config) for job in jobs), reverse=True)
    together, cores = sum(processes[:n_jobs]), machine.cores()
    if max(processes, default=1) == 1 or together <= cores:
        return []
    here = f"{cores} core{'' if cores == 1 else 's'}"
    return [f"{together} processes at a time share {here}: those of a job will wait for each other"]
