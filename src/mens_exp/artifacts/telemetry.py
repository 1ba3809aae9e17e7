"""telemetry.jsonl, the events of a run in order, and validation.jsonl, its loss per document."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypedDict

from mens_exp.artifacts.atomic import json_line, write_bytes
from mens_exp.artifacts.credentials import screened
from mens_exp.artifacts.metrics import BUILT_IN, declaration, reduced
from mens_exp.artifacts.record import check_type, cut_torn_end, parse_json, read_lines, write_lines
from mens_exp.errors import DataError, MensError, Problems, expected_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

EVENTS = frozenset(
    {
        "run_started",
        "plan",
        "facts",
        "initialisation",
        "train_start",
        "step",
        "validation",
        "checkpoint_saved",
        "metric_declared",
        "hyperparameters",
        "logged",
        "stop_requested",
        "early_stop",
        "train_complete",
        "scorecard",
        "scorecard_step",
        "rejection_sampling",
        "sink_failed",
        "resumed",
        "device_fallback",
        "run_finished",
        "warning",
    }
)
_ENDS = frozenset({"run_finished", "train_complete"})


class Event(TypedDict):
    """One line: milliseconds since 1970 in UTC, a name from EVENTS, and the event's payload."""

    ts_ms: int
    event: str
    payload: dict[str, Any]


Subscriber = Callable[[Event], object]


class Telemetry:
    """Writer that appends events to a file and forwards them to sinks, isolating their failures."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open the file for appending; an incomplete last line of a killed writer is removed.

        Args:
            path: the file; created with its parents if missing.
            clock: seconds since 1970.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_end(path)
        self._path = path
        self._clock = clock
        self._subscribers: dict[Subscriber, str] = {}
        self._declared: set[str] = set()  # the user's metrics that this writer has declared
        # Unbuffered: a line is one write, so a kill loses at most the line in flight.
        self._file = path.open("ab", buffering=0)

    def emit(self, event: str, payload: Mapping[str, Any]) -> None:
        """Append one event, then pass it to every subscriber; credentials in it are masked.

        A ``metric_declared`` event precedes the first use of each of the user's metrics.

        Args:
            event: a name from EVENTS.
            payload: JSON values; a key with a slash is the name of a metric, and so is every key
                of ``values``.

        Raises:
            MensError: an unknown event or metric, a value that is not JSON or not finite, or a
                closed file; nothing is written in that case.
        """
        if self._file.closed:
            raise MensError("the telemetry is closed", where=str(self._path), found=event)
        record = self._record(event, payload)
        _refuse(record)
        for own in self._undeclared(payload):
            self._write(self._record("metric_declared", own))
        self._write(record)

    def _record(self, event: str, payload: Mapping[str, Any]) -> Event:
        at_ms = int(self._clock() * 1000)
        return {"ts_ms": at_ms, "event": event, "payload": screened(dict(payload))}

    def _write(self, record: Event) -> None:
        self._append(json_line(record, str(self._path)))
        self._hand_out(record)

    def _undeclared(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the declarations of the user's metrics that are used for the first time."""
        names = [name for name in _metrics_in(payload) if name not in self._declared]
        found = [own for name in names if (own := declaration(name)) is not None]
        self._declared.update(own["name"] for own in found)
        return found

    def subscribe(self, fn: Subscriber, name: str | None = None) -> None:
        """Pass every later event to `fn`, which must not modify it.

        A subscriber that raises is removed, and a ``sink_failed`` event is recorded.

        Args:
            fn: called with each record after it is written.
            name: its name in that event; by default the name of the function.
        """
        self._subscribers[fn] = name or _name_of(fn)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._subscribers.clear()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        """Write a whole line or nothing; a disk that fills up may first accept part of it."""
        end = self._path.stat().st_size
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    def _hand_out(self, record: Event) -> None:
        failed = []
        for fn, name in list(self._subscribers.items()):
            try:
                fn(record)
            except Exception as error:  # noqa: BLE001 - a sink that fails never stops training
                self._subscribers.pop(fn, None)
                failed.append({"sink": name, "error": f"{type(error).__name__}: {error}"})
        for payload in failed:
            self.emit("sink_failed", payload)


def read_events(path: Path) -> list[Event]:
    """Read a telemetry file; an incomplete last line is ignored.

    Raises:
        DataError: the file is missing, or another line is not an event (``file:line``).
        Problems: several lines are not.
    """
    events: list[Event] = read_lines(path, Event, torn_end=True)
    return events


def events_after(path: Path, offset: int) -> tuple[list[Event], int]:
    """Read the events added to a telemetry file that is still being written.

    Args:
        path: the file; if it is missing, there are no new events.
        offset: position in bytes up to which it was read before.

    Returns:
        The new events, and the offset to continue from.

    Raises:
        DataError: a line is not JSON.
    """
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        added = file.read()
    whole = added[: added.rfind(b"\n") + 1]  # a line is complete once it has its newline
    events: list[Any] = [parse_json(line, str(path)) for line in whole.splitlines()]
    return events, offset + len(whole)


def last_end(path: Path) -> dict[str, Any]:
    """Return the payload of the last ``run_finished`` event; empty if there is none.

    Other lines are not parsed, so this is quick for a long run.

    Raises:
        DataError: such a line is not JSON.
    """
    if not path.is_file():
        return {}
    whole = path.read_bytes()
    ends = [line for line in whole.split(b"\n")[:-1] if b"run_finished" in line]
    for line in reversed(ends):
        event = parse_json(line, str(path))
        if isinstance(event, dict) and event.get("event") == "run_finished":
            return dict(event.get("payload") or {})
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSeries:
    """A user's metric: its declaration, and its (step, value) points in order of arrival."""

    declaration: dict[str, Any]
    points: list[tuple[int, float | None]] = field(default_factory=list)

    @property
    def value(self) -> float | None:
        """The whole series as one number; None if no value was finite."""
        return reduced((value for _, value in self.points), self.declaration["reduction"])


def own_series(events: Iterable[Event]) -> dict[str, OwnSeries]:
    """Return the user's metrics of the tuned model, by name."""
    found: dict[str, OwnSeries] = {}
    for event in events:
        payload = event["payload"]
        match event["event"]:
            case "metric_declared":
                found.setdefault(payload["name"], OwnSeries(declaration=payload))
                continue
            case "step":
                values = payload
            case "validation" if payload["condition"] == "tuned":
                values = payload
            case "logged" if "condition" not in payload:
                values = payload["values"]
            case _:
                continue
        for name in values.keys() & found.keys():
            found[name].points.append((payload["step"], values[name]))
    return found


def own_results(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, float | None]]:
    """Return the declarations of the user's metrics in a telemetry file, and their values.

    Metrics without a value under the tuned condition are omitted.
    """
    if b'"metric_declared"' not in path.read_bytes():
        return {}, {}
    series = {name: one for name, one in own_series(read_events(path)).items() if one.points}
    declared = {
        name: {key: value for key, value in one.declaration.items() if key != "name"}
        for name, one in series.items()
    }
    return declared, {name: one.value for name, one in series.items()}


def rewind(path: Path, step: int, *, validated: int | None = None) -> None:
    """Remove, atomically, the events of a stopped attempt after the step it is resumed from.

    Everything up to the ``checkpoint_saved`` event of that step is kept. If there is none, events
    of steps up to it and events without a step are kept, except ends.

    Args:
        path: the file; if it is missing, nothing is done.
        step: the optimizer step of the checkpoint.
        validated: number of recorded validations before the first step, which are not repeated;
            the events of others are removed. By default all are kept.

    Raises:
        DataError: as in `read_events`.
    """
    if not path.exists():
        return
    events = read_events(path)
    saved = [i for i, record in enumerate(events) if _is_checkpoint(record, step)]
    if saved:
        kept = events[: saved[-1] + 1]
    else:
        kept = [record for record in events if _is_kept(record, step)]
    first = [number for number, record in enumerate(kept) if _is_first_validation(record)]
    again = set() if validated is None else set(first[validated:])
    kept = [record for number, record in enumerate(kept) if number not in again]
    write_bytes(path, b"".join(json_line(record, str(path)) for record in kept))


def _refuse(record: Event) -> None:
    event, payload = record["event"], record["payload"]
    if event not in EVENTS:
        raise MensError("unknown event", found=event, expected=expected_name(event, EVENTS))
    problems = check_type(payload, dict[str, Any], f"telemetry: {event}")
    if problems:
        raise MensError(str(problems[0]), remedy="record null and the reason instead")
    for name in _metrics_in(payload):
        declaration(name)  # refuses an unknown one


def _metrics_in(payload: Mapping[str, Any]) -> list[str]:
    """Return the names of metrics in a payload that are not built in."""
    names = [key for key in payload if "/" in key and key not in BUILT_IN]
    return [*names, *payload.get("values", ())]


def _name_of(fn: Subscriber) -> str:
    owner = getattr(fn, "__self__", fn)
    return str(getattr(owner, "__qualname__", type(owner).__name__))


def _is_checkpoint(record: Event, step: int) -> bool:
    return record["event"] == "checkpoint_saved" and record["payload"].get("step") == step


def _is_first_validation(record: Event) -> bool:
    return record["event"] == "validation" and record["payload"].get("step") == 0


def _is_kept(record: Event, step: int) -> bool:
    return record["event"] not in _ENDS and record["payload"].get("step", step) <= step


class DocumentLoss(TypedDict):
    """The loss of one document under one condition.

    ``item_id`` is derived from its tokens and its supervised positions, so that runs over the same
    text give it the same id. ``loss`` is the sum over its ``tokens`` supervised tokens, in nats.
    """

    item_id: str
    condition: str
    loss: float
    tokens: int


def write_document_losses(path: Path, losses: Iterable[DocumentLoss]) -> None:
    """Write one line for each document and condition, atomically."""
    write_lines(path, losses, DocumentLoss)


def read_document_losses(path: Path) -> list[DocumentLoss]:
    """Read a file written by `write_document_losses`.

    Raises:
        DataError: the file is missing, or a line is malformed (``file:line``).
        Problems: several lines are.
    """
    losses: list[DocumentLoss] = read_lines(path, DocumentLoss)
    seen: set[tuple[str, str]] = set()
    problems = []
    for number, one in enumerate(losses, start=1):
        where = f"{path}:{number}"
        key = (one["condition"], one["item_id"])
        if key in seen:
            problems.append(DataError("occurs twice", where=where, found=one["item_id"]))
        if one["tokens"] < 1 or one["loss"] < 0:
            found = f"loss {one['loss']} over {one['tokens']} tokens"
            expected = "a loss of at least 0 over at least 1 token"
            problems.append(DataError("wrong value", where=where, found=found, expected=expected))
        seen.add(key)
    Problems.raise_if(problems)
    return losses
