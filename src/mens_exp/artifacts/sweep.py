"""Records of a sweep: its directory, sweep.json with jobs and trials, job.json, and attempts.

A batch system starts a job on its own schedule, and may restart it, whether or not the launcher is
running. Therefore each attempt is logged next to the job, with one line for its start and one for
its end, and the launcher reads the log.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from mens_exp.artifacts.atomic import json_line
from mens_exp.artifacts.host import file_lock
from mens_exp.artifacts.manifest import utc_now
from mens_exp.artifacts.record import StoredRecord, cut_torn_end, read_lines
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class SweepDir:
    """The directory of a sweep; nothing is created or read until accessed."""

    path: Path

    @property
    def record(self) -> Path:
        """The record of the sweep, written only by its launcher."""
        return self.path / "sweep.json"

    @property
    def lock(self) -> Path:
        """Lock held by the launcher as long as it lives."""
        return self.path / "sweep.lock"

    @property
    def batch(self) -> Path:
        """Files exchanged with a batch system: scripts, output, attempts."""
        return self.path / "batch"

    def attempts(self, number: int) -> Path:
        """Return the log of attempts at a job that the launcher does not start itself."""
        return self.batch / f"attempts_{number}.jsonl"

    def unwanted(self, number: int) -> Path:
        """Return the file that asks a job of a Hydra launcher plugin to stop."""
        return self.batch / f"unwanted_{number}"

    def alive(self, number: int) -> Path:
        """Return the heartbeat file that such a job touches every few seconds."""
        return self.batch / f"alive_{number}"

    @property
    def journal(self) -> Path:
        """In a search, Optuna's journal of its trials."""
        return self.path / "search.journal"

    @property
    def search_page(self) -> Path:
        """In a search, its record as a page."""
        return self.path / "search.html"

    @property
    def page(self) -> Path:
        """The sweep as a page, rendered from its record and those of its runs."""
        return self.path / "sweep.html"

    @property
    def sync(self) -> Path:
        """The parts of the sweep as a whole that were uploaded to W&B services."""
        return self.path / "sync.json"

    @property
    def sync_lock(self) -> Path:
        """Lock held by the process that uploads the sweep."""
        return self.path / "sync.lock"


class TrialState(StrEnum):
    """The state of a trial."""

    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"


class Dimension(TypedDict):
    """One key whose values a search samples.

    ``kind`` is ``group`` or ``choice`` (one of ``values``), ``int`` or ``float`` (from ``low`` to
    ``high`` inclusive, in multiples of ``step`` above ``low`` if it is set; uniform in the
    logarithm if ``log``).
    """

    key: str
    kind: str
    values: list[str]
    low: float | None
    high: float | None
    step: float | None
    log: bool


class Trial(TypedDict):
    """One sample of the search space.

    ``params`` are the sampled overrides, without those that have no effect given the others.
    ``values`` are the objectives, in order; null until the trial is complete. ``intermediate`` are
    validation losses by optimizer step. ``job`` is the number of the job that produced the values:
    the trial's own, that of an earlier trial with the same run, or null if it cannot run.
    ``meaning`` is a hash of that run's behaviour and outputs.
    """

    number: int
    state: TrialState
    params: dict[str, str]
    values: list[float] | None
    intermediate: list[list[float]]
    reason: str | None
    job: int | None
    meaning: str | None


class SearchRecord(TypedDict):
    """A search.

    Attributes:
        sampler: ``tpe`` or ``random``.
        seed: seed from which, with the number of its trial, each sample is derived.
        startup_trials: random trials before the sampler fits a model.
        n_trials: total number of trials.
        pruner: ``none``, ``median`` or ``hyperband``.
        pruner_startup_trials: complete trials before any is pruned; null if not applicable.
        pruner_min_steps: optimizer steps before a trial can be pruned.
        objectives: KPIs of the runs.
        directions: ``minimize`` or ``maximize``, for each objective.
        fixed: overrides shared by all trials.
        space: the search space.
        trials: the trials so far.
        best: the Pareto-optimal trials.
        importance: objective -> key -> share of the influence on it; empty while unknown.
        importance_unknown: the reason why it is unknown.
    """

    sampler: str
    seed: int
    startup_trials: int
    n_trials: int
    pruner: str
    pruner_startup_trials: int | None
    pruner_min_steps: int
    objectives: list[str]
    directions: list[str]
    fixed: list[str]
    space: list[Dimension]
    trials: list[Trial]
    best: list[int]
    importance: dict[str, dict[str, float]]
    importance_unknown: str | None


_LAUNCHERS_OF_1 = {
    "joblib": "local",
    "submitit_slurm": "slurm",
}  # names in a record of version 1 -> current names
_BACKEND = "backend"  # a setting that only joblib has


class JobState(StrEnum):
    """The state of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PRUNED = "pruned"  # a search stopped it because others are better


# Displayed, never written: the job's record says running, but its process was killed.
INTERRUPTED = "interrupted"


class _Queued(TypedDict, total=False):
    queue_id: str
    host: str
    why: str | None


class JobAttempt(_Queued):
    """One process that worked on a job.

    ``process_started`` (seconds since 1970) distinguishes it from a later process with the same id.
    ``exit_code`` is minus the number of the signal that ended it, and null while it is running or
    if it was not observed. ``peak_rss_bytes`` is the sum of the peaks of all training processes. A
    batch system adds its own number of the job (``queue_id``), the ``host`` it ran on, and the
    reason why it ended that attempt (``why``, such as ``TIMEOUT``), null if it did not.
    """

    pid: int
    process_started: float
    started_utc: str
    ended_utc: str | None
    exit_code: int | None
    peak_rss_bytes: int | None


class _Shared(TypedDict, total=False):
    processes: int


class SweepJob(_Shared):
    """One cell that runs.

    ``directory`` is relative to the sweep's. ``estimate`` and ``results`` hold seconds, bytes and
    losses by name, null if unknown; bytes are the total over its ``processes`` (default one).
    """

    number: int
    directory: str
    differs: list[str]
    state: JobState
    reason: str | None
    config_digest: str
    contract: str | None
    estimate: dict[str, Any]
    results: dict[str, Any]
    notes: list[str]
    attempts: list[JobAttempt]


class LeftOut(TypedDict):
    """One cell that does not run: it is invalid, or the same as another (``same_as``)."""

    number: int
    differs: list[str]
    why: str
    same_as: int | None


class StudyRecord(TypedDict):
    """The study that a sweep conducts.

    Attributes:
        name: its name, and that of its cycle in the ledger.
        sha256: digest of its settings, which the ledger registers.
        settings: its settings.
        factors: settings and groups in which its arms differ.
        ledger: path of the ledger.
        entry: number of the ledger entry that registers it; null until it is registered.
        entry_sha256: digest of that entry.
        registered_utc: time of that entry.
        later: jobs that have not been started yet, in order.
        stopped: the reason why they will not be; null if they will.
        comparison: directory of the latest comparison, relative to the sweep's; null if none.
    """

    name: str
    sha256: str
    settings: dict[str, Any]
    factors: list[str]
    ledger: str
    entry: int | None
    entry_sha256: str | None
    registered_utc: str | None
    later: list[SweepJob]
    stopped: str | None
    comparison: str | None


def _sweep_of_1(value: dict[str, Any]) -> dict[str, Any]:
    """Migrate a record of version 1 to version 2; launchers had different names."""
    try:
        before = value.get("launcher")
        if before not in _LAUNCHERS_OF_1:
            return value
        now = _LAUNCHERS_OF_1[before]
        note = (
            f"it was launched with hydra/launcher={before} and continues with hydra/launcher={now}"
        )
        if value.get("search") is not None:
            fixed = value["search"]["fixed"]  # recomposed when the search continues
            fixed[:] = [
                text.replace(f"hydra/launcher={before}", f"hydra/launcher={now}")
                for text in fixed
                if not text.startswith(f"hydra.launcher.{_BACKEND}=")
            ]
        value["launcher_settings"].pop(_BACKEND, None)
        return {**value, "launcher": now, "notes": [*value.get("notes", []), note]}
    except (AttributeError, KeyError, TypeError):  # reported by the check of keys and types
        return value


@dataclass(kw_only=True, slots=True)
class SweepRecord(StoredRecord):
    """A sweep.

    Attributes:
        format: always ``mens_exp_sweep``.
        version: version of this layout.
        sweep_id: the name of its directory.
        created_utc: time of the launch.
        command: the overrides, as typed.
        code_sha256: digest of the code that composed its cells.
        provenance: code, packages and machine of the launch.
        n_jobs: number of concurrent jobs.
        threads: threads per job; kept when the sweep is resumed, because results depend on it.
        gpus: devices assigned to jobs in turn; empty if jobs see all devices of the launcher.
        gpus_per_job: maximum number of devices per job.
        launcher: the option of hydra/launcher.
        launcher_settings: its settings; they apply to the remaining jobs when the sweep is resumed.
        retries: number of restarts of a job that was killed.
        changes: ``refuse`` or ``accept`` code other than that at launch.
        jobs: the cells that run, in order.
        left_out: the cells that do not run.
        notes: further remarks for the reader.
        search: the search that sampled the cells; None if the command lists them.
        study: the study that the cells belong to; None for any other sweep.
    """

    MIGRATIONS: ClassVar[dict[int, Any]] = {1: _sweep_of_1}

    format: str = "mens_exp_sweep"
    version: int = 2
    sweep_id: str
    created_utc: str
    command: list[str]
    code_sha256: str
    provenance: dict[str, Any] = field(default_factory=dict)
    n_jobs: int
    threads: int
    gpus: list[str] = field(default_factory=list)
    gpus_per_job: int = 1
    launcher: str = "local"
    launcher_settings: dict[str, Any] = field(default_factory=dict)
    retries: int
    changes: str
    jobs: list[SweepJob]
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    search: SearchRecord | None = None
    study: StudyRecord | None = None

    def problems(self, where: str) -> list[DataError]:
        """Return directories that lead outside the sweep, since the record may be untrusted."""
        return [
            DataError(
                "wrong value",
                where=f"{where}: jobs[{place}].directory",
                found=job["directory"],
                expected="a path below the sweep's own directory",
            )
            for place, job in enumerate([*self.jobs, *(self.study["later"] if self.study else ())])
            if not _is_below(job["directory"])
        ]


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


@dataclass(kw_only=True, slots=True)
class Job(StoredRecord):
    """One job, frozen at launch.

    Attributes:
        format: always ``mens_exp_job``.
        version: version of this layout.
        number: its index in the sweep.
        overrides: the overrides that its configuration was composed from.
        choices: the option chosen in each config group.
        config_digest: digest of the configuration in config.yaml.
        code_sha256: digest of the code that composed it.
        own_files: user-defined modules that it uses, relative path -> SHA-256.
        contract: digest of its contract; None for a task that trains nothing.
    """

    format: str = "mens_exp_job"
    version: int = 1
    number: int
    overrides: list[str]
    choices: dict[str, str | None]
    config_digest: str
    code_sha256: str
    own_files: dict[str, str] = field(default_factory=dict)
    contract: str | None = None

    def problems(self, where: str) -> list[DataError]:
        """Return an empty list: its hashes are compared where they are used."""
        del where
        return []


_UNSEEN = "it was killed, and began again"


class _Line(TypedDict, total=False):
    """One line: `event` is ``began`` or ``ended``; the rest is of a :class:`JobAttempt`."""

    event: str
    utc: str
    pid: int
    process_started: float
    queue_id: str
    host: str
    exit_code: int | None
    peak_rss_bytes: int | None
    why: str | None


class AttemptLog:
    """The log of attempts at one job.

    Two attempts may be under way if Slurm's controller lost the first, so an end names its attempt.
    """

    def __init__(self, path: Path) -> None:
        """Set the path of the log; the first line creates the file."""
        self._path = path
        self._own: _Line = {}  # the process that this object has recorded

    def began(self, pid: int, process_started: float, *, host: str, queue_id: str | None) -> None:
        """Record that a process started on the job."""
        self._own = _Line(pid=pid, process_started=process_started, host=host)
        line = _Line(event="began", utc=utc_now(), **self._own)
        if queue_id is not None:
            line["queue_id"] = queue_id
        self._append(line)

    def ended(
        self, exit_code: int | None, *, peak_rss_bytes: int | None = None, why: str | None = None
    ) -> None:
        """Record that the process of `began` has ended, or else the last one of the log."""
        line = _Line(event="ended", utc=utc_now(), exit_code=exit_code, why=why, **self._own)
        line["peak_rss_bytes"] = peak_rss_bytes
        self._append(line)

    def attempts(self) -> list[JobAttempt]:
        """Read all attempts, in order; one without an end is running, or its end was not observed.

        Raises:
            DataError: a line is malformed.
        """
        if not self._path.exists():
            return []
        made: list[JobAttempt] = []
        for line in read_lines(self._path, _Line, torn_end=True):
            if line["event"] == "began":
                if made and made[-1]["ended_utc"] is None:
                    made[-1]["ended_utc"], made[-1]["why"] = line["utc"], _UNSEEN
                made.append(_attempt(line))
            elif (of := _attempt_of(line, made)) is not None:
                of["ended_utc"], of["exit_code"] = line["utc"], line["exit_code"]
                of["peak_rss_bytes"], of["why"] = line["peak_rss_bytes"], line["why"]
        return made

    def _append(self, line: _Line) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = self._path.with_name(f".{self._path.name}.lock")
        with file_lock(lock), self._path.open("ab") as file:
            cut_torn_end(self._path)  # never of a line that another attempt is writing
            file.write(json_line(line, str(self._path)))
            file.flush()
            os.fsync(file.fileno())


def _attempt_of(end: _Line, made: Sequence[JobAttempt]) -> JobAttempt | None:
    """Return the attempt that a line ends; None if the line of its start was truncated."""
    if "pid" not in end:
        return made[-1] if made else None
    named = (end["pid"], end["process_started"], end["host"])
    same = (x for x in made[::-1] if (x["pid"], x["process_started"], x.get("host")) == named)
    return next(same, None)


def _attempt(line: _Line) -> JobAttempt:
    made = JobAttempt(
        pid=line["pid"],
        process_started=line["process_started"],
        started_utc=line["utc"],
        ended_utc=None,
        exit_code=None,
        peak_rss_bytes=None,
        host=line["host"],
    )
    if "queue_id" in line:
        made["queue_id"] = line["queue_id"]
    return made
