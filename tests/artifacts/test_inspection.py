"""inspection.json is strict, and an outcome has to agree with its values."""

from __future__ import annotations

import json

import pytest

from mens_exp.artifacts.certificate import (
    ArtifactKind,
    Check,
    Inspection,
    Link,
    Outcome,
    Verification,
)
from mens_exp.errors import DataError, MensError


def inspection(outcome, recorded, found):
    check = Check(
        name="a",
        step=None,
        outcome=outcome,
        recorded=recorded,
        found=found,
        note="why not",
        link=Link.BASE,
        of="a run",
    )
    return Inspection(
        kind=ArtifactKind.RUN,
        path="run",
        what="a run",
        verification=Verification(checks=[check], unchecked=[]),
    )


@pytest.mark.parametrize(
    ("outcome", "recorded", "found"),
    [
        (Outcome.EQUAL, 1.5, 1.5),
        (Outcome.DIFFERS, "aa", "bb"),
        (Outcome.CLOSE, 1.0, 1.0000001),
        (Outcome.NOT_HERE, "aa", None),
    ],
)
def test_what_is_written_is_read_back(tmp_path, outcome, recorded, found):
    """Each outcome is tried with values that agree with it."""
    written = inspection(outcome, recorded, found)
    written.write(tmp_path / "inspection.json")
    assert Inspection.read(tmp_path / "inspection.json") == written


@pytest.mark.parametrize(
    ("outcome", "recorded", "found"), [(Outcome.EQUAL, 1, 2), (Outcome.DIFFERS, 1, 1)]
)
def test_an_outcome_that_its_values_deny_is_not_written(tmp_path, outcome, recorded, found):
    """EQUAL with two values or DIFFERS with one is refused."""
    with pytest.raises(MensError, match="contradicts the recorded values"):
        inspection(outcome, recorded, found).write(tmp_path / "inspection.json")
    assert not (tmp_path / "inspection.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 4}, "newer version"),
        ({"format": "mens_exp_run"}, "not this format"),
        ({"kind": "lorry"}, "kind"),
        ({"mood": "good"}, "unknown key"),
    ],
)
def test_a_record_of_another_kind_is_refused(tmp_path, changes, message):
    """A newer version, another format, or an unknown key or value is refused."""
    path = tmp_path / "inspection.json"
    inspection(Outcome.EQUAL, 1, 1).write(path)
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    with pytest.raises(DataError, match=message):
        Inspection.read(path)


def test_a_record_of_version_1_is_read(tmp_path):
    """Its checks have neither `link` nor `of`."""
    path = tmp_path / "inspection.json"
    written = inspection(Outcome.EQUAL, 1, 1)
    written.write(path)
    value = json.loads(path.read_text("utf-8")) | {"version": 1}
    for check in value["verification"]["checks"]:
        del check["link"], check["of"]
    del value["verification"]["unchecked"]
    path.write_text(json.dumps(value), "utf-8")
    read = Inspection.read(path)
    assert [one["link"] for one in read.verification["checks"]] == [None]
    assert read.verification["unchecked"] == []
    del value["verification"]
    path.write_text(json.dumps(value), "utf-8")
    assert Inspection.read(path).verification is None
    path.write_text(json.dumps(value | {"verification": {"checks": 7}}), "utf-8")
    with pytest.raises(MensError):
        Inspection.read(path)
