"""sweep.json: what a sweep runs, how far each job has got, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, ClassVar, TypedDict

from mens_exp.artifacts.record import StoredRecord
from mens_exp.artifacts.search import SearchRecord  # noqa: TC001  # read by the record's reader
from mens_exp.errors import DataError

__all__ = ["JobAttempt", "JobState", "LeftOut", "SweepJob", "SweepRecord"]

_LAUNCHERS_OF_1 = {
    "joblib": "local",
    "submitit_slurm": "slurm",
}  # what a record of version 1 calls those of today
_BACKEND = "backend"  # a setting of joblib's alone


class JobState(StrEnum):
    """The state of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PRUNED = "pruned"  # a search ended it, as others are better


class _Queued(TypedDict, total=False):
    queue_id: str
    host: str
    why: str | None


class JobAttempt(_Queued):
    """One process that worked on a job.

    ``process_started`` (seconds since 1970) tells it from a later one of the same number.
    ``exit_code`` is minus the number of the signal that ended it, and null while it runs or where
    nobody was there to see. ``peak_rss_bytes`` adds up the peaks of all processes that train along.
    A batch system adds its own number of the job (``queue_id``), the
    ``host`` it ran on, and ``why`` it ended that attempt (``TIMEOUT``), null where it did not.
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
    losses by name, null where unknown; bytes are those of all its ``processes``, one where nothing
    is said.
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


def _sweep_of_1(value: dict[str, Any]) -> dict[str, Any]:
    """Return a record of version 1 as one of version 2: launchers had other names."""
    try:
        before = value.get("launcher")
        if before not in _LAUNCHERS_OF_1:
            return value
        now = _LAUNCHERS_OF_1[before]
        note = (
            f"it was launched with hydra/launcher={before}, and goes on with hydra/launcher={now}"
        )
        if value.get("search") is not None:
            fixed = value["search"]["fixed"]  # composed again when the search goes on
            fixed[:] = [
                text.replace(f"hydra/launcher={before}", f"hydra/launcher={now}")
                for text in fixed
                if not text.startswith(f"hydra.launcher.{_BACKEND}=")
            ]
        value["launcher_settings"].pop(_BACKEND, None)
        return {**value, "launcher": now, "notes": [*value.get("notes", []), note]}
    except (AttributeError, KeyError, TypeError):  # the check of keys and types says what is wrong
        return value


@dataclass(kw_only=True, slots=True)
class SweepRecord(StoredRecord):
    """A sweep.

    Attributes:
        format: always ``mens_exp_sweep``.
        version: of this layout.
        sweep_id: the name of its directory.
        created_utc: when it was launched.
        command: the overrides as typed.
        code_sha256: of the code that composed its cells.
        provenance: code, packages and machine of the launch.
        n_jobs: jobs at a time.
        threads: threads of each job; it stays when the sweep goes on, as results depend on it.
        gpus: devices that jobs take in turn; empty where they see what the launcher sees.
        gpus_per_job: how many of them a job may use.
        launcher: the option of hydra/launcher.
        launcher_settings: its settings; they hold for what is left when the sweep goes on.
        retries: how often a job is started again after it was killed.
        changes: ``refuse`` or ``accept`` other code than at launch.
        jobs: the cells that run, in order.
        left_out: the cells that do not.
        notes: what a reader should know besides.
        search: what drew the cells; None where the command lists them.
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

    def problems(self, where: str) -> list[DataError]:
        """Return directories that lead out of the sweep: somebody else may have written them."""
        return [
            DataError(
                "wrong value",
                where=f"{where}: jobs[{place}].directory",
                found=job["directory"],
                expected="a path below the sweep's own directory",
            )
            for place, job in enumerate(self.jobs)
            if not _is_below(job["directory"])
        ]


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
