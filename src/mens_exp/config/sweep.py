"""Sweeps (`-m`): invalid cells and failed jobs, launchers, and the Optuna sweeper."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from mens_exp.config.fields import setting

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCAL_LAUNCHER = "local"


class Invalid(Enum):
    """The treatment of cells that are known to fail before they start."""

    error = "error"
    skip = "skip"


class Changes(Enum):
    """The treatment of a job whose code or inputs have changed since the sweep was launched."""

    refuse = "refuse"
    accept = "accept"


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """Settings of a sweep as a whole; the launcher's settings are in `hydra.launcher`."""

    invalid: Invalid = setting(
        Invalid.error,
        "error: a cell that is known to fail stops the sweep before anything runs; skip: the "
        "other cells run.",
    )
    retries: int = setting(
        1,  # unverified guess: a second kill is rarely chance
        "Number of restarts of a job, from its last checkpoint, after it was killed or failed "
        "with exit code 1; a wrong request is never retried.",
        ge=0,
    )
    resume: str | None = setting(
        None,
        "The directory of a sweep to continue: finished cells are skipped once their files are "
        "verified, all others continue.",
        example="outputs/multirun/default/20261124T090000.000Z",
    )
    changes: Changes = setting(
        Changes.refuse,
        "refuse: a job that finds other code or other rows than at launch fails; accept: it runs "
        "anyway, and the record says so.",
    )
    objectives: list[str] = setting(
        ["val_loss"],
        "KPIs of a job that the sweeper of a Hydra plugin receives as its result, with the names "
        "of task=compare: one as a number, several as a list.",
        example="[val_loss,peak_bytes]",
    )


@dataclass(kw_only=True)  # Hydra reads it as it reads its own launchers
class LocalLauncher:
    """`hydra.launcher` of `hydra/launcher=local`: one local process per job."""

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


SLURM = "slurm"
# Option names of earlier releases; commands may still use them.
EARLIER = {"submitit_slurm": SLURM}


@dataclass(kw_only=True)  # Hydra reads it as it reads its own launchers
class SlurmLauncher:
    """`hydra/launcher=slurm`: one Slurm job array, with one task of the array per job."""

    _target_: str = "mens_exp.sweeps.launcher.Launcher"
    name: str = setting("mens_exp", "Name of the array in Slurm's queue.", example="qlora")
    partition: str | None = setting(None, "Partition; null: the cluster's default.", example="gpu")
    account: str | None = setting(
        None, "Account to charge; null: the user's default.", example="my-lab"
    )
    qos: str | None = setting(None, "Quality of service; null: the user's default.", example="long")
    constraint: str | None = setting(
        None, "Features that a node must have; null: none.", example="a100"
    )
    exclude: str | None = setting(None, "Nodes to leave out; null: none.", example="node07")
    comment: str | None = setting(None, "Comment in Slurm's records; null: none.", example="pilot")
    timeout_min: int = setting(
        60,  # as hydra-submitit-launcher
        "Time limit of a job in minutes.",
        ge=1,
    )
    nodes: int | None = setting(
        None,
        "Nodes of each job, and its `trainer.num_nodes` unless that is given; null: "
        "`trainer.num_nodes`. It may change when the sweep continues.",
        ge=1,
    )
    cpus_per_task: int = setting(
        1,
        "Cores of a job on each of its nodes, and its threads there: at least one for each of its "
        "processes.",
        ge=1,
    )
    gpus_per_node: int | None = setting(
        None,
        "GPUs of a job on each of its nodes, one for each of its processes; null: none are "
        "requested.",
        ge=1,
    )
    gres: str | None = setting(
        None, "Generic resources, such as gpu:a100:1; null: none.", example="gpu:a100:1"
    )
    mem_gb: float | None = setting(
        None,
        "Memory of a job in GiB, on each of its nodes; null: what the cluster gives by default.",
        gt=0,
    )
    array_parallelism: int = setting(
        256,  # as above
        "Concurrent jobs; in a search, trials in the queue or running at once.",
        ge=1,
    )
    signal_delay_s: int = setting(
        120,  # as above
        "Seconds before the time limit at which a job is signalled to close its record and is put "
        "back into the queue; Slurm checks every 30 seconds, so a shorter time would never be "
        "signalled.",
        ge=30,  # measured on 22.05: a warning 5 seconds before the end was never sent
    )
    max_num_timeout: int = setting(
        3,  # submitit's own default
        "Number of times that a job that reached its time limit is put back into the queue, to "
        "continue from its last checkpoint.",
        ge=0,
    )
    setup: list[str] = setting(
        [],
        "Shell commands before the job, such as `module load cuda`.",
        example="'[module load cuda]'",
    )
    additional_parameters: dict[str, Any] = setting(
        {},
        "Further options of sbatch by name, without the dashes; true sets a bare flag.",
        example="{reservation:mine}",
    )
    poll_s: float = setting(
        10.0,  # unverified guess: a scheduler of thousands of jobs answers one squeue easily
        "Seconds between two queries to Slurm about the sweep's jobs.",
        ge=0.5,
    )


@dataclass(kw_only=True, slots=True)
class PluginLauncher:
    """A launcher of an installed Hydra plugin, such as `hydra/launcher=submitit_local`.

    Attributes:
        option: its option of hydra/launcher.
        settings: its node in Hydra's configuration; interpolations are resolved at launch.
    """

    option: str
    settings: dict[str, Any]


Launcher = LocalLauncher | SlurmLauncher | PluginLauncher

LAUNCHERS: dict[str, type[LocalLauncher | SlurmLauncher]] = {
    LOCAL_LAUNCHER: LocalLauncher,
    SLURM: SlurmLauncher,
}


def launcher_settings(values: dict[str, Any], name: str) -> Launcher:
    """Convert the settings of a launcher to its typed form.

    Args:
        values: Hydra's launcher node, or the values stored by `launcher_values`.
        name: the option of hydra/launcher; earlier names are accepted.
    """
    name = EARLIER.get(name, name)
    if name not in LAUNCHERS:
        return PluginLauncher(option=name, settings=dict(values))
    schema = LAUNCHERS[name]
    given = {field.name: values[field.name] for field in _settable(schema) if field.name in values}
    return schema(**given)


def launcher_values(launcher: Launcher) -> dict[str, Any]:
    """Return the settings of a launcher in the form stored in records."""
    if isinstance(launcher, PluginLauncher):
        return dict(launcher.settings)
    return {field.name: getattr(launcher, field.name) for field in _settable(type(launcher))}


def launcher_option(launcher: Launcher) -> str:
    """Return a launcher's option of hydra/launcher."""
    if isinstance(launcher, PluginLauncher):
        return launcher.option
    return next(name for name, kind in LAUNCHERS.items() if isinstance(launcher, kind))


def _settable(schema: type[Any]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(schema) if field.name != "_target_"]


OPTUNA = "optuna"


class Sampler(Enum):
    """The algorithm that samples values."""

    tpe = "tpe"
    random = "random"


class Pruner(Enum):
    """The pruner that stops unpromising trials early."""

    none = "none"
    median = "median"
    hyperband = "hyperband"


@dataclass(kw_only=True)  # Hydra reads it as it reads its own sweepers
class OptunaSweeper:
    """`hydra.sweeper` of `hydra/sweeper=optuna`."""

    _target_: str = "mens_exp.sweeps.searching.launch_search"
    n_trials: int = setting(
        20, "Total number of draws, including repeats and those that cannot run.", ge=1
    )
    sampler: Sampler = setting(
        Sampler.tpe, "tpe: Optuna's tree-structured Parzen estimator; random: evenly at random."
    )
    seed: int = setting(
        0, "Seed of the draws; each draw derives from it and the trial's number.", ge=0
    )
    startup_trials: int = setting(
        10, "Trials that tpe draws at random before it models their results (Optuna's).", ge=1
    )
    objectives: list[str] = setting(
        ["val_loss"],
        "KPIs of a run to improve, named as task=compare names them.",
        example="[val_loss,peak_bytes]",
    )
    directions: list[str] = setting(
        [],
        "minimize or maximize, for each objective; empty: as the table of KPIs says.",
        example="[minimize,minimize]",
    )
    pruner: Pruner = setting(
        Pruner.none,
        "median: ends a trial whose validation loss is above the median of the earlier ones at "
        "that step; hyperband: Optuna's, with optimizer steps as the resource.",
    )
    pruner_startup_trials: int = setting(
        5, "Complete trials before median ends any (Optuna's default).", ge=0
    )
    pruner_min_steps: int = setting(1, "Optimizer steps before which no trial is ended.", ge=1)
    params: dict[str, str] = setting(
        {},
        "Search space by key, in the syntax of the command line: for an experiment's YAML.",
        example='{lora.r: "8,16,32"}',
    )


def search_settings(node: dict[str, Any]) -> OptunaSweeper:
    """Convert the composed sweeper node to its typed form."""
    return OptunaSweeper(**{one.name: node[one.name] for one in fields(OptunaSweeper)})


IN_ORDER = "basic"  # the sweeper that runs the cells of the command in order


def sweeper_of(texts: Sequence[str]) -> str:
    """Return the option of hydra/sweeper that the overrides select."""
    chosen = [text.partition("=")[2] for text in texts if text.startswith("hydra/sweeper=")]
    return chosen[-1] if chosen else IN_ORDER
