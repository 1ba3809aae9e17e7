from __future__ import annotations

import json
from dataclasses import replace

import pytest
from item_events import item_event

from mens_exp.artifacts.scorecard import (
    Condition,
    Scorecard,
    read_item_events,
    write_item_events,
)
from mens_exp.errors import DataError, MensError, Problems

EVENT = item_event(
    item_id="bisect.insort",
    condition=Condition.BASE,
    completion="def f(:\u2028",
    parses=False,
    error="invalid syntax",
    tokens_in=3,
    tokens_out=5,
    attempts=2,
    compile_pass_1=False,
    compile_pass_n=False,
    canonical_pass=False,
    repair_depth=None,
    repair_stalled=True,
    error_count=2,
    latency_ms=12.5,
    time_to_first_valid_ms=None,
    richness=0.2,
    style="last block",
    unknown={"task_success": "the suite runs nothing"},
)
EVENT_OF_1 = {
    "item_id": "bisect.insort",
    "condition": "tuned",
    "prompt": "Write it.",
    "reference": "def f(): ...",
    "completion": "def f(): pass",
    "parses": True,
    "finished": True,
    "error": None,
    "tokens_in": 3,
    "tokens_out": 5,
}


def test_the_committed_scorecard_of_version_1_is_read(golden, scorecard):
    """Version 1 scored one greedy answer per item and ran no code."""
    assert Scorecard.read(golden / "scorecard_v1.json") == replace(
        scorecard, metrics={}, declared={}
    )


def test_the_committed_scorecard_of_version_2_is_read(golden, scorecard):
    """Version 2 had no user-defined metrics."""
    assert Scorecard.read(golden / "scorecard_v2.json") == replace(
        scorecard, metrics={}, declared={}
    )


def test_the_committed_scorecard_of_version_3_is_read(golden, scorecard):
    """Every field has the expected value."""
    assert Scorecard.read(golden / "scorecard_v3.json") == scorecard


def test_a_scorecard_is_written_as_committed(golden, scorecard, tmp_path):
    """The bytes are the golden ones."""
    scorecard.write(tmp_path / "s.json")
    assert (tmp_path / "s.json").read_bytes() == (golden / "scorecard_v3.json").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "mens_exp_run"}, "not this format"),
        ({"version": 4}, "newer version"),
        ({"item": 3}, "item: unknown key.*the nearest is items"),
        ({"items": 3.0}, "items: wrong value.*expected an integer"),
        ({"items": -1}, "items: wrong value.*expected 0 or more"),
        ({"conditions": {"base": {"parse_rate": "1"}}}, r"conditions\.base\.parse_rate"),
        ({"conditions": {"base": {"parse_rate": True}}}, "expected a finite number or an integer"),
    ],
)
def test_a_scorecard_is_refused(golden, tmp_path, changes, message):
    """The message names each problem with its path."""
    value = json.loads((golden / "scorecard_v3.json").read_text("utf-8"))
    (tmp_path / "s.json").write_text(json.dumps(value | changes))
    with pytest.raises((DataError, Problems), match=message):
        Scorecard.read(tmp_path / "s.json")


def test_a_scorecard_with_a_rate_that_is_not_finite_is_not_written(tmp_path, scorecard):
    """A mean over no items has to be null, not NaN."""
    scorecard.conditions["base"]["parse_rate"] = float("nan")
    with pytest.raises(MensError, match=r"conditions\.base\.parse_rate"):
        scorecard.write(tmp_path / "s.json")


def test_item_events_come_back_as_written(tmp_path):
    """Each event is one line, even if the completion contains a line separator."""
    path = tmp_path / "events.jsonl"
    tuned = {**EVENT, "condition": Condition.TUNED, "error": None}
    write_item_events(path, [EVENT, tuned])
    assert path.read_bytes().count(b"\n") == 2
    assert read_item_events(path) == [EVENT, tuned]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (json.dumps({**EVENT, "parses": 1}), "parses: wrong value.*expected true or false"),
        (json.dumps({**EVENT, "condition": 1}), "condition: wrong.*expected a string"),
        (json.dumps({**EVENT, "version": 4}), "newer version.*expected at most 3"),
        (json.dumps({**EVENT_OF_1, "attempts": None}), "attempts"),
        (json.dumps({**EVENT, "token_in": 1}), "token_in: unknown key.*nearest is tokens_in"),
        ('{"item_id":', "not JSON"),
    ],
)
def test_an_item_event_is_refused_with_its_line(tmp_path, line, message):
    """Even a torn last line: the file is written atomically."""
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(EVENT) + "\n" + line)
    with pytest.raises((DataError, Problems), match=message) as caught:
        read_item_events(path)
    assert f"{path}:2" in str(caught.value)


def test_an_item_event_of_version_1_is_read(tmp_path):
    """Values that it did not record are null with a reason; the others are kept."""
    path = tmp_path / "events.jsonl"
    broken = {**EVENT_OF_1, "parses": False, "error": "SyntaxError: f"}
    path.write_text("".join(json.dumps(one) + "\n" for one in (EVENT_OF_1, broken)))
    good, bad = read_item_events(path)
    assert {name: good[name] for name in EVENT_OF_1} == EVENT_OF_1
    assert (good["version"], good["sample"], good["attempts"], good["group"]) == (3, 0, 1, "")
    assert (good["compile_pass_1"], good["compile_pass_n"], good["repair_depth"]) == (True, True, 0)
    assert (bad["compile_pass_1"], bad["repair_depth"], bad["error_count"]) == (False, None, 1)
    assert good["latency_ms"] is good["task_success"] is None
    assert "version 1" in good["unknown"]["latency_ms"]
    assert "repair_depth" in bad["unknown"]
    write_item_events(path, [good, bad])
    assert read_item_events(path) == [good, bad]


def test_an_item_event_of_version_2_is_read_without_its_style(tmp_path):
    """A missing `style` becomes null with a reason; any other missing key is refused."""
    path = tmp_path / "events.jsonl"
    old = {name: value for name, value in EVENT.items() if name != "style"} | {"version": 2}
    path.write_text(json.dumps(old) + "\n")
    (read,) = read_item_events(path)
    reason = "written by version 2, which did not record it"
    unknown = {**EVENT["unknown"], "style": reason}
    assert read == {**EVENT, "version": 3, "style": None, "unknown": unknown}
    path.write_text(json.dumps({**old, "version": 3}) + "\n")
    with pytest.raises(DataError, match="style: missing key"):
        read_item_events(path)
    del old["attempts"]
    path.write_text(json.dumps(old) + "\n")
    with pytest.raises(DataError, match="attempts: missing key"):
        read_item_events(path)


def test_a_wrong_item_event_is_not_written(tmp_path):
    """The file is not created."""
    wrong = {**EVENT, "attempts": None}
    with pytest.raises(MensError, match="attempts"):
        write_item_events(tmp_path / "events.jsonl", [wrong])
    assert list(tmp_path.iterdir()) == []
