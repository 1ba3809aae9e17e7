"""Outcome of a job, read from its record and from the end of its process."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.machine_faults import is_of_disk
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.sweep import JobState
from mens_exp.errors import MensError, SetupError

if TYPE_CHECKING:
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.sweep import SweepJob
    from mens_exp.sweeps.process import Ended

__all__ = ["Cause", "Outcome", "cause_of", "damage", "outcome", "record_of"]

_CANCELLED, _A_BUG = 130, 1
_RESULTS = ("wall_s", "base_val_loss", "tuned_val_loss", "peak_rss_bytes", "peak_cuda_bytes")
_LOG_TAIL = 4_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The state of a job after a process of it ended.

    Attributes:
        state: of the job.
        reason: why, where it did not succeed.
        may_pass: whether another attempt may end otherwise.
        results: what it measured, by name.
    """

    state: JobState
    reason: str | None = None
    may_pass: bool = False
    results: dict[str, Any] = field(default_factory=dict)


class Cause(Enum):
    """Why a job failed: by itself, or because of the machine, after which it may succeed."""

    OWN = auto()  # a wrong request, a gate, a loss that is not finite, a bug
    PROCESS = auto()  # it was killed, had no memory, or its process never began
    DISK = auto()  # which the other jobs need as well


def cause_of(job: SweepJob, run: RunDir) -> Cause:
    """Tell why a job failed, by its last attempt and by its record."""
    last = job["attempts"][-1] if job["attempts"] else None
    if last is None or last.get("why") is not None:  # it never began, or a batch system ended it
        return Cause.PROCESS
    manifest, code = record_of(run), last["exit_code"]
    error = None if manifest is None else manifest.error
    if code is None and error is not None:  # nobody saw how its process ended
        code = error["exit_code"]
    if code is None or code < 0:
        return Cause.PROCESS
    if code != SetupError.exit_code:
        return Cause.OWN
    # A disk that is full has no room for the error either.
    return Cause.DISK if error is None or is_of_disk(error["remedy"]) else Cause.PROCESS


def record_of(run: RunDir) -> Manifest | None:
    """Read the record of a run; None where there is none, or none that can be read."""
    try:
        return Manifest.read(run.manifest)
    except MensError:
        return None


def outcome(run: RunDir, ended: Ended, *, since_utc: str) -> Outcome:
    """Say what became of a job.

    Args:
        run: its directory.
        ended: how its process ended.
        since_utc: when that started; what the record says of earlier attempts does not count.
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
    """Say why a job ended that nobody ended, and that did not succeed."""
    status = None if manifest is None else manifest.status
    if code == _CANCELLED or (code is None and status is Status.CANCELLED):
        return Outcome(state=JobState.CANCELLED, reason="asked to stop by a signal")
    if code is not None and code < 0:
        return Outcome(state=JobState.FAILED, reason=_killed(-code), may_pass=True)
    told = _told(manifest, since_utc)
    if code is None and told is None:
        reason = "its process died, and nobody saw how"
        return Outcome(state=JobState.FAILED, reason=reason, may_pass=True)
    if code == 0:
        return Outcome(state=JobState.FAILED, reason="it ended without a record of success")
    reason = told or _last_line(run) or f"exit code {code}"
    return Outcome(state=JobState.FAILED, reason=reason, may_pass=code == _A_BUG)


def _killed(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def _told(manifest: Manifest | None, since_utc: str) -> str | None:
    """Return the error of the latest attempt."""
    if manifest is None or manifest.error is None:
        return None
    if manifest.attempts and manifest.attempts[-1]["started_utc"] < since_utc:
        return None
    error = manifest.error
    return f"{error['type']}: {error['message']}"


def _last_line(run: RunDir) -> str | None:
    """Return what a process said last before it ended without a record."""
    try:
        text = run.log.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def damage(run: RunDir, manifest: Manifest, config_digest: str) -> str | None:
    """Say what of a done job is not what its record states; None where all is.

    Args:
        run: its directory.
        manifest: its record.
        config_digest: of the configuration that the sweep gave it.
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
