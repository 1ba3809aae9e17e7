"""The request of a command with hydra/sweeper=optuna, and every problem with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.nearest import expected_name
from mens_exp.artifacts.search import SearchRecord
from mens_exp.config.fields import range_problems
from mens_exp.config.launcher import SlurmLauncher, launcher_settings
from mens_exp.config.search import OptunaSweeper, Pruner, Sampler, search_settings
from mens_exp.config.search_space import read_space
from mens_exp.config.sweep import Invalid
from mens_exp.errors import ConfigError, MensError, NoEffectError, Problems, RequestError
from mens_exp.evals.kpi_table import KPIS, Direction
from mens_exp.sweeps.capacity import device_problems, machine_notes
from mens_exp.sweeps.executors import executor_problems
from mens_exp.sweeps.planning import (
    PlannedJob,
    directory_of,
    estimate_of,
    place_problems,
    refuse,
)
from mens_exp.sweeps.search_cells import Cells, bare
from mens_exp.sweeps.search_probes import probe
from mens_exp.sweeps.threads import jobs_at_a_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.launcher import Launcher
    from mens_exp.config.overrides import Cell
    from mens_exp.config.search_space import Space
    from mens_exp.config.sweep import SweepConfig
    from mens_exp.sweeps.search_probes import Probed

__all__ = ["Request", "read_request"]

_LOSS = "val_loss"
_DIRECTIONS = {Direction.MIN: "minimize", Direction.MAX: "maximize"}
_MEASURED = frozenset({"train", "evaluate"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A search that can begin.

    Attributes:
        root: its directory.
        launcher: what its jobs run on.
        settings: of the sweep.
        search: its part of the record, without trials.
        cells: what makes those of its trials.
        probed: cells such as are drawn, those that ask for most among them.
        notes: what a reader should know besides.
    """

    root: Path
    launcher: Launcher
    settings: SweepConfig
    search: SearchRecord
    cells: Cells
    probed: tuple[Cell, ...]
    notes: tuple[str, ...]


def read_request(overrides: Sequence[str]) -> Request:
    """Read a command, and compose its space from end to end before anything is drawn.

    Raises:
        MensError: the command is wrong, or nothing of its space can run.
        Problems: several of these.
    """
    space = read_space(overrides)
    Problems.raise_if(list(space.problems))
    if not space.dimensions:
        raise RequestError(
            "nothing is to be drawn",
            where="hydra/sweeper",
            found="one value for every key",
            expected="a key with several: optim.lr=tag(log,interval(1e-5,1e-3)), lora.r=8,16",
        )
    cells = Cells(space=space.dimensions, fixed=space.fixed)
    probed = probe(cells)
    if probed.general or not probed.cells:
        refuse(probed.general, probed.bad, probed.names)
    first = probed.cells[0]
    settings, composed = first.config.sweep, first.composed
    launcher = launcher_settings(composed.launcher, str(composed.launcher_option))
    search = search_settings(first.composed.sweeper)
    root = Path(str(first.composed.sweep_root))
    general: list[MensError] = [
        *range_problems(launcher, "hydra.launcher."),
        *range_problems(settings, "sweep."),
        *range_problems(search, "hydra.sweeper."),
        *place_problems(root, [first]),
        *_objective_problems(search, probed.cells),
        *_pruner_problems(search, probed.cells),
        *_idle_settings(search, {bare(text) for text in overrides}),
        *device_problems([*probed.cells, *probed.ends], launcher, jobs_at_a_time(launcher)),
        *_width_problems(search, launcher),
    ]
    if not general:
        general += executor_problems(launcher, search.n_trials)
    if general or (probed.bad and settings.invalid is Invalid.error):
        refuse(general, probed.bad, probed.names)
    return Request(
        root=root,
        launcher=launcher,
        settings=settings,
        search=_record(search, space),
        cells=cells,
        probed=(*probed.cells, *probed.ends),
        notes=tuple(_notes(probed, launcher, search.n_trials, root)),
    )


def _objective_problems(search: OptunaSweeper, cells: Sequence[Cell]) -> Iterator[ConfigError]:
    """Yield objectives that no run of these measures, and directions that are none."""
    where = "hydra.sweeper.objectives"
    if not search.objectives:
        yield ConfigError("there is none", where=where, expected="a KPI, such as [val_loss]")
    if len(set(search.objectives)) < len(search.objectives):
        yield ConfigError("names one twice", where=where, found=", ".join(search.objectives))
    for name in search.objectives:
        if name not in KPIS:
            yield ConfigError(
                "no such KPI", where=where, found=name, expected=expected_name(name, KPIS)
            )
        elif KPIS[name].direction is Direction.NONE and not search.directions:
            yield ConfigError(
                f"more {name} are neither better nor worse",
                where="hydra.sweeper.directions",
                expected="minimize or maximize, for each objective",
            )
        elif _is_of_items(name) and all(cell.config.suite.name == "none" for cell in cells):
            yield ConfigError(
                "is measured by a suite, and there is none",
                where=where,
                found=name,
                remedy="choose one with suite=…",
            )
    tasks = {cell.config.task.name for cell in cells}
    if not tasks <= _MEASURED:
        yield ConfigError(
            "measures no objective",
            where="task",
            found=", ".join(sorted(tasks - _MEASURED)),
            expected="train or evaluate",
        )
    known = set(_DIRECTIONS.values())
    if search.directions and (
        len(search.directions) != len(search.objectives) or not set(search.directions) <= known
    ):
        yield ConfigError(
            "not one for each objective",
            where="hydra.sweeper.directions",
            found=", ".join(search.directions),
            expected="minimize or maximize, for each objective, in their order",
        )


def _is_of_items(name: str) -> bool:
    return bool(KPIS[name].field or KPIS[name].keys)


def _pruner_problems(search: OptunaSweeper, cells: Sequence[Cell]) -> Iterator[ConfigError]:
    """Yield why trials cannot be ended by their validation loss."""
    if search.pruner is Pruner.none:
        return
    where, found = "hydra.sweeper.pruner", search.pruner.value
    if search.objectives != [_LOSS] or "maximize" in search.directions:
        yield ConfigError(
            "ends trials by their validation loss, which is not what is searched for",
            where=where,
            found=f"{found} with objectives {', '.join(search.objectives)}",
            expected=f"objectives=[{_LOSS}], minimized, or pruner=none",
        )
    if any(
        cell.config.task.name == "train" and cell.config.trainer.val_check_interval is None
        for cell in cells
    ):
        yield NoEffectError(
            "because nothing is validated before training has ended",
            where=where,
            found=found,
            remedy="set trainer.val_check_interval, micro-batches between validations",
        )


def _idle_settings(search: OptunaSweeper, given: set[str]) -> Iterator[ConfigError]:
    """Yield settings that others leave without effect."""
    of_pruner = f"pruner={search.pruner.value}"
    idle = {
        "startup_trials": (search.sampler is Sampler.random, "sampler=random"),
        "pruner_startup_trials": (search.pruner is not Pruner.median, of_pruner),
        "pruner_min_steps": (search.pruner is Pruner.none, of_pruner),
    }
    for name, (is_idle, beside) in idle.items():
        where = f"hydra.sweeper.{name}"
        if is_idle and where in given:
            yield NoEffectError(f"with {beside}", where=where, remedy=f"drop {where}")


def _width_problems(search: OptunaSweeper, launcher: Launcher) -> Iterator[ConfigError]:
    """Yield why tpe would draw at random: it models results, and none would be there in time."""
    many = jobs_at_a_time(launcher)
    if search.sampler is Sampler.tpe and many >= search.n_trials > search.startup_trials:
        name = "array_parallelism" if isinstance(launcher, SlurmLauncher) else "n_jobs"
        yield ConfigError(
            "leaves sampler=tpe nothing to model: all trials are drawn before one has a result",
            where=f"hydra.launcher.{name}",
            found=f"{many} trials at a time, {search.n_trials} in all",
            expected="a few trials at a time",
            remedy=f"set hydra.launcher.{name}, or draw with hydra.sweeper.sampler=random",
        )


def _record(search: OptunaSweeper, space: Space) -> SearchRecord:
    directions = search.directions or [_DIRECTIONS[KPIS[k].direction] for k in search.objectives]
    is_median = search.pruner is Pruner.median
    return SearchRecord(
        sampler=search.sampler.value,
        seed=search.seed,
        startup_trials=search.startup_trials,
        n_trials=search.n_trials,
        pruner=search.pruner.value,
        pruner_startup_trials=search.pruner_startup_trials if is_median else None,
        pruner_min_steps=search.pruner_min_steps,
        objectives=list(search.objectives),
        directions=list(directions),
        fixed=list(space.fixed),
        space=list(space.dimensions),
        trials=[],
        best=[],
        importance={},
        importance_unknown="no trial is complete",
    )


def _notes(probed: Probed, launcher: Launcher, n_trials: int, root: Path) -> Iterator[str]:
    """Say what cannot run, and where a few trials at a time are too much for the machine.

    Raises:
        RequestError: even the low estimates of the trials that run at a time are.
    """
    for number, problems in probed.bad.items():
        why = "; ".join(str(problem) for problem in problems)
        yield f"cannot run: {', '.join(probed.names[number])}: {why}"
    jobs = [
        PlannedJob(
            cell=cell,
            directory=directory_of(cell),
            differs=(),
            contract=None,
            estimate=estimate_of(cell),
            notes=(),
        )
        for cell in probed.cells
    ]
    yield from machine_notes(jobs * min(jobs_at_a_time(launcher), n_trials), launcher, root)
