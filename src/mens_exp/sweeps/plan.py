"""Plan a sweep before its first job: check, estimate and compare cells, and check resources."""

from __future__ import annotations

import shlex
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import LeftOut, SweepDir, SweepRecord
from mens_exp.config.compose import config_digest
from mens_exp.config.fields import range_problems
from mens_exp.config.overrides import check
from mens_exp.config.sweep import (
    Invalid,
    LocalLauncher,
    PluginLauncher,
    SlurmLauncher,
    launcher_settings,
)
from mens_exp.corpus.source import rows_read_once
from mens_exp.errors import ConfigError, MensError, Problems, RequestError
from mens_exp.planning import machine
from mens_exp.planning.contract import contract_of
from mens_exp.planning.estimate import make_plan
from mens_exp.planning.forecast import for_all_on_a_machine
from mens_exp.planning.learned_settings import recorded_settings
from mens_exp.planning.messages import size
from mens_exp.planning.preflight import writable_cache
from mens_exp.sweeps.executors import executor_problems
from mens_exp.sweeps.process import (
    gpu_problems,
    gpus_per_job,
    jobs_at_a_time,
    nodes_of,
    processes_of,
)
from mens_exp.tasks.resolve_references import pin_inputs
from mens_exp.tasks.run import TRAINING, run_is_there

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.overrides import Cell, Checked, Faulty
    from mens_exp.config.sweep import Launcher, SweepConfig

_NOT_SHOWN = ("hydra.", "hydra/", "sweep.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """A cell that will run.

    Attributes:
        cell: the cell, composed, typed and resolved.
        directory: its directory, relative to the sweep's.
        differs: the overrides that distinguish it from the others.
        contract: digest of its contract; None for a task that does not train.
        estimate: seconds, and bytes of memory and disk over all its processes; null if unknown.
        notes: other cells that it represents, and overrides that it omits.
    """

    cell: Cell
    directory: str
    differs: tuple[str, ...]
    contract: str | None
    estimate: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSweep:
    """The jobs that a command with -m will run, and the cells it leaves out."""

    root: Path
    launcher: Launcher
    settings: SweepConfig
    jobs: tuple[PlannedJob, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]


def plan_sweep(overrides: Sequence[str]) -> PlannedSweep:
    """Compose, check, resolve, compare and estimate every cell of a sweep.

    Raises:
        MensError: the command is invalid, a cell is invalid where none may be, or nothing is left
            to run.
        Problems: several of these.
    """
    return plan_cells(check(overrides, multirun=True))


@rows_read_once()
def plan_cells(
    checked: Checked, *, is_new: bool = True, example: Cell | None = None
) -> PlannedSweep:
    """Plan the cells of a checked command; see :func:`plan_sweep`.

    Args:
        checked: the cells and their problems.
        is_new: whether their directories have to be empty.
        example: the command without swept values, if a plugin's sweeper has chosen the cells;
            with sweep.invalid=skip, all cells may then be left out.

    Raises:
        MensError: as for :func:`plan_sweep`.
        Problems: as for :func:`plan_sweep`.
    """
    bad = {number: one.problems for number, one in checked.faulty.items()}
    for cell in checked.cells:
        if not checked.general and (found := pin_inputs(cell)):
            bad[cell.number] = (*bad.get(cell.number, ()), *found)
    names = _names(checked.cells, checked.faulty)
    if checked.general or not (checked.cells or example):
        refuse(checked.general, bad, names)
    first = example or checked.cells[0]
    settings = first.config.sweep
    launcher = launcher_of_cell(first)
    root = Path(str(first.composed.sweep_root))
    general: list[MensError] = [
        *range_problems(launcher, "hydra.launcher."),
        *range_problems(settings, "sweep."),
    ]
    if not general:
        general += executor_problems(launcher, 1 + max(names))
    general += place_problems(root, checked.cells) if is_new else []
    general += [] if example else _sweeper_problems(first)
    good = [cell for cell in checked.cells if cell.number not in bad]
    if general or not (good or example) or (bad and settings.invalid is Invalid.error):
        refuse(general, bad, names)
    jobs, same = _collapsed(good, names)
    Problems.raise_if(device_problems([job.cell for job in jobs], launcher, len(jobs)))
    invalid = [
        LeftOut(
            number=number,
            differs=list(names[number]),
            why="; ".join(str(problem) for problem in bad[number]),
            same_as=None,
        )
        for number in sorted(bad)
    ]
    return PlannedSweep(
        root=root,
        launcher=launcher,
        settings=settings,
        jobs=tuple(jobs),
        left_out=tuple(sorted([*invalid, *same], key=lambda one: one["number"])),
        notes=tuple(machine_notes(jobs, launcher, root)),
    )


def launcher_of_cell(cell: Cell) -> Launcher:
    """Return the settings of a cell's launcher; on Slurm, `nodes` is the number of its machines."""
    launcher = launcher_settings(cell.composed.launcher, str(cell.composed.launcher_option))
    if isinstance(launcher, SlurmLauncher) and launcher.nodes is None:
        launcher.nodes = nodes_of(cell.config)
    return launcher


def refuse(
    general: Sequence[MensError],
    bad: dict[int, tuple[MensError, ...]],
    names: dict[int, tuple[str, ...]],
) -> None:
    """Raise every problem once, and name the faulty cells if others are valid."""
    problems = [*general, *(problem for number in sorted(bad) for problem in bad[number])]
    unique = list({str(problem): problem for problem in problems}.values())
    if bad and len(bad) < len(names):
        listed = "; ".join(f"{number} ({', '.join(names[number])})" for number in sorted(bad))
        unique.append(
            RequestError(
                f"{len(bad)} of {len(names)} cells cannot run, so none was started",
                where="sweep.invalid",
                found=listed,
                remedy="correct them, or run the others with sweep.invalid=skip",
            )
        )
    Problems.raise_if(unique)


def _names(cells: Sequence[Cell], faulty: dict[int, Faulty]) -> dict[int, tuple[str, ...]]:
    """Return the distinguishing overrides of each cell, without those that all share."""
    given = {cell.number: (*cell.composed.overrides, *cell.dropped) for cell in cells}
    given |= {number: one.overrides for number, one in faulty.items()}
    shared = Counter(text for texts in given.values() for text in set(texts))
    return {
        number: tuple(
            text
            for text in given[number]
            if (shared[text] < len(given) or len(given) == 1) and not text.startswith(_NOT_SHOWN)
        )
        for number in sorted(given)
    }


def _sweeper_problems(cell: Cell) -> list[ConfigError]:
    """Refuse other sweepers, and Hydra settings that would change the cells."""
    node = cell.composed.sweeper
    if node.get("name") == "basic" and node.get("max_batch_size") is None:
        return []
    return [
        ConfigError(
            "is not read: the cells come from the command line, in its order",
            where="hydra.sweeper",
            found=", ".join(f"{key}={value}" for key, value in node.items() if key != "_target_"),
            expected="the basic sweeper as it is",
            remedy="write the values to sweep into the command, key=a,b",
        )
    ]


def _again(root: Path) -> str:
    """Return the command that continues a sweep: the original one if it conducts a study."""
    with suppress(MensError):  # the record is damaged; resuming reports the damage
        record = SweepRecord.read(SweepDir(root).record)
        if record.study is not None:
            return shlex.join(["python", "-m", "mens_exp", *record.command])
    return f"sweep.resume={root}"


def place_problems(root: Path, cells: Sequence[Cell]) -> list[MensError]:
    """Refuse directories that are not empty, or that two cells would share."""
    if SweepDir(root).record.exists():
        return [
            RequestError(
                "a sweep already exists here",
                where=str(root),
                remedy=f"continue it with {_again(root)}, or choose another hydra.sweep.dir",
            )
        ]
    places = Counter(directory_of(cell) for cell in cells)
    shared = [place for place, many in places.items() if many > 1]
    if shared:
        return [
            ConfigError(
                "names one directory for several jobs",
                where="hydra.sweep.subdir",
                found=shared[0],
                expected="a directory for each, such as ${hydra.job.num}",
            )
        ]
    used = [root / place for place in places if RunDir(root / place).manifest.exists()]
    return [run_is_there(place) for place in used]


def directory_of(cell: Cell) -> str:
    """Return the directory of a cell, relative to the sweep's directory."""
    composed = cell.composed
    inside = Path(str(composed.sweep_dir)).relative_to(Path(str(composed.sweep_root)))
    return PurePosixPath(inside).as_posix()


def _collapsed(
    cells: Sequence[Cell], names: dict[int, tuple[str, ...]]
) -> tuple[list[PlannedJob], list[LeftOut]]:
    """Keep one of several equivalent cells, and estimate those that are kept."""
    groups: dict[str, list[Cell]] = {}
    contracts: dict[int, str | None] = {}
    for cell in cells:
        trains = cell.config.task.name in TRAINING
        contracts[cell.number] = contract_of(cell.config).digest if trains else None
        groups.setdefault(meaning(cell, contracts[cell.number]), []).append(cell)
    jobs, same = [], []
    for kept, *others in groups.values():
        notes = []
        if kept.dropped:
            notes.append(f"{', '.join(kept.dropped)}: no effect in this cell, left out")
        for other in others:
            why = f"the same as cell {kept.number}: {_why_same(kept, other)}"
            name = names[other.number]
            same.append(
                LeftOut(number=other.number, differs=list(name), why=why, same_as=kept.number)
            )
            notes.append(f"also represents cell {other.number} ({', '.join(name)})")
        jobs.append(
            PlannedJob(
                cell=kept,
                directory=directory_of(kept),
                differs=names[kept.number],
                contract=contracts[kept.number],
                estimate=estimate_of(kept),
                notes=tuple(notes),
            )
        )
    return jobs, same


def meaning(cell: Cell, contract: str | None) -> str:
    """Hash the effect of a cell: its training contract, and its other actions and outputs."""
    if contract is None:
        return config_digest(cell.composed.values)
    return digest({"contract": contract, "beside": recorded_settings(cell.config)})


def _why_same(kept: Cell, other: Cell) -> str:
    idle = sorted({text.partition("=")[0] for text in (*kept.dropped, *other.dropped)})
    if idle:
        return f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect there"
    return "the same contract, and nothing else differs"


def estimate_of(cell: Cell) -> dict[str, Any]:
    """Return a job's resource estimate from its plan; a task that does not train has none."""
    if cell.config.task.name != "train":
        return {"time_s": None, "memory_bytes": None, "disk_bytes": None}
    plan = make_plan(cell.config, writable_cache())
    kind, memory = plan["device"]["kind"], plan["memory_bytes"]
    return {
        "time_s": plan["time_s"]["estimate"],
        "memory_bytes": for_all_on_a_machine(cell.config, memory["estimate"], kind),
        "memory_low_bytes": for_all_on_a_machine(cell.config, memory["low"], kind),
        "disk_bytes": plan["disk_bytes"]["in_run"],
        "device": kind,
        "free_bytes": memory["free"],
    }


_GIB = 2**30


def device_problems(cells: Sequence[Cell], launcher: Launcher, many: int) -> list[MensError]:
    """List reasons why the processes of jobs would not each have a GPU, or a core.

    Args:
        cells: cells of the jobs.
        launcher: its settings.
        many: the number of jobs, an upper bound on concurrency.
    """
    if isinstance(launcher, SlurmLauncher):
        return list(_slurm_problems(cells, launcher))
    if isinstance(launcher, PluginLauncher):  # the plugin assigns devices to jobs
        return []
    return gpu_problems(machine.gpu_ids(), gpus_per_job(cells), min(many, jobs_at_a_time(launcher)))


def _slurm_problems(cells: Sequence[Cell], launcher: SlurmLauncher) -> Iterator[MensError]:
    """Yield resources that each process of a job needs but the Slurm settings do not request."""
    nodes = sorted({nodes_of(cell.config) for cell in cells} | {launcher.nodes or 0} - {0})
    if len(nodes) > 1:
        yield ConfigError(
            "all jobs of a sweep on Slurm have the same number of nodes",
            where="hydra.launcher.nodes",
            found=", ".join(map(str, nodes)),
            expected="one number for trainer.num_nodes and hydra.launcher.nodes; 1 for a task that "
            "does not train",
            remedy="give hydra.launcher.nodes alone, or start a sweep for each number of nodes",
        )
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
    """Note resources that the concurrent jobs may exceed together although each job fits alone.

    Args:
        jobs: the jobs that will run.
        launcher: its settings.
        root: the directory of the sweep.

    Raises:
        RequestError: even the low estimates of the concurrent jobs exceed the machine.
    """
    notes = _asked_for(jobs, launcher) if isinstance(launcher, SlurmLauncher) else []
    if isinstance(launcher, LocalLauncher):  # other jobs run on other machines, or may do so
        notes += _memory_notes(jobs, jobs_at_a_time(launcher))
        notes += _core_notes(jobs, jobs_at_a_time(launcher))
    needed = sum(job.estimate["disk_bytes"] or 0 for job in jobs)
    place, space = machine.space(root)
    if needed > space:
        notes.append(f"all jobs together write {size(needed)}; {place} has {size(space)} free")
    return notes


def _asked_for(jobs: Sequence[PlannedJob], launcher: SlurmLauncher) -> list[str]:
    """Compare the estimates of jobs with the resources requested from Slurm."""
    lows = [job.estimate.get("memory_low_bytes") for job in jobs if _on_cpu(job)]
    low = max((one for one in lows if one is not None), default=None)
    given = None if launcher.mem_gb is None else launcher.mem_gb * _GIB
    if low is not None and given is not None and low > given:
        raise RequestError(
            "a job needs more memory than the sweep requests from Slurm",
            where="hydra.launcher.mem_gb",
            found=f"{launcher.mem_gb:g}, and a job takes {size(low)} at least",
            remedy="ask for more, or make the jobs smaller",
        )
    times = [job.estimate["time_s"] for job in jobs if job.estimate["time_s"] is not None]
    if times and max(times) > 60 * launcher.timeout_min:
        many = launcher.max_num_timeout
        limit = f"hydra.launcher.timeout_min={launcher.timeout_min}"
        then = f"it then continues from its last checkpoint, {many} times at most"
        return [f"a job is expected to take longer than {limit}; {then}"]
    return []


def _on_cpu(job: PlannedJob) -> bool:
    return bool(job.estimate.get("device") == "cpu")


def _memory_notes(jobs: Sequence[PlannedJob], n_jobs: int) -> list[str]:
    """Note if concurrent jobs may need more memory than is free.

    Raises:
        RequestError: even their low estimates exceed it.
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
            "that many concurrent jobs need more memory than is free",
            where="hydra.launcher.n_jobs",
            found=f"{n_jobs}, {size(low)} at least",
            expected=f"at most {size(free)}",
            remedy="choose fewer jobs at a time",
        )
    if free is not None and likely > free:
        notes.append(f"{n_jobs} jobs at a time may need {size(likely)} of {size(free)} free memory")
    return notes


def _core_notes(jobs: Sequence[PlannedJob], n_jobs: int) -> list[str]:
    """Note if concurrent jobs have more processes than cores, which then take turns."""
    processes = sorted((processes_of(job.cell.config) for job in jobs), reverse=True)
    together, cores = sum(processes[:n_jobs]), machine.cores()
    if max(processes, default=1) == 1 or together <= cores:
        return []
    here = f"{cores} core{'' if cores == 1 else 's'}"
    return [f"{together} processes at a time share {here}: those of a job will wait for each other"]
