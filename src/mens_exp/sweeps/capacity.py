"""Whether the jobs of a sweep together fit where they are to run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.launcher import SlurmLauncher
from mens_exp.errors import RequestError
from mens_exp.plan import machine
from mens_exp.plan.messages import size
from mens_exp.sweeps.threads import jobs_at_a_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.config.launcher import Launcher
    from mens_exp.sweeps.planning import PlannedJob

__all__ = ["machine_notes"]

_GIB = 2**30


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
