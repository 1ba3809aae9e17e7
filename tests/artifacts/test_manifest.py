from __future__ import annotations

import json
import re

import pytest

from mens_exp.artifacts.manifest import Manifest, Status, utc_now
from mens_exp.errors import DataError, MensError, Problems


def damaged(golden, target, **changes):
    value = json.loads((golden / "manifest_v1.json").read_text("utf-8"))
    target.write_text(json.dumps(value | changes))
    return target


def test_the_committed_manifest_of_version_1_is_read(golden, manifest):
    """Every field has the expected value."""
    read = Manifest.read(golden / "manifest_v1.json")
    assert read == manifest
    assert read.status is Status.SUCCEEDED


def test_a_manifest_is_written_as_committed(golden, manifest, tmp_path):
    """The bytes are the golden ones."""
    manifest.write(tmp_path / "manifest.json")
    assert (tmp_path / "manifest.json").read_bytes() == (golden / "manifest_v1.json").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "mens_exp_plan"}, "format: not this format.*expected mens_exp_run"),
        ({"version": 2}, "newer version.*expected at most 1.*Next: upgrade"),
        ({"version": 0}, "version: wrong value"),
        ({"version": True}, "version: wrong value"),
        ({"sedd": 1}, "sedd: unknown key.*the nearest is seed"),
        ({"seed": "7"}, r"seed: wrong value · found '7' \(str\) · expected an integer"),
        ({"seed": True}, "seed: wrong value"),
        ({"status": "done"}, "status: wrong value.*expected one of cancelled, failed, started"),
        ({"experiment": 3}, "experiment: wrong value.*expected a string"),
        ({"overrides": ["a", 1]}, r"overrides\[1\]: wrong value"),
        ({"choices": {"lora": 1}}, r"choices\.lora: wrong value"),
        ({"attempts": [{}]}, r"attempts\[0\]\.started_utc: missing key"),
        ({"error": {"type": "E"}}, r"error\.message: missing key"),
        ({"facts": []}, "facts: wrong value.*expected an object"),
        ({"started_utc": "2026-11-20 05:58"}, "started_utc: wrong value.*expected a UTC time"),
        ({"outputs": {"../x": "ab" * 32}}, "expected a relative path"),
        ({"outputs": {"x": "ab"}}, "expected a SHA-256"),
        ({"contract": {"digest": "ab"}}, r"contract\.digest.*expected a SHA-256"),
        ({"contract": {}}, r"contract\.digest.*expected a SHA-256"),
    ],
)
def test_a_manifest_is_refused(golden, tmp_path, changes, message):
    """The message names each problem with the file and the dotted path."""
    path = damaged(golden, tmp_path / "manifest.json", **changes)
    with pytest.raises((DataError, Problems), match=message) as caught:
        Manifest.read(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_problems_of_a_manifest_are_reported_together(golden, tmp_path):
    """Two wrong values give two lines."""
    path = damaged(golden, tmp_path / "manifest.json", seed=None, task=1)
    with pytest.raises(Problems) as caught:
        Manifest.read(path)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "expected an object"),
        (b"{}", "not this format"),
        (b'{"format": "mens_exp_run"}', "version: wrong value"),
        (b'{"format": "mens_exp_run", "version": 1}', "seed: missing key"),
        (b'{"seed": 1, "seed": 2}', "the key 'seed' twice"),
        (b'{"seed": NaN}', "NaN"),
        (b"\xff", "not JSON"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path, content, message):
    """Such a file is never read as a record of defaults."""
    (tmp_path / "m.json").write_bytes(content)
    with pytest.raises((DataError, Problems), match=message):
        Manifest.read(tmp_path / "m.json")


def test_a_missing_manifest_is_refused(tmp_path):
    """The message names the file."""
    with pytest.raises(DataError, match=r"m\.json: the file cannot be read"):
        Manifest.read(tmp_path / "m.json")


def test_what_could_not_be_read_back_is_not_written(tmp_path, manifest):
    """A non-finite result is refused, and the file is not created."""
    manifest.results["steps"] = float("nan")
    with pytest.raises(MensError, match=r"results\.steps") as caught:
        manifest.write(tmp_path / "manifest.json")
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_the_time_is_written_in_utc_to_the_millisecond():
    """The format is the documented one."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", utc_now())


def test_a_manifest_from_before_there_were_contracts_is_read(golden, tmp_path):
    """The key is missing there, so the contract is read as None."""
    old = json.loads((golden / "manifest_v1.json").read_text("utf-8"))
    del old["contract"]
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(old), "utf-8")
    assert Manifest.read(path).contract is None
