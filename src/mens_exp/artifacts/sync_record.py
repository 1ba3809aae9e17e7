"""sync.json: what of a run, or of a sweep as a whole, a W&B service has, and what it has not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from mens_exp.artifacts.manifest import utc_now
from mens_exp.artifacts.record import StoredRecord

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.errors import DataError

__all__ = ["Delivery", "Destination", "SyncRecord", "delivery_at", "note_delivery"]


class Destination(NamedTuple):
    """The destination of an upload: the service's address, and whose project there."""

    server: str
    entity: str | None
    project: str


class Delivery(TypedDict):
    """The items that one destination has.

    ``digest`` is of the records that were sent, and ``sent_utc`` when; both are null until all of
    it has arrived, and ``why`` then says what hinders it. ``since_utc`` is of the latest attempt.
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
        version: of this layout.
        deliveries: in the order in which the destinations were first tried.
    """

    format: str = "mens_exp_sync"
    version: int = 1
    deliveries: list[Delivery] = field(default_factory=list)

    def problems(self, where: str) -> list[DataError]:
        """Return nothing: whatever is noted here is only ever sent again."""
        del where
        return []


def delivery_at(path: Path, to: Destination) -> Delivery | None:
    """Return what a destination has; None where nothing was ever sent there.

    Raises:
        DataError: the record is damaged.
    """
    if not path.is_file():
        return None
    return next((one for one in SyncRecord.read(path).deliveries if _is_of(one, to)), None)


def note_delivery(
    path: Path, to: Destination, *, digest: str | None = None, why: str | None = None
) -> None:
    """Note what became of an attempt, in the place of what was known of that destination.

    Args:
        path: the record.
        to: the destination.
        digest: of what has arrived.
        why: it has not, where there is no digest.
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
