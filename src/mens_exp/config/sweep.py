"""Treatment of cells that cannot run, of failed jobs, and of changes during a sweep (`-m`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mens_exp.config.fields import setting

__all__ = ["LOCAL_LAUNCHER", "Changes", "Invalid", "LocalLauncher", "SweepConfig"]

LOCAL_LAUNCHER = "local"


class Invalid(Enum):
    """The treatment of cells that are known beforehand to fail."""

    error = "error"
    skip = "skip"


class Changes(Enum):
    """The treatment of a job whose code or inputs differ from those at the sweep's launch."""

    refuse = "refuse"
    accept = "accept"


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """Settings of a sweep as a whole; the launcher's own settings are `hydra.launcher`."""

    invalid: Invalid = setting(
        Invalid.error,
        "error: one cell that is known to fail stops the sweep before anything runs; skip: the "
        "others run.",
    )
    retries: int = setting(
        1,  # unverified guess: a second kill is rarely chance
        "How often a job is started again, from its last checkpoint, after it was killed or failed "
        "with exit code 1; a wrong request is never tried again.",
        ge=0,
    )
    resume: str | None = setting(
        None,
        "The directory of a sweep to go on with: done cells are skipped once their files are "
        "verified, all others continue.",
    )
    changes: Changes = setting(
        Changes.refuse,
        "refuse: a job that finds other code or other rows than at launch fails; accept: it runs "
        "all the same, and the record says so.",
    )


@dataclass(kw_only=True)  # Hydra reads it as it reads its own launchers
class LocalLauncher:
    """`hydra.launcher` of `hydra/launcher=local`: processes of this machine, one for each job."""

    _target_: str = "mens_exp.sweeps.launcher.Launcher"
    n_jobs: int = setting(
        1,
        "Jobs at a time, 1 or more; or counted back from the cores of this machine: -1 is one for "
        "each core, -2 leaves one core free.",
    )
    threads: int | None = setting(
        None,
        "Threads of each job, which its processes share; null: OMP_NUM_THREADS where that is set, "
        "else the cores of this machine shared out among the jobs that run at a time.",
        ge=1,
    )
