"""The executor of each option of hydra/launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.sweeps.local import LocalExecutor

if TYPE_CHECKING:
    from mens_exp.artifacts.sweep import SweepRecord
    from mens_exp.artifacts.sweep_dir import SweepDir
    from mens_exp.sweeps.executor import Executor

__all__ = ["executor_of"]


def executor_of(directory: SweepDir, record: SweepRecord) -> Executor:
    """Return what runs the jobs of a sweep."""
    return LocalExecutor(directory, record)
