"""manifest.json, the record of a run, and sync.json, the record of what was uploaded to W&B."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from mens_exp.artifacts.credentials import screened
from mens_exp.artifacts.record import StoredRecord, write_record
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Status(StrEnum):
    """The state of a run."""

    STARTED = "started"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Attempt(TypedDict):
    """One process that worked on the run; a resumed run has several."""

    started_utc: str
    ended_utc: str | None
    status: Status
    resumed_from_step: int | None


class Failure(TypedDict):
    """The error that ended a run: its class, message, remedy and exit code."""

    type: str
    message: str
    remedy: str | None
    exit_code: int


# The contract has a separate digest, over settings in which credentials are refused.
_SCREENED = ("overrides", "provenance", "inputs", "facts", "results", "unknown", "error", "notes")


@dataclass(kw_only=True, slots=True)
class Manifest(StoredRecord):
    """The record of a run: its code, its inputs and its results.

    Attributes:
        format: always ``mens_exp_run``.
        version: version of this layout.
        run_id: unique name of the run.
        task: the task that ran.
        experiment: the experiment's name, or None for an ad hoc run.
        status: state of the run.
        started_utc: start of the first attempt, in the format of `utc_now`.
        ended_utc: None while it is running, and after a kill.
        attempts: every process that worked on it, in order.
        overrides: overrides of the command line, as given.
        choices: the option chosen in each config group.
        config_digest: SHA-256 of the resolved configuration.
        contract: the fine-tune contract, with its digest; None for a task that trains nothing.
        seed: the run's seed.
        provenance: code, packages and machine.
        inputs: content hashes and counts of the inputs.
        facts: the resolved settings, read back from the first batch and the model. Equal
            ``lora_init_sha256`` means equal initial matrices A and B; for different targets,
            ``lora_init_layers_sha256`` has one hash per layer, by logical name.
        data_contract: the certificate of its encoded rows, see `DataContract`; None if nothing
            is trained.
        results: final figures. Equal ``batches_sha256`` means the same micro-batches in the same
            order; the step events in telemetry have the hash chain up to each step.
        unknown: dotted path of a null field -> reason.
        outputs: path relative to the run directory -> SHA-256.
        error: the error that ended it, if it failed.
        notes: further remarks for the reader.
    """

    format: str = "mens_exp_run"
    version: int = 1
    run_id: str
    task: str
    experiment: str | None = None
    status: Status = Status.STARTED
    started_utc: str
    ended_utc: str | None = None
    attempts: list[Attempt] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    choices: dict[str, str | None] = field(default_factory=dict)
    config_digest: str
    contract: dict[str, Any] | None = None
    seed: int
    provenance: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    data_contract: dict[str, Any] | None = None
    results: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    error: Failure | None = None
    notes: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the record atomically, with every detected credential masked.

        Raises:
            MensError: a field is of the wrong type or not finite; nothing is written.
        """
        write_record(self.screened(), path)

    def screened(self) -> Manifest:
        """Return the record with every detected credential masked."""
        return replace(self, **{name: screened(getattr(self, name)) for name in _SCREENED})

    def problems(self, where: str) -> list[DataError]:
        """Return the times, digests and paths that are malformed."""
        times = {"started_utc": self.started_utc, "ended_utc": self.ended_utc}
        for number, attempt in enumerate(self.attempts):
            times[f"attempts[{number}].started_utc"] = attempt["started_utc"]
            times[f"attempts[{number}].ended_utc"] = attempt["ended_utc"]
        found = [
            _wrong(f"{where}: {name}", text, "a UTC time like 2026-11-20T05:58:01.123Z")
            for name, text in times.items()
            if text is not None and not _UTC.fullmatch(text)
        ]
        contract = (self.contract or {}).get("digest", "")
        if self.contract is not None and not _SHA256.fullmatch(str(contract)):
            place = f"{where}: contract.digest"
            found.append(_wrong(place, str(contract), "a SHA-256, 64 hexadecimal digits"))
        for name, sha256 in self.outputs.items():
            place = f"{where}: outputs.{name}"
            if not _is_inside(name):
                found.append(_wrong(place, name, "a relative path with forward slashes"))
            if not _SHA256.fullmatch(sha256):
                found.append(_wrong(place, sha256, "a SHA-256, 64 hexadecimal digits"))
        return found


def utc_now() -> str:
    """Return the current UTC time to the millisecond, as ``2026-11-20T05:58:01.123Z``."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _wrong(where: str, found: str, expected: str) -> DataError:
    return DataError("wrong value", where=where, found=found, expected=expected)


class Destination(NamedTuple):
    """The destination of an upload: the service's address, and the entity and project there."""

    server: str
    entity: str | None
    project: str


class Delivery(TypedDict):
    """The state of the upload to one destination.

    ``digest`` is that of the uploaded records, and ``sent_utc`` the time of the upload. Both are
    null until everything has arrived; ``why`` then gives the obstacle. ``since_utc`` is the time of
    the latest attempt.
    """

    server: str
    entity: str | None
    project: str
    digest: str | None
    sent_utc: str | None
    since_utc: str
    why: str | None


@dataclass(kw_only=True, slots=True)
class SyncRecord(StoredRecord):
    """Deliveries, one for each destination.

    Attributes:
        format: always ``mens_exp_sync``.
        version: version of this layout.
        deliveries: in the order in which the destinations were first tried.
    """

    format: str = "mens_exp_sync"
    version: int = 1
    deliveries: list[Delivery] = field(default_factory=list)

    def problems(self, where: str) -> list[DataError]:
        """Return an empty list: a wrong entry at worst causes a repeated upload."""
        del where
        return []


def delivery_at(path: Path, to: Destination) -> Delivery | None:
    """Return the delivery to a destination; None if nothing was ever sent there.

    Raises:
        DataError: the record is damaged.
    """
    if not path.is_file():
        return None
    return next((one for one in SyncRecord.read(path).deliveries if _is_of(one, to)), None)


def note_delivery(
    path: Path, to: Destination, *, digest: str | None = None, why: str | None = None
) -> None:
    """Record the result of an upload attempt, replacing the previous entry of that destination.

    Args:
        path: the record.
        to: the destination.
        digest: digest of what has arrived.
        why: reason for the failure, if there is no digest.
    """
    record = SyncRecord.read(path) if path.is_file() else SyncRecord()
    now = utc_now()
    made = Delivery(
        server=to.server,
        entity=to.entity,
        project=to.project,
        digest=digest,
        sent_utc=None if digest is None else now,
        since_utc=now,
        why=why,
    )
    places = [i for i, one in enumerate(record.deliveries) if _is_of(one, to)]
    if places:
        record.deliveries[places[0]] = made
    else:
        record.deliveries.append(made)
    record.write(path)


def _is_of(one: Delivery, to: Destination) -> bool:
    return (one["server"], one["entity"], one["project"]) == to
