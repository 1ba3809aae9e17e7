"""Read and check a search (hydra/sweeper=optuna): its request, its space, and its cells.

Before the first draw, the space is probed for options that can be combined, values that can never
run, and settings without effect.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.sweep import SearchRecord
from mens_exp.config.fields import range_problems
from mens_exp.config.override_parsing import read_space, written
from mens_exp.config.overrides import Checked, check, swept_by_config
from mens_exp.config.suggestions import NO_KEY
from mens_exp.config.sweep import (
    OPTUNA,
    Invalid,
    OptunaSweeper,
    Pruner,
    Sampler,
    SlurmLauncher,
    search_settings,
)
from mens_exp.errors import (
    ConfigError,
    MensError,
    NoEffectError,
    Problems,
    RequestError,
    expected_name,
)
from mens_exp.evals.kpis import KPIS, Direction, misspelt
from mens_exp.sweeps.executors import executor_problems
from mens_exp.sweeps.plan import (
    PlannedJob,
    device_problems,
    directory_of,
    estimate_of,
    launcher_of_cell,
    machine_notes,
    place_problems,
    refuse,
)
from mens_exp.sweeps.process import jobs_at_a_time
from mens_exp.tasks.resolve_references import pin_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mens_exp.artifacts.sweep import Dimension
    from mens_exp.config.override_parsing import Space
    from mens_exp.config.overrides import Cell
    from mens_exp.config.sweep import Launcher, SweepConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One trial's cell.

    Attributes:
        params: key -> override, for drawn values that have an effect.
        cell: the composed and resolved cell; None if it cannot run.
        problems: reasons why it cannot.
    """

    params: dict[str, str]
    cell: Cell | None
    problems: tuple[MensError, ...]


@dataclass(kw_only=True, slots=True)
class Cells:
    """Builds the cells of a search.

    Attributes:
        space: the drawn dimensions, config groups first.
        fixed: the overrides that all trials share.
    """

    space: Sequence[Dimension]
    fixed: Sequence[str]
    _filled: dict[tuple[str, ...], tuple[Checked, frozenset[str]]] = field(default_factory=dict)

    def draw(self, number: int, suggest: Callable[[Dimension], str | float]) -> Drawn:
        """Draw a cell: first the options, then the values that have an effect with them."""
        params: dict[str, str] = {}
        for those in self._phases():
            idle = self.filled(params)[1] if params else frozenset()
            for one in those:
                if bare(one["key"]) not in idle:
                    params[one["key"]] = written(one, suggest(one))
        checked, _ = self.judge(list(params.values()), first=number)
        cell = checked.cells[0] if checked.cells else None
        problems = checked.problems
        if cell is not None:
            params = {key: text for key, text in params.items() if text not in cell.dropped}
            problems = problems or tuple(pin_inputs(cell))
        return Drawn(params=params, cell=None if problems else cell, problems=problems)

    def judge(self, texts: Sequence[str], *, first: int = 0) -> tuple[Checked, frozenset[str]]:
        """Check one cell, without drawn keys that have no effect in it.

        Returns:
            The result, and the omitted keys: keys that the drawn options do not have, and keys
            without effect in combination with the other values.
        """
        keys = frozenset(bare(one["key"]) for one in self.space)
        checked = check([*self.fixed, *texts], multirun=True, drawn=keys, first=first)
        groups = {bare(one["key"]) for one in self.space if one["kind"] == "group"}
        absent = {
            key
            for key in keys
            for problem in checked.general
            if problem.where == key and problem.what == f"{NO_KEY} {key.partition('.')[0]}"
            if key.partition(".")[0] in groups
        }
        if absent:
            texts = [text for text in texts if bare(text) not in absent]
            checked = check([*self.fixed, *texts], multirun=True, drawn=keys, first=first)
        dropped = {bare(text) for cell in checked.cells for text in cell.dropped}
        return checked, frozenset(absent | dropped)

    def filled(self, chosen: Mapping[str, str]) -> tuple[Checked, frozenset[str]]:
        """Check, once, a cell of the chosen values and the first value of all other dimensions."""
        known = tuple(sorted(chosen.values()))
        if known not in self._filled:
            rest = [one for one in self.space if one["key"] not in chosen]
            texts = [*chosen.values(), *(written(one, first_value(one)) for one in rest)]
            self._filled[known] = self.judge(texts)
        return self._filled[known]

    def _phases(self) -> Iterator[list[Dimension]]:
        """Yield dimensions to draw together; each group separately, as others depend on it."""
        yield from ([one] for one in self.space if one["kind"] == "group")
        yield [one for one in self.space if one["kind"] == "choice"]
        yield [one for one in self.space if one["kind"] in {"int", "float"}]


def first_value(dimension: Dimension) -> str | float:
    """Return the first choice or the lower bound."""
    if dimension["values"]:
        return dimension["values"][0]
    low = dimension["low"]
    assert low is not None, "a number has two ends"
    return int(low) if dimension["kind"] == "int" else low


def bare(text: str) -> str:
    """Return the key of an override or a plain key, without its prefix operator."""
    return text.partition("=")[0].lstrip("+~").partition("@")[0]


_MOST = 32  # combinations of options to compose; beyond that, only single changes


@dataclass(kw_only=True, slots=True)
class Probed:
    """Facts about a space that are known before the first draw.

    Attributes:
        general: problems of the command itself.
        cells: one for each combination of options that can run.
        ends: one for each other choice and upper bound that can run, combined with the first such
            combination.
        bad: probe number -> reason why it cannot run.
        names: probe number -> its values.
    """

    general: list[MensError] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    ends: list[Cell] = field(default_factory=list)
    bad: dict[int, tuple[MensError, ...]] = field(default_factory=dict)
    names: dict[int, tuple[str, ...]] = field(default_factory=dict)


def probe(cells: Cells) -> Probed:
    """Compose each combination of options, and each other choice and upper bound with one."""
    found = Probed()
    places = [(chosen, *_take(cells, chosen, found)) for chosen in _combinations(cells.space)]
    for one in cells.space:
        if found.general or not found.cells:
            break
        counts = [chosen for chosen, good, idle in places if good and bare(one["key"]) not in idle]
        if not counts:
            found.general.append(_idle_everywhere(one["key"]))
            continue
        for value in _others(one):
            _take(cells, {**counts[0], one["key"]: written(one, value)}, found, pins=False)
    return found


def _take(
    cells: Cells, chosen: dict[str, str], found: Probed, *, pins: bool = True
) -> tuple[bool, frozenset[str]]:
    """Check one cell; return whether it can run, and its keys without effect."""
    number = len(found.names)
    found.names[number] = tuple(chosen.values())
    checked, idle = cells.filled(chosen)
    found.general += [one for one in checked.general if str(one) not in map(str, found.general)]
    problems = tuple(one for faulty in checked.faulty.values() for one in faulty.problems)
    if pins and checked.cells and not (problems or checked.general):
        problems = tuple(pin_inputs(checked.cells[0]))
    if problems:
        found.bad[number] = problems
    is_good = bool(checked.cells) and not (problems or checked.general)
    if is_good:
        (found.cells if pins else found.ends).append(checked.cells[0])
    return is_good, idle


def _combinations(space: Sequence[Dimension]) -> Iterator[dict[str, str]]:
    groups = [one for one in space if one["kind"] == "group"]
    texts = [[written(one, value) for value in one["values"]] for one in groups]
    keys = [one["key"] for one in groups]
    if math.prod(map(len, texts)) <= _MOST:
        yield from (dict(zip(keys, each, strict=True)) for each in itertools.product(*texts))
        return
    first = {key: some[0] for key, some in zip(keys, texts, strict=True)}
    yield first
    for key, some in zip(keys, texts, strict=True):
        yield from ({**first, key: text} for text in some[1:])


def _others(dimension: Dimension) -> list[str | float]:
    if dimension["kind"] == "group":
        return []  # all have been probed
    if dimension["values"]:
        return list(dimension["values"][1:])
    high = dimension["high"]
    assert high is not None, "a number has two ends"
    return [int(high) if dimension["kind"] == "int" else high]


def _idle_everywhere(key: str) -> ConfigError:
    return NoEffectError(
        "in any trial",
        where=bare(key),
        expected="a key that has an effect with at least one of the options",
        remedy=f"drop {key}",
    )


_LOSS = "val_loss"
_DIRECTIONS = {Direction.MIN: "minimize", Direction.MAX: "maximize"}
_MEASURED = frozenset({"train", "evaluate"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A validated search request.

    Attributes:
        root: its directory.
        launcher: the launcher of its jobs.
        settings: settings of the sweep.
        search: its part of the record, without trials.
        cells: builds the cells of its trials.
        probed: example cells, including the most demanding ones.
        notes: further notes for a reader.
    """

    root: Path
    launcher: Launcher
    settings: SweepConfig
    search: SearchRecord
    cells: Cells
    probed: tuple[Cell, ...]
    notes: tuple[str, ...]


def read_request(overrides: Sequence[str]) -> Request:
    """Read a command, and probe its whole space before anything is drawn.

    Raises:
        MensError: the command is invalid, or no point of its space can run.
        Problems: several of these.
    """
    mapping = "hydra.sweeper.params={"  # Hydra requires a + because the keys are new
    overrides = [f"+{text}" if text.startswith(mapping) else text for text in overrides]
    overrides = [*swept_by_config(overrides, OPTUNA), *overrides]
    space = read_space(overrides)
    Problems.raise_if(list(space.problems))
    if not space.dimensions:
        raise RequestError(
            "there is nothing to draw",
            where="hydra/sweeper",
            found="one value for every key",
            expected="a key with several: optim.lr=tag(log,interval(1e-5,1e-3)), lora.r=8,16",
        )
    cells = Cells(space=space.dimensions, fixed=space.fixed)
    probed = probe(cells)
    if probed.general or not probed.cells:
        refuse(probed.general, probed.bad, probed.names)
    first = probed.cells[0]
    settings = first.config.sweep
    launcher = launcher_of_cell(first)
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
    """Yield objectives that these runs do not measure, and invalid directions."""
    yield from objective_problems("hydra.sweeper.objectives", search.objectives, cells)
    for name in search.objectives:
        if name in KPIS and KPIS[name].direction is Direction.NONE and not search.directions:
            yield ConfigError(
                f"more {name} is neither better nor worse",
                where="hydra.sweeper.directions",
                expected="minimize or maximize, for each objective",
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
            "needs a direction for each objective",
            where="hydra.sweeper.directions",
            found=", ".join(search.directions),
            expected="minimize or maximize, for each objective, in their order",
        )


def objective_problems(
    where: str, names: Sequence[str], cells: Sequence[Cell], *, may_be_own: bool = False
) -> Iterator[ConfigError]:
    """Yield objectives that runs do not measure.

    Args:
        where: the setting that names them.
        names: KPIs.
        cells: the runs.
        may_be_own: accept user-defined metrics of a suite or a run, if they resemble no KPI.
    """
    if not names:
        yield ConfigError("there is none", where=where, expected="a KPI, such as [val_loss]")
    if len(set(names)) < len(names):
        yield ConfigError("names one twice", where=where, found=", ".join(names))
    for name in names:
        if name not in KPIS:
            if not may_be_own or misspelt(name):
                yield ConfigError(
                    "unknown KPI", where=where, found=name, expected=expected_name(name, KPIS)
                )
        elif _is_of_items(name) and not any(cell.config.suite.spec.scores for cell in cells):
            yield ConfigError(
                "is measured by a suite, but none is chosen",
                where=where,
                found=name,
                remedy="choose one with suite=…",
            )


def _is_of_items(name: str) -> bool:
    return bool(KPIS[name].field or KPIS[name].keys)


def _pruner_problems(search: OptunaSweeper, cells: Sequence[Cell]) -> Iterator[ConfigError]:
    """Yield reasons why trials cannot be pruned by validation loss."""
    if search.pruner is Pruner.none:
        return
    where, found = "hydra.sweeper.pruner", search.pruner.value
    if search.objectives != [_LOSS] or "maximize" in search.directions:
        yield ConfigError(
            "ends trials by their validation loss, which is not the objective",
            where=where,
            found=f"{found} with objectives {', '.join(search.objectives)}",
            expected=f"objectives=[{_LOSS}], minimized, or pruner=none",
        )
    if any(
        cell.config.task.name == "train" and cell.config.trainer.val_check_interval is None
        for cell in cells
    ):
        yield NoEffectError(
            "because nothing is validated before training ends",
            where=where,
            found=found,
            remedy="set trainer.val_check_interval, micro-batches between validations",
        )


def _idle_settings(search: OptunaSweeper, given: set[str]) -> Iterator[ConfigError]:
    """Yield settings without effect because of other settings."""
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
    """Yield a problem if tpe would sample at random because no result is available in time."""
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
    """Note points that cannot run, and concurrency that may exceed the machine.

    Raises:
        RequestError: even the low estimates of the concurrent trials exceed it.
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
