"""Determine how a job of a sweep ended, from its record, its exit status and its directory."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.host import is_alive, is_of_disk, lock_holder
from mens_exp.artifacts.manifest import Manifest, Status, utc_now
from mens_exp.artifacts.sweep import JobAttempt, JobState
from mens_exp.errors import MensError, SetupError
from mens_exp.sweeps.process import Ended

if TYPE_CHECKING:
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.sweep import SweepJob

_CANCELLED, _A_BUG = 130, 1
_RESULTS = ("wall_s", "base_val_loss", "tuned_val_loss", "peak_rss_bytes", "peak_cuda_bytes")
_LOG_TAIL = 4_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The state of a job after its process ended.

    Attributes:
        state: state of the job.
        reason: the reason, if it did not succeed.
        may_pass: whether another attempt may succeed.
        results: measured results by name.
    """

    state: JobState
    reason: str | None = None
    may_pass: bool = False
    results: dict[str, Any] = field(default_factory=dict)


class Cause(Enum):
    """Cause of a job's failure: the job itself, or the machine, where a retry may succeed."""

    OWN = auto()  # a wrong request, a gate, a non-finite loss, a bug
    PROCESS = auto()  # it was killed, ran out of memory, or never started
    DISK = auto()  # also affects the other jobs


def cause_of(job: SweepJob, run: RunDir) -> Cause:
    """Return the cause of a job's failure from its last attempt and its record."""
    last = job["attempts"][-1] if job["attempts"] else None
    if last is None or last.get("why") is not None:  # it never started, or a batch system ended it
        return Cause.PROCESS
    manifest, code = record_of(run), last["exit_code"]
    error = None if manifest is None else manifest.error
    if code is None and error is not None:  # its exit status is unknown
        code = error["exit_code"]
    if code is None or code < 0:
        return Cause.PROCESS
    if code != SetupError.exit_code:
        return Cause.OWN
    # A full disk has no room for the error either.
    return Cause.DISK if error is None or is_of_disk(error["remedy"]) else Cause.PROCESS


def record_of(run: RunDir) -> Manifest | None:
    """Read the record of a run; None if it is missing or unreadable."""
    try:
        return Manifest.read(run.manifest)
    except MensError:
        return None


def outcome(run: RunDir, ended: Ended, *, since_utc: str) -> Outcome:
    """Determine the outcome of a job.

    Args:
        run: its directory.
        ended: how its process ended.
        since_utc: start time of the process; record entries of earlier attempts are ignored.
    """
    manifest, code = record_of(run), ended.exit_code
    if manifest is not None and manifest.status is Status.SUCCEEDED and code in {0, None}:
        results = {name: manifest.results[name] for name in _RESULTS if name in manifest.results}
        return Outcome(state=JobState.SUCCEEDED, results=results)
    if ended.stop is not None:
        stop = ended.stop
        return Outcome(state=stop.state, reason=stop.reason, may_pass=stop.may_pass)
    return _by_itself(run, manifest, code, since_utc)


def _by_itself(run: RunDir, manifest: Manifest | None, code: int | None, since_utc: str) -> Outcome:
    """Return the outcome of an unsuccessful job that no batch system stopped."""
    status = None if manifest is None else manifest.status
    if code == _CANCELLED or (code is None and status is Status.CANCELLED):
        return Outcome(state=JobState.CANCELLED, reason="asked to stop by a signal")
    if code is not None and code < 0:
        return Outcome(state=JobState.FAILED, reason=_killed(-code), may_pass=True)
    recorded = _recorded_error(manifest, since_utc)
    if code is None and recorded is None:
        reason = "its process died, and its exit status is unknown"
        return Outcome(state=JobState.FAILED, reason=reason, may_pass=True)
    if code == 0:
        return Outcome(state=JobState.FAILED, reason="it ended without a record of success")
    reason = recorded or _last_line(run) or f"exit code {code}"
    return Outcome(state=JobState.FAILED, reason=reason, may_pass=code == _A_BUG)


def _killed(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def _recorded_error(manifest: Manifest | None, since_utc: str) -> str | None:
    """Return the error of the latest attempt."""
    if manifest is None or manifest.error is None:
        return None
    if manifest.attempts and manifest.attempts[-1]["started_utc"] < since_utc:
        return None
    error = manifest.error
    return f"{error['type']}: {error['message']}"


def _last_line(run: RunDir) -> str | None:
    """Return the last log line of a process that ended without a record."""
    try:
        text = run.log.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def damage(run: RunDir, manifest: Manifest, config_digest: str) -> str | None:
    """Describe how a finished job differs from its record; None if it matches.

    Args:
        run: its directory.
        manifest: its record.
        config_digest: digest of the configuration that the sweep froze.
    """
    if manifest.config_digest != config_digest:
        return f"{run.manifest.name} is of another configuration"
    for name, sha256 in manifest.outputs.items():
        path = run.path / name
        if not path.is_file():
            return f"{name} is gone"
        if sha256_file(path) != sha256:
            return f"{name} has changed"
    return None


def update_from_directory(job: SweepJob, run: RunDir, *, here: bool) -> None:
    """Set a job's state from its directory, whatever its launcher had recorded.

    Args:
        job: its entry in the record.
        run: its directory.
        here: whether its process would run on this machine.
    """
    last = job["attempts"][-1] if job["attempts"] else None
    at_work = lock_holder(run.job_lock) if here else None
    if here and at_work is None and last is not None and last["ended_utc"] is None:
        noted = (last["pid"], last["process_started"])
        at_work = noted if is_alive(*noted) else None
    if at_work is not None:
        _note_process(job, *at_work)
        return
    manifest = record_of(run)
    gone = [path.name for path in (run.config, run.job) if not path.is_file()]
    if last is not None and last["ended_utc"] is None:
        last["ended_utc"] = utc_now()
    if run.pruned.exists() and (manifest is None or manifest.status is not Status.SUCCEEDED):
        job["state"], job["reason"] = JobState.PRUNED, run.pruned.read_text("utf-8")
        return
    if manifest is None and run.manifest.exists():
        reason = (
            f"{run.manifest} cannot be read; move the directory's other files away to run it again"
        )
        job["state"], job["reason"] = JobState.FAILED, reason
    elif gone and (manifest is None or manifest.status is not Status.SUCCEEDED):
        reason = f"{' and '.join(gone)} of {run.path} are gone: a new sweep may run this cell"
        job["state"], job["reason"] = JobState.FAILED, reason
    elif manifest is None or manifest.status is not Status.SUCCEEDED or not run.report.exists():
        job["state"], job["reason"] = JobState.WAITING, None
    else:
        job["state"], job["reason"] = JobState.SUCCEEDED, None
        job["results"] = outcome(run, Ended(exit_code=None), since_utc="").results
        wrong = damage(run, manifest, job["config_digest"])
        if wrong is not None:
            reason = f"{wrong}; move {run.manifest} away to run it again"
            job["state"], job["reason"] = JobState.FAILED, reason


def _note_process(job: SweepJob, pid: int, started: float) -> None:
    """Record the running process, in case its launcher died before doing so."""
    job["state"], job["reason"] = JobState.RUNNING, None
    last = job["attempts"][-1] if job["attempts"] else None
    if last is None or last["ended_utc"] is not None:
        last = JobAttempt(
            pid=pid,
            process_started=started,
            started_utc=utc_now(),
            ended_utc=None,
            exit_code=None,
            peak_rss_bytes=None,
        )
        job["attempts"].append(last)
    last["pid"], last["process_started"] = pid, started
