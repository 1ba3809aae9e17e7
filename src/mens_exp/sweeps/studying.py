"""study=<name>: plan, register, run and compare a study that a file describes.

The file is the whole request: its settings are registered as a cycle in a decision ledger before
the first run. The same command continues an interrupted study, and refuses a study whose file has
been edited since. The runs form a sweep, whose record contains the study.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.comparison import Comparison, Verdict
from mens_exp.artifacts.decision_ledger import CycleEntry, cycles_of, read_ledger
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState, StudyRecord, SweepDir, SweepRecord
from mens_exp.config.fields import plain, shown
from mens_exp.config.override_values import override_of
from mens_exp.config.overrides import check
from mens_exp.config.promotion import CompareConfig, Stopping, StudyConfig
from mens_exp.errors import MensError, Problems, RequestError
from mens_exp.evals.study import conducted
from mens_exp.report import comparison_view, sweep_view, terminal, wording
from mens_exp.report.document import Step
from mens_exp.sweeps.launcher import Launcher, locked, writing
from mens_exp.sweeps.multirun import PLACE, finish, freeze, job_record, new_record
from mens_exp.sweeps.plan import place_problems
from mens_exp.sweeps.resume import reopened
from mens_exp.sweeps.study_request import (
    HOUR_S,
    arm_count,
    cycle_for,
    planned_runs,
    refuse_over_budget,
    requested,
    settings_of,
)
from mens_exp.tasks.promote import open_cycle
from mens_exp.tasks.run import perform
from mens_exp.tasks.study_runs import read_study

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from mens_exp.artifacts.decision_ledger import LedgerEntry
    from mens_exp.artifacts.sweep import SweepJob
    from mens_exp.sweeps.study_request import Request

_DECIDED = frozenset({Verdict.BETTER, Verdict.WORSE})


def conduct(overrides: Sequence[str]) -> int:
    """Plan, register, run and compare a study, or continue it.

    Args:
        overrides: the command's, as typed.

    Returns:
        The exit code: 0 if all runs that the study requires have succeeded.

    Raises:
        MensError: nothing was started.
    """
    request = requested(overrides)
    directory = SweepDir(request.root)
    if directory.record.is_file() and not request.only_plans:
        return _continue(request, directory)
    planned, arms = planned_runs(request)
    cells = [job.cell for job in planned.jobs]
    console = terminal.console(stderr=True)
    record = new_record(planned, overrides, cells)
    record.jobs = [job_record(job) for job in planned.jobs]
    terminal.show(*sweep_view.planned_parts(record), on=console)
    terminal.show(*comparison_view.registered(request.study, arms[0].name), on=console)
    refuse_over_budget(request.study, record.jobs)
    if request.only_plans:
        step = Step(wording.command(*_without_plan(overrides)), "register the study and run it")
        terminal.say_next([step], on=console)
        return 0
    cycle = cycle_for(request, arms, cells)
    with locked(directory, PLACE):
        Problems.raise_if(place_problems(planned.root, cells))  # another launcher was faster
        record.study = _study_record(request, cycle)
        record.study["later"], record.jobs = record.jobs, []
        with writing(PLACE):
            for job in planned.jobs:
                freeze(job, directory.path / job.directory, record.code_sha256)
            record.write(directory.record)
        return _run(request, directory, record, console, cycle)


def _without_plan(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if text.lstrip("+") != "task=plan"]


def _continue(request: Request, directory: SweepDir) -> int:
    """Continue a study whose runs are frozen on disk."""
    _refuse_edited(request, SweepRecord.read(directory.record))
    with locked(directory, PLACE):
        console = terminal.console(stderr=True)
        keys = {text.partition("=")[0] for text in request.given}
        record = reopened(directory, request.asked, keys, console)
        study, cycle = record.study, None
        assert study is not None, "a sweep that conducts a study"
        if study["entry"] is None:  # the launcher was killed before it was registered
            planned, arms = planned_runs(request, is_new=False)
            cycle = cycle_for(request, arms, [job.cell for job in planned.jobs])
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
    terminal.say(f"Registered by {where}.", on=console)
    feed = Seeds(request.study, directory, record, console)
    failed: list[MensError] = []
    code = finish(
        Launcher(directory, record, console, feed),
        conclude=lambda: _conclude(request, directory, record, failed),
        again=record.command,
    )
    return code or max((one.exit_code for one in failed), default=0)


class Seeds:
    """The launcher's feed: adds runs seed by seed until the study's stopping rule ends it."""

    def __init__(
        self, study: StudyConfig, directory: SweepDir, record: SweepRecord, console: Console
    ) -> None:
        """Use a study whose lock the caller holds."""
        assert record.study is not None, "a sweep that conducts a study"
        self._study, self._state = study, record.study
        self._directory, self._record, self._console = directory, record, console
        self._arms = arm_count(study)

    def supply(self) -> bool:
        """Add the next run, unless the study has stopped or waits for the previous seed."""
        if not self._state["later"] or self._state["stopped"] is not None:
            return False
        begins_seed = len(self._record.jobs) % self._arms == 0
        if begins_seed and not self._may_begin():
            return False
        self._record.jobs.append(self._state["later"].pop(0))
        return True

    def watch(self, job: SweepJob) -> str | None:
        """Never end a run early."""
        del job
        return None

    def job_ended(self, job: SweepJob) -> None:
        """Do nothing: :meth:`supply` examines complete seeds."""

    def _may_begin(self) -> bool:
        """Return whether the next seed may begin; record the reason if the study has stopped."""
        jobs, hours = self._record.jobs, self._study.budget.hours
        spent = sum(job["results"].get("wall_s") or 0.0 for job in jobs) / HOUR_S
        if hours is not None and spent >= hours:
            self._state["stopped"] = f"the budget of {hours:g} hours is spent: {spent:.2f}"
            return False
        if self._study.stopping is Stopping.all_seeds or not jobs:
            return True
        if any(job["state"] != JobState.SUCCEEDED for job in jobs):
            return False  # an incomplete seed cannot be compared; the same command runs it again
        return not self._is_decided()

    def _is_decided(self) -> bool:
        """Compare the finished seeds; return whether every arm has a verdict."""
        done = len(self._record.jobs) // self._arms
        paths = [str(self._directory.path / job["directory"]) for job in self._record.jobs]
        try:
            factors = self._state["factors"]
            settings = _compare_settings(self._study, self._state)
            made = conducted(paths, read_study(paths).runs, factors, settings)
        except MensError as error:
            terminal.say(f"{done} seeds are not compared yet: {error}", on=self._console)
            return False
        verdicts = {one["arm"]: one["kpis"][made.primary]["verdict"] for one in made.contrasts}
        told = "; ".join(f"{arm}: {verdict}" for arm, verdict in verdicts.items())
        terminal.say(f"After {done} seeds: {told}", on=self._console)
        if not set(verdicts.values()) <= _DECIDED:
            return False
        self._state["stopped"] = f"every arm has a verdict after {done} seeds"
        return True


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
            "a sweep without a study already exists here",
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
        remedy="restore the file, or register the new study under another name",
    )


def _edits(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name} was {shown(before.get(name))} and is {shown(after.get(name))}"


def _conclude(
    request: Request, directory: SweepDir, record: SweepRecord, failed: list[MensError]
) -> list[Step]:
    """Compare the finished runs, record and show the verdicts; return the next steps.

    Args:
        request: the command.
        directory: directory of the study.
        record: its record.
        failed: receives the error of a comparison that could not be made.
    """
    study = record.study
    assert study is not None, "a sweep that conducts a study"
    done = [job for job in record.jobs if job["state"] == JobState.SUCCEEDED]
    if not done or study["entry"] is None:
        return []
    is_cut = any(job["state"] == JobState.CANCELLED for job in record.jobs)
    has_more = bool(study["later"]) and study["stopped"] is None
    if (is_cut or has_more) and request.study.stopping is Stopping.all_seeds:
        all_runs = len(record.jobs) + len(study["later"])
        terminal.say(
            f"Not compared yet: {len(done)} of {all_runs} runs are done. The arms are compared "
            "once, when every run has ended."
        )
        return []
    try:
        place = _compared(request, directory, study, done)
        made = Comparison.read(place.comparison)
    except MensError as error:
        terminal.say(f"Not compared: {error}")
        failed.append(error)
        return []
    study["comparison"] = place.path.name
    record.write(directory.record)
    terminal.show(
        *comparison_view.brief(made), *comparison_view.hypothesis(made, study["settings"])
    )
    if len(done) < len(record.jobs):
        return []
    return [*comparison_view.document(made, wording.path(place.path), study["ledger"]).steps]


def _compare_settings(study: StudyConfig, state: StudyRecord) -> CompareConfig:
    """Return the settings of the comparison, with the reference's name in the file resolved."""
    settings = study.compared(state["factors"])
    if settings.reference in study.arms:
        _, cycle = cycles_of(read_ledger(Path(state["ledger"])))[state["name"]]
        settings.reference = cycle["arms"][list(study.arms).index(settings.reference)]
    return settings


def _compared(
    request: Request, directory: SweepDir, study: StudyRecord, done: Sequence[SweepJob]
) -> RunDir:
    """Return the directory of task=compare over the finished runs; run it if it has not been."""
    paths = [directory.path.absolute() / job["directory"] for job in done]
    if study["comparison"] is not None:
        before = RunDir(directory.path / study["comparison"])
        if before.comparison.is_file():
            runs = Comparison.read(before.comparison).runs
            known = {(Path(run["path"]), run["manifest_sha256"]) for run in runs}
            if known == {(path, sha256_file(RunDir(path).manifest)) for path in paths}:
                return before
    settings = _compare_settings(request.study, study)
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
