from __future__ import annotations

import errno
import io

import pytest

from mens_exp.artifacts.metrics import declares, own_metric
from mens_exp.artifacts.telemetry import (
    Telemetry,
    events_after,
    own_results,
    own_series,
    read_events,
    rewind,
)
from mens_exp.errors import DataError, MensError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "telemetry.jsonl"


def emit_all(path, *events):
    with Telemetry(path, clock=lambda: 0.0) as telemetry:
        for name, payload in events:
            telemetry.emit(name, payload)


def summary(path):
    return [(record["event"], record["payload"].get("step")) for record in read_events(path)]


def test_an_event_is_one_line_with_milliseconds(path):
    """The line reaches the disk before the file is closed."""
    telemetry = Telemetry(path, clock=lambda: 1.2345)
    telemetry.emit("step", {"step": 1, "train/loss": 0.5})
    assert path.read_bytes() == (
        b'{"event":"step","payload":{"step":1,"train/loss":0.5},"ts_ms":1234}\n'
    )
    telemetry.close()


@pytest.mark.parametrize(
    ("event", "payload", "message"),
    [
        ("stpe", {}, "unknown event.*the nearest is step"),
        ("step", {"train/los": 1.0}, "unknown metric.*the nearest is train/loss"),
        ("step", {"train/loss": float("nan")}, r"telemetry: step\.train/loss.*finite"),
        ("scorecard", {"conditions": {"base": [float("inf")]}}, r"conditions\.base\[0\].*finite"),
        ("step", {"step": object()}, "JSON value"),
    ],
)
def test_an_event_is_refused(path, event, payload, message):
    """Nothing of a refused event is written."""
    with Telemetry(path) as telemetry, pytest.raises(MensError, match=message):
        telemetry.emit(event, payload)
    assert path.read_bytes() == b""


def test_closing_twice_is_no_error_and_emitting_afterwards_is(path):
    """A double teardown is allowed, but a late event must not be lost silently."""
    telemetry = Telemetry(path)
    telemetry.close()
    telemetry.close()
    with pytest.raises(MensError, match="closed"):
        telemetry.emit("step", {"step": 1})


def test_a_subscriber_gets_every_later_event(path):
    """Earlier events are not replayed."""
    seen = []
    with Telemetry(path, clock=lambda: 2.0) as telemetry:
        telemetry.emit("plan", {})
        telemetry.subscribe(seen.append)
        telemetry.emit("step", {"step": 1})
    assert seen == [{"ts_ms": 2000, "event": "step", "payload": {"step": 1}}]


def test_a_subscriber_that_raises_is_dropped_and_recorded(path):
    """The other subscriber gets the event and a warning, and training continues."""
    seen = []
    calls = []

    def broken(record):
        calls.append(record["event"])
        raise OSError("network down")

    with Telemetry(path) as telemetry:
        telemetry.subscribe(broken, name="wandb")
        telemetry.subscribe(lambda record: seen.append(record["event"]))
        telemetry.emit("plan", {})
        telemetry.emit("facts", {})
    assert calls == ["plan"]
    assert seen == ["plan", "sink_failed", "facts"]
    assert read_events(path)[1]["payload"] == {"sink": "wandb", "error": "OSError: network down"}


def test_a_torn_last_line_is_left_out(path):
    """A killed writer leaves a partial event; the events before it are read."""
    emit_all(path, ("step", {"step": 1}))
    with path.open("ab") as file:
        file.write(b'{"event":"st')
    assert summary(path) == [("step", 1)]


def test_reopening_cuts_a_torn_last_line_off(path):
    """The next event starts on a line of its own."""
    emit_all(path, ("step", {"step": 1}))
    with path.open("ab") as file:
        file.write(b'{"event":"st')
    emit_all(path, ("step", {"step": 2}))
    assert summary(path) == [("step", 1), ("step", 2)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"event":"st', "not JSON"),
        (b'{"event":"step","payload":{},"ts_ms":0,"extra":1}', "extra: unknown key"),
        (b'{"event":"step","payload":{}}', "ts_ms: missing key"),
        (b'{"event":"step","payload":{"a":NaN},"ts_ms":0}', "NaN"),
        (b'{"event":"step","payload":{},"payload":{},"ts_ms":0}', "'payload' twice"),
        (b"", "not JSON"),
    ],
)
def test_a_broken_line_elsewhere_is_refused_with_its_number(path, line, message):
    """The second of three lines is named."""
    emit_all(path, ("step", {"step": 1}))
    whole = path.read_bytes()
    path.write_bytes(whole + line + b"\n" + whole)
    with pytest.raises(DataError, match=message) as caught:
        read_events(path)
    assert f"{path}:2:" in str(caught.value)


def test_a_missing_file_is_refused(path):
    """The message names the file."""
    with pytest.raises(DataError, match=r"telemetry\.jsonl: the file cannot be read"):
        read_events(path)


def test_rewinding_keeps_what_came_up_to_the_checkpoint(path):
    """Later steps, and the end of the attempt to be continued, are removed."""
    emit_all(
        path,
        ("plan", {}),
        ("step", {"step": 1}),
        ("step", {"step": 2}),
        ("checkpoint_saved", {"step": 2}),
        ("step", {"step": 3}),
        ("train_complete", {"step": 3}),
        ("run_finished", {}),
    )
    rewind(path, 2)
    assert summary(path) == [("plan", None), ("step", 1), ("step", 2), ("checkpoint_saved", 2)]


def test_rewinding_without_the_checkpoints_event_goes_by_step(path):
    """Events without a step are kept, except the events that end an attempt."""
    emit_all(
        path,
        ("plan", {}),
        ("step", {"step": 1}),
        ("step", {"step": 2}),
        ("warning", {"text": "slow"}),
        ("train_complete", {"step": 1}),
        ("run_finished", {}),
    )
    rewind(path, 1)
    assert summary(path) == [("plan", None), ("step", 1), ("warning", None)]


def test_rewinding_what_is_not_there_does_nothing(path):
    """A run killed before its first event has no file."""
    rewind(path, 1)
    assert not path.exists()


def test_a_file_that_grows_is_read_by_whole_lines(tmp_path):
    """No line is read twice, and a partial line is read once it is complete."""
    path = tmp_path / "telemetry.jsonl"
    assert events_after(path, 0) == ([], 0)
    path.write_bytes(b'{"ts_ms":1,"event":"step","payload":{}}\n{"ts_ms":2,')
    events, offset = events_after(path, 0)
    assert [event["ts_ms"] for event in events] == [1]
    with path.open("ab") as file:
        file.write(b'"event":"step","payload":{}}\n')
    events, offset = events_after(path, offset)
    assert [event["ts_ms"] for event in events] == [2]
    assert events_after(path, offset) == ([], path.stat().st_size)


class Filling(io.FileIO):
    """A file that accepts half of each write, and nothing once `room` is used up."""

    room = 10**6

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(max(1, len(data) // 2), self.room)
        self.room -= taken
        return super().write(bytes(data[:taken]))


def test_a_line_that_is_written_in_parts_is_whole(tmp_path):
    """A short write raises no error, so the rest has to be written as well."""
    with Telemetry(tmp_path / "t.jsonl") as telemetry:
        telemetry._file.close()
        telemetry._file = Filling(tmp_path / "t.jsonl", "ab")
        telemetry.emit("step", {"step": 1})
        telemetry.emit("step", {"step": 2})
    assert [e["payload"]["step"] for e in read_events(tmp_path / "t.jsonl")] == [1, 2]


def test_a_line_that_a_full_disk_cut_is_taken_back(tmp_path):
    """The partial line is removed, so a later event starts on a line of its own."""
    with Telemetry(tmp_path / "t.jsonl") as telemetry:
        telemetry._file.close()
        telemetry._file = file = Filling(tmp_path / "t.jsonl", "ab")
        telemetry.emit("step", {"step": 1})
        file.room = 20
        with pytest.raises(OSError, match="No space left"):
            telemetry.emit("step", {"step": 2})
        file.room = 10**6
        telemetry.emit("step", {"step": 3})
    assert [e["payload"]["step"] for e in read_events(tmp_path / "t.jsonl")] == [1, 3]


def test_a_metric_of_the_users_is_declared_before_its_first_value(path):
    """Once per file, since a reader may lack the code that declares the metric."""
    declares("probe/x", unit="nats", direction="min", reduction="min")(object)
    own_metric("bare")
    with Telemetry(path) as telemetry:
        telemetry.emit("step", {"step": 1, "probe/x": 3.0})
        telemetry.emit("logged", {"step": 1, "values": {"bare": 1.0, "probe/x": 2.0}})
        telemetry.emit("logged", {"step": 2, "values": {"bare": None}})
        telemetry.emit("logged", {"step": 2, "condition": "base", "values": {"bare": 9.0}})
        with pytest.raises(MensError, match="unknown metric"):
            telemetry.emit("logged", {"step": 2, "values": {"unused": 1.0}})
    events = read_events(path)
    assert [one["event"] for one in events] == [
        *("metric_declared", "step", "metric_declared", "logged", "logged", "logged"),
    ]
    assert events[0]["payload"] == {
        "name": "probe/x",
        "unit": "nats",
        "direction": "min",
        "reduction": "min",
        "note": "",
    }
    series = own_series(events)
    assert series["probe/x"].points == [(1, 3.0), (1, 2.0)]
    assert series["bare"].points == [(1, 1.0), (2, None)]
    declared, values = own_results(path)
    assert values == {"probe/x": 2.0, "bare": 1.0}
    assert declared["probe/x"]["unit"] == "nats"


def test_a_file_without_metrics_of_the_users_has_no_results_of_them(path):
    """Built-in metrics do not count."""
    emit_all(path, ("step", {"step": 1, "train/loss": 0.5}))
    assert own_results(path) == ({}, {})
