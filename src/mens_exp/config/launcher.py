"""Places to run the jobs of a sweep: the settings of each option of hydra/launcher."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mens_exp.config.fields import setting
from mens_exp.config.sweep import LOCAL_LAUNCHER, LocalLauncher

__all__ = [
    "EARLIER",
    "LAUNCHERS",
    "SLURM",
    "Launcher",
    "SlurmLauncher",
    "launcher_settings",
    "launcher_values",
]

SLURM = "slurm"
# What earlier releases call an option; commands may still say so.
EARLIER = {"submitit_slurm": SLURM}


@dataclass(kw_only=True)  # Hydra reads it as it reads its own launchers
class SlurmLauncher:
    """`hydra/launcher=slurm`: one array of Slurm jobs, one task on one node each."""

    _target_: str = "mens_exp.sweeps.launcher.Launcher"
    name: str = setting("mens_exp", "Name of the array in Slurm's queue.")
    partition: str | None = setting(None, "Partition; null: the cluster's default.")
    account: str | None = setting(None, "Account to charge; null: the user's default.")
    qos: str | None = setting(None, "Quality of service; null: the user's default.")
    constraint: str | None = setting(None, "Features that a node must have; null: none.")
    exclude: str | None = setting(None, "Nodes to leave out; null: none.")
    comment: str | None = setting(None, "Comment in Slurm's records; null: none.")
    timeout_min: int = setting(
        60,  # as hydra-submitit-launcher
        "Time limit of a job in minutes.",
        ge=1,
    )
    cpus_per_task: int = setting(
        1, "Cores of a job, and its threads: one at least for each of its processes.", ge=1
    )
    gpus_per_node: int | None = setting(
        None, "GPUs of a job, one for each of its processes; null: none are asked for.", ge=1
    )
    gres: str | None = setting(None, "Generic resources, such as gpu:a100:1; null: none.")
    mem_gb: float | None = setting(
        None, "Memory of a job in GiB; null: what the cluster gives by default.", gt=0
    )
    array_parallelism: int = setting(
        256,  # as above
        "Jobs at a time; in a search, trials that are in the queue or at work at a time.",
        ge=1,
    )
    signal_delay_s: int = setting(
        120,  # as above
        "Seconds before the time limit at which a job is told to close its record and is put back "
        "into the queue; Slurm looks every 30 seconds, so less would never be told.",
        ge=30,  # measured on 22.05: a warning 5 seconds before the end was never sent
    )
    max_num_timeout: int = setting(
        3,  # submitit's own default
        "How often a job that reached its time limit is put back into the queue, to go on from "
        "its last checkpoint.",
        ge=0,
    )
    setup: list[str] = setting([], "Shell commands before the job, such as `module load cuda`.")
    additional_parameters: dict[str, Any] = setting(
        {}, "Further options of sbatch by name, without the dashes; true sets a bare flag."
    )
    poll_s: float = setting(
        10.0,  # unverified guess: a scheduler of thousands of jobs answers one squeue easily
        "Seconds between two questions to Slurm about the sweep's jobs.",
        ge=0.5,
    )


Launcher = LocalLauncher | SlurmLauncher

LAUNCHERS: dict[str, type[Launcher]] = {
    LOCAL_LAUNCHER: LocalLauncher,
    SLURM: SlurmLauncher,
}


def launcher_settings(values: dict[str, Any], name: str) -> Launcher:
    """Type the settings of a launcher.

    Args:
        values: Hydra's node of it, or what `launcher_values` stored of it.
        name: the option of hydra/launcher, also by an earlier name.
    """
    schema = LAUNCHERS[EARLIER.get(name, name)]
    given = {field.name: values[field.name] for field in _settable(schema) if field.name in values}
    return schema(**given)


def launcher_values(launcher: Launcher) -> dict[str, Any]:
    """Return the settings of a launcher as a record stores them."""
    return {field.name: getattr(launcher, field.name) for field in _settable(type(launcher))}


def _settable(schema: type[Launcher]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(schema) if field.name != "_target_"]
