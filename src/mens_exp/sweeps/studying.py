"""study=<name>: plan, register, run and compare a study that a file describes.

The file is the whole request: its settings are registered in a ledger of decisions before the first
run, as a cycle. The same command continues a study that was interrupted, and refuses one whose file
has been edited since. Its runs are a sweep, whose record keeps the study.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mens_exp.artifacts.comparison import Comparison, Verdict
from mens_exp.artifacts.decision_ledger import CycleEntry, cycles_of, read_ledger
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState, StudyRecord, SweepDir, SweepRecord
from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.compose import study_in, to_yaml
from mens_exp.config.fields import plain, range_problems, shown
from mens_exp.config.override_values import override_of
from mens_exp.config.overrides import Checked, check, parsed_override
from mens_exp.config.promotion import BurnProductionPolicy, Stopping, StudyConfig
from mens_exp.config.rules.task import study_problems
from mens_exp.errors import ConfigError, MensError, Problems, RequestError
from mens_exp.evals.arms import Trial, arms_of
from mens_exp.evals.promotion_rules import thresholds
from mens_exp.evals.study import conducted
from mens_exp.planning.contract import contract_of
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import terminal_views
from mens_exp.report.comparison_view import hypothesis_lines, verdict_table
from mens_exp.sweeps.launcher import Launcher, locked, writing
from mens_exp.sweeps.multirun import PLACE, finish, freeze, job_record, new_record
from mens_exp.sweeps.plan import place_problems, plan_cells
from mens_exp.sweeps.resume import reopened
from mens_exp.tasks.promote import open_cycle
from mens_exp.tasks.run import perform
from mens_exp.tasks.study_runs import leaves_of, read_study

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.artifacts.decision_ledger import LedgerEntry
    from mens_exp.artifacts.sweep import SweepJob
    from mens_exp.config.overrides import Cell
    from mens_exp.evals.arms import Arm
    from mens_exp.sweeps.plan import PlannedSweep

_MAY_BE_GIVEN = (
    *("hydra/launcher", "hydra.launcher.", "hydra.sweep.dir", "sweep.retries", "sweep.changes"),
    *("ledger", "study", "task"),
)
_HOUR_S = 3600.0
_DECIDED = frozenset({Verdict.BETTER, Verdict.WORSE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A command that conducts a study.

    Attributes:
        name: the name of the study.
        study: its settings.
        root: its directory.
        ledger: the ledger that registers it.
        given: overrides of sweep and launcher.
        asked: a cell with these overrides.
        only_plans: whether nothing is to be run.
    """

    name: str
    study: StudyConfig
    root: Path
    ledger: Path
    given: tuple[str, ...]
    asked: Cell
    only_plans: bool

    @property
    def sha256(self) -> str:
        """The digest of the settings, which is registered."""
        return digest(settings_of(self.study, only_changed=True))


def settings_of(study: StudyConfig, *, only_changed: bool = False) -> dict[str, Any]:
    """Return the settings of a study as plain JSON values.

    Args:
        study: the study.
        only_changed: leave out defaults, so that a later setting does not change the digest.
    """
    usual = dataclasses.asdict(StudyConfig())
    values: dict[str, Any] = dataclasses.asdict(study)
    kept = {name: value for name, value in values.items() if value != usual[name]}
    return {name: plain(value) for name, value in (kept if only_changed else values).items()}


def conduct(overrides: Sequence[str]) -> int:
    """Plan, register, run and compare a study, or continue it.

    Args:
        overrides: the command's, as typed.

    Returns:
        The exit code: 0 when all runs that the study asks for have succeeded.

    Raises:
        MensError: nothing was started.
    """
    request = requested(overrides)
    directory = SweepDir(request.root)
    if directory.record.is_file() and not request.only_plans:
        return _continue(request, directory)
    planned, arms = _planned(request)
    cells = [job.cell for job in planned.jobs]
    console = Console(stderr=True)
    record = new_record(planned, overrides, cells)
    record.jobs = [job_record(job) for job in planned.jobs]
    console.print(terminal_views.planned_table(record), soft_wrap=True)
    _refuse_over_budget(request.study, record.jobs)
    if request.only_plans:
        return 0
    cycle = _cycle(request, arms, cells)
    with locked(directory, PLACE):
        Problems.raise_if(place_problems(planned.root, cells))  # another launcher was faster
        record.study = _study_record(request, cycle)
        record.study["later"], record.jobs = record.jobs, []
        with writing(PLACE):
            for job in planned.jobs:
                freeze(job, directory.path / job.directory, record.code_sha256)
            record.write(directory.record)
        return _run(request, directory, record, console, cycle)


def _continue(request: Request, directory: SweepDir) -> int:
    """Continue a study whose runs are frozen on disk."""
    _refuse_edited(request, SweepRecord.read(directory.record))
    with locked(directory, PLACE):
        console = Console(stderr=True)
        keys = {text.partition("=")[0] for text in request.given}
        record = reopened(directory, request.asked, keys, console)
        study, cycle = record.study, None
        assert study is not None, "a sweep that conducts a study"
        if study["entry"] is None:  # the launcher was killed before it was registered
            planned, arms = _planned(request, is_new=False)
            cycle = _cycle(request, arms, [job.cell for job in planned.jobs])
        return _run(request, directory, record, console, cycle)


def _run(
    request: Request,
    directory: SweepDir,
    record: SweepRecord,
    console: Console,
    cycle: CycleEntry | None,
) -> int:
    study = record.study
    assert study is not None, "a sweep that conducts a study"
    if cycle is not None:
        entry = _registered(Path(study["ledger"]), cycle)
        study["entry"], study["entry_sha256"] = entry["number"], entry["sha256"]
        study["registered_utc"] = entry["utc"]
        with writing(PLACE):
            record.write(directory.record)
    where = f"entry {study['entry']} of {study['ledger']}, {study['entry_sha256']}"
    console.print(f"Registered by {where}.", soft_wrap=True, markup=False)
    feed = Seeds(request.study, directory, record, console)
    return finish(
        Launcher(directory, record, console, feed),
        conclude=lambda: _conclude(request, directory, record),
        again=record.command,
    )


class Seeds:
    """The launcher's feed: starts the runs of a study seed by seed, until its rule says stop."""

    def __init__(
        self, study: StudyConfig, directory: SweepDir, record: SweepRecord, console: Console
    ) -> None:
        """Use a study whose lock the caller holds."""
        assert record.study is not None, "a sweep that conducts a study"
        self._study, self._state = study, record.study
        self._directory, self._record, self._console = directory, record, console
        self._arms = _arm_count(study)

    def supply(self) -> bool:
        """Add the next run, unless the study has stopped or waits for the seed before."""
        if not self._state["later"] or self._state["stopped"] is not None:
            return False
        begins_seed = len(self._record.jobs) % self._arms == 0
        if begins_seed and not self._may_begin():
            return False
        self._record.jobs.append(self._state["later"].pop(0))
        return True

    def watch(self, job: SweepJob) -> str | None:
        """Let every run go on."""
        del job
        return None

    def settle(self, job: SweepJob) -> None:
        """Do nothing: :meth:`supply` looks at whole seeds."""

    def _may_begin(self) -> bool:
        """Return whether another seed begins; record the reason if the study has ended."""
        jobs, hours = self._record.jobs, self._study.budget.hours
        spent = sum(job["results"].get("wall_s") or 0.0 for job in jobs) / _HOUR_S
        if hours is not None and spent >= hours:
            self._state["stopped"] = f"the budget of {hours:g} hours is spent: {spent:.2f}"
            return False
        if self._study.stopping is Stopping.all_seeds or not jobs:
            return True
        if any(job["state"] != JobState.SUCCEEDED for job in jobs):
            return False  # a seed with a missing arm says nothing; the same command runs it again
        return not self._is_decided()

    def _is_decided(self) -> bool:
        """Look at the finished seeds; return whether every arm has a verdict."""
        done = len(self._record.jobs) // self._arms
        paths = [str(self._directory.path / job["directory"]) for job in self._record.jobs]
        try:
            factors = self._state["factors"]
            made = conducted(paths, read_study(paths).runs, factors, self._study.compared(factors))
        except MensError as error:
            self._console.print(f"{done} seeds are not compared yet: {error}", soft_wrap=True)
            return False
        verdicts = {one["arm"]: one["kpis"][made.primary]["verdict"] for one in made.contrasts}
        told = "; ".join(f"{arm}: {verdict}" for arm, verdict in verdicts.items())
        self._console.print(f"After {done} seeds: {told}", soft_wrap=True, markup=False)
        if not set(verdicts.values()) <= _DECIDED:
            return False
        self._state["stopped"] = f"every arm has a verdict after {done} seeds"
        return True


def requested(overrides: Sequence[str]) -> Request:
    """Read the study that a command names, and the overrides that may stand beside it.

    Raises:
        MensError: the study is not there or invalid, or an override belongs into its file.
        Problems: several of these.
    """
    given: dict[str, list[str]] = {}
    for text in overrides:
        given.setdefault(text.lstrip("+~").partition("=")[0], []).append(text)
    named = str(_value(given["study"][-1]))
    Problems.raise_if([_not_beside(key) for key in given if not key.startswith(_MAY_BE_GIVEN)])
    task = str(_value(given["task"][-1])) if "task" in given else "train"
    if task not in {"train", "plan"}:
        raise ConfigError(
            "a study trains and compares", where="task", found=task, remedy="drop it, or task=plan"
        )
    ours = [texts[-1] for key, texts in given.items() if key not in {"study", "ledger", "task"}]
    path = Path(named).expanduser() if named.endswith((".yaml", ".yml")) else None
    chosen = [] if path is not None else [f"study={named}"]
    checked = check([*chosen, *ours], multirun=True)
    Problems.raise_if(checked.problems)
    asked = checked.cells[0]
    name = named
    if path is not None:
        asked.config.study = study_in(path)
        found = [*range_problems(asked.config.study, "study."), *study_problems(asked.config)]
        Problems.raise_if(found)
        name = path.absolute().parent.name if path.stem == "study" else path.stem
    assert isinstance(asked.config.study, StudyConfig), "the command names it"
    has_place = "hydra.sweep.dir" in given
    root = Path(str(asked.composed.sweep_root)) if has_place else Path("outputs") / "study" / name
    ledger = _value(given["ledger"][-1]) if "ledger" in given else root / "ledger.jsonl"
    return Request(
        name=name,
        study=asked.config.study,
        root=root,
        ledger=Path(str(ledger)).expanduser(),
        given=tuple(ours),
        asked=asked,
        only_plans=task == "plan",
    )


def _value(text: str) -> Any:
    problems: list[MensError] = []
    override = parsed_override(text, problems)
    Problems.raise_if(problems)
    assert override is not None, "it has no problem"
    return override.value()


def _not_beside(key: str) -> ConfigError:
    return ConfigError(
        "is decided by the study's file",
        where=key,
        expected="hydra/launcher, hydra.launcher.…, hydra.sweep.dir, sweep.retries, "
        "sweep.changes, ledger or task=plan beside study=…",
        remedy=f"write {key} into a study of your own, ./conf/study/<name>.yaml, under shared",
    )


def _planned(request: Request, *, is_new: bool = True) -> tuple[PlannedSweep, list[Arm]]:
    """Plan every run, seed by seed, and name the arms as the comparison will.

    Raises:
        MensError: a run cannot be made, or two arms are the same.
        Problems: several of these.
    """
    study, place = request.study, override_of(PLACE, str(request.root))
    here = [text for text in request.given if not text.startswith(PLACE)]
    checks: list[Checked] = []
    for seed in study.seeds:
        for arm in _arms(study):
            texts = [*study.shared, *arm, f"seed={seed}", *here, place]
            checks.append(check(texts, multirun=True, first=len(checks)))
    problems = [one for each in checks for one in each.problems]
    unique = tuple({str(one): one for one in problems}.values())
    Problems.raise_if(unique)
    cells = tuple(cell for each in checks for cell in each.cells)
    planned = plan_cells(Checked(cells=cells, problems=(), general=()), is_new=is_new)
    if planned.left_out:
        one = planned.left_out[0]
        raise RequestError(
            "two arms of the study are the same",
            where="study",
            found=f"{' '.join(one['differs'])}: {one['why']}",
            expected="arms that differ in what is trained",
        )
    arms = arms_of([_trial(cell) for cell in cells], factors_of(study))
    if len(arms) != _arm_count(study):
        raise RequestError(
            "the arms do not differ in what is trained",
            where="study",
            found=", ".join(arm.name for arm in arms),
            expected=f"{_arm_count(study)} arms",
        )
    return planned, arms


def _arms(study: StudyConfig) -> list[list[str]]:
    """Return the overrides of each arm."""
    if study.arms:
        return [list(texts) for texts in study.arms.values()]
    values = ([f"{key}={_text(one)}" for one in some] for key, some in study.grid.items())
    return [list(combination) for combination in itertools.product(*values)]


def _arm_count(study: StudyConfig) -> int:
    return len(_arms(study))


def _text(value: Any) -> str:
    """Write a value of YAML as an override has it."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, str):
        return override_of("", value).partition("=")[2]
    return shown(value)


def factors_of(study: StudyConfig) -> list[str]:
    """Return the settings and groups whose values the arms vary."""
    pairs = [dict(text.lstrip("+~").partition("=")[::2] for text in arm) for arm in _arms(study)]
    keys = dict.fromkeys(key for one in pairs for key in one)
    return [key for key in keys if len({one.get(key) for one in pairs}) > 1]


def _trial(cell: Cell) -> Trial:
    """Describe a planned run as a comparison will find it."""
    text = to_yaml(cell.composed.values)
    manifest = Manifest(
        run_id=str(cell.number),
        task="train",
        started_utc="",
        config_digest="",
        seed=cell.config.seed,
        overrides=list(cell.composed.overrides),
        choices=cell.composed.choices,
        contract=contract_of(cell.config).record(),
    )
    return Trial(manifest=manifest, settings=dict(leaves_of(parse_yaml(text, "a run"))), hashes={})


def _refuse_over_budget(study: StudyConfig, jobs: Sequence[SweepJob]) -> None:
    """Refuse a study that is expected to cost more than its budget.

    Raises:
        RequestError: there are more runs, or they are expected to take longer.
        Problems: both.
    """
    budget, problems = study.budget, []
    if budget.runs is not None and len(jobs) > budget.runs:
        found = f"{_arm_count(study)} arms with {len(study.seeds)} seeds: {len(jobs)} runs"
        problems.append(_over("runs", found, f"at most {budget.runs}"))
    times = [job["estimate"].get("time_s") for job in jobs]
    known = sum(one for one in times if one is not None) / _HOUR_S
    if budget.hours is not None and known > budget.hours:
        found = f"about {known:.2f} hours for {len(jobs)} runs"
        problems.append(_over("hours", found, f"at most {budget.hours:g}"))
    Problems.raise_if(problems)


def _over(name: str, found: str, expected: str) -> RequestError:
    return RequestError(
        "the study costs more than its budget",
        where=f"study.budget.{name}",
        found=found,
        expected=expected,
        remedy=f"take fewer seeds or arms, or raise study.budget.{name}",
    )


def _cycle(request: Request, arms: Sequence[Arm], cells: Sequence[Cell]) -> CycleEntry:
    """Return the ledger's form of a study: everything that decides on it.

    Raises:
        RequestError: the arms would be scored by different suites.
    """
    study = request.study
    compared = study.compared(factors_of(study))
    return {
        "cycle": request.name,
        "suite_digest": _suite_digest(cells[: len(arms)]),
        "seeds": list(study.seeds),
        "arms": [arm.name for arm in arms],
        "factor": ",".join(factors_of(study)),
        "kpi": study.primary,
        "direction": study.direction.value,
        "margin": study.margin,
        "frozen": {
            "alpha": study.alpha,
            "test": study.test.value,
            "condition": compared.condition,
            "target": study.target.value,
            "sequential": compared.sequential.value,
            **thresholds(BurnProductionPolicy()),
        },
        "study": {
            "sha256": request.sha256,
            "hypothesis": study.hypothesis,
            "stopping": study.stopping.value,
        },
    }


def _suite_digest(cells: Sequence[Cell]) -> str | None:
    """Return the digest of the suite that scores every arm; None if none does."""
    if not any(cell.config.suite.spec.scores for cell in cells):
        return None
    from mens_exp.tasks.scoring import planned_suite_digest

    found = {planned_suite_digest(cell.config, writable_cache()) for cell in cells}
    if len(found) > 1:
        raise RequestError(
            "the arms are scored by different suites, so that nothing compares them",
            where="study",
            found=", ".join(sorted(str(one)[:12] for one in found)),
            expected="one suite, over the same items",
        )
    return found.pop()


def _registered(ledger: Path, cycle: CycleEntry) -> LedgerEntry:
    """Register a study, unless it is already; return its entry.

    Raises:
        RequestError: another study of this name is registered there.
    """
    entries = read_ledger(ledger)
    known = cycles_of(entries).get(cycle["cycle"])
    if known is None:
        return open_cycle(ledger, cycle, "study.")
    if known[1] != cycle:
        raise RequestError(
            "another study of this name is registered",
            where="ledger",
            found=str(ledger),
            expected="the settings that were registered, or another name",
            remedy=f"rename the file of study {cycle['cycle']}",
        )
    return next(one for one in entries if one["cycle"] == known[1])


def _study_record(request: Request, cycle: CycleEntry) -> StudyRecord:
    return StudyRecord(
        name=request.name,
        sha256=request.sha256,
        settings=settings_of(request.study),
        factors=cycle["factor"].split(","),
        ledger=str(request.ledger),
        entry=None,
        entry_sha256=None,
        registered_utc=None,
        later=[],
        stopped=None,
        comparison=None,
    )


def _refuse_edited(request: Request, record: SweepRecord) -> None:
    """Refuse a study that was edited since its runs were frozen.

    Raises:
        RequestError: the directory holds another sweep, or the file differs from what was
            registered.
    """
    study = record.study
    if study is None:
        raise RequestError(
            "a sweep is there already, which conducts no study",
            where=PLACE,
            found=str(request.root),
            remedy="choose another hydra.sweep.dir",
        )
    entry = cycles_of(read_ledger(Path(study["ledger"]))).get(study["name"])
    registered = study["sha256"] if entry is None else entry[1].get("study", {}).get("sha256")
    if request.sha256 == registered == study["sha256"]:
        return
    raise RequestError(
        "the study was edited after it was registered",
        where=f"study={request.name}",
        found="; ".join(_edits(study["settings"], settings_of(request.study))) or request.sha256,
        expected=f"the settings of {registered}, registered at {study['registered_utc']}",
        remedy="put the file back, or register the new study under another name",
    )


def _edits(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name} was {shown(before.get(name))} and is {shown(after.get(name))}"


def _conclude(request: Request, directory: SweepDir, record: SweepRecord) -> None:
    """Compare what has run, record the comparison, and show verdicts and hypothesis."""
    study = record.study
    assert study is not None, "a sweep that conducts a study"
    done = [job for job in record.jobs if job["state"] == JobState.SUCCEEDED]
    if not done or study["entry"] is None:
        return
    console = Console()
    try:
        place = _compared(request, directory, study, done)
        made = Comparison.read(place.comparison)
    except MensError as error:
        console.print(f"Not compared: {error}", soft_wrap=True, markup=False)
        return
    study["comparison"] = place.path.name
    record.write(directory.record)
    console.print(verdict_table(made))
    for line in hypothesis_lines(made, study["settings"]):
        console.print(line, soft_wrap=True, markup=False)


def _compared(
    request: Request, directory: SweepDir, study: StudyRecord, done: Sequence[SweepJob]
) -> RunDir:
    """Run task=compare over the finished runs, unless it has been; return its directory."""
    paths = [directory.path.absolute() / job["directory"] for job in done]
    if study["comparison"] is not None:
        before = RunDir(directory.path / study["comparison"])
        if before.comparison.is_file():
            runs = Comparison.read(before.comparison).runs
            known = {(Path(run["path"]), run["manifest_sha256"]) for run in runs}
            if known == {(path, sha256_file(RunDir(path).manifest)) for path in paths}:
                return before
    settings = request.study.compared(study["factors"])
    texts = ["task=compare", "logger=none", override_of("ledger", study["ledger"])]
    texts += [override_of("path", ",".join(map(str, paths)))]
    texts += [f"compare.factors=[{','.join(settings.factors)}]"]
    texts += [override_of("compare.primary", str(settings.primary))]
    if settings.reference is not None:
        texts.append(override_of("compare.reference", settings.reference))
    for name in ("alpha", "test", "target", "sequential"):
        texts.append(f"compare.{name}={shown(plain(getattr(settings, name)))}")
    checked = check(texts)
    Problems.raise_if(checked.problems)
    number = 1 + len(list(directory.path.glob("comparison_*")))
    place = RunDir(directory.path / f"comparison_{number}")
    perform(place.path, checked.cells[0], prints=False)
    return place
