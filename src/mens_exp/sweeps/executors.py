"""The executor of each option of hydra/launcher, and what keeps it from working here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.launcher import SlurmLauncher, launcher_settings
from mens_exp.errors import ConfigError
from mens_exp.sweeps.local import LocalExecutor
from mens_exp.sweeps.slurm import SlurmExecutor
from mens_exp.sweeps.slurm_script import slurm_problems

if TYPE_CHECKING:
    from mens_exp.artifacts.sweep import SweepRecord
    from mens_exp.artifacts.sweep_dir import SweepDir
    from mens_exp.config.launcher import Launcher
    from mens_exp.errors import MensError
    from mens_exp.sweeps.executor import Executor

__all__ = ["executor_of", "executor_problems"]


def executor_of(directory: SweepDir, record: SweepRecord) -> Executor:
    """Return what runs the jobs of a sweep."""
    launcher = launcher_settings(record.launcher_settings, record.launcher)
    if isinstance(launcher, SlurmLauncher):
        return SlurmExecutor(directory, record, launcher)
    return LocalExecutor(directory, record)


def executor_problems(launcher: Launcher, many: int) -> list[MensError]:
    """Return what keeps a launcher from running jobs here; nothing is started or written.

    Args:
        launcher: its settings.
        many: the number of jobs.
    """
    if isinstance(launcher, SlurmLauncher):
        return slurm_problems(launcher, many)
    if launcher.n_jobs == 0:
        return [
            ConfigError(
                "out of range",
                where="hydra.launcher.n_jobs",
                found=0,
                expected="1 or more, or -1 for one job for each core",
            )
        ]
    return []
