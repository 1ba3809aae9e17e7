from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mens_exp.artifacts.attribution import Attribution
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir, runs
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.overrides import check

RECORDS = Path(__file__).resolve().parents[2] / "notebooks" / "records"
STUDY = sorted((run.path for run in runs(RECORDS / "study")), key=str)


def _commands():
    text = (RECORDS / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"python -m mens_exp (.*)", text)]


def test_records_are_small():
    """All records together stay small."""
    sizes = [path.stat().st_size for path in RECORDS.rglob("*") if path.is_file()]
    assert sum(sizes) < 300_000


@pytest.mark.parametrize("path", STUDY, ids=lambda path: path.name)
def test_run_is_whole(path):
    """Each record can be read, and its digest is the one the run wrote."""
    run = RunDir(path)
    manifest = Manifest.read(run.manifest)
    assert manifest.status is Status.SUCCEEDED
    assert Scorecard.read(run.scorecard).items == 4
    kept = [one for one in (run.scorecard, run.telemetry) if one.is_file()]
    assert [sha256_file(one) for one in kept] == [manifest.outputs[one.name] for one in kept]


def test_comparison_is_of_these_runs():
    """Two arms of three seeds name each run by the digest of its manifest here."""
    record = Comparison.read(RECORDS / "comparison" / "compare.json")
    assert {arm["name"]: arm["seeds"] for arm in record.arms} == {
        "lora.r=2": [1, 2, 3],
        "lora.r=16": [1, 2, 3],
    }
    assert {one["run_id"]: one["manifest_sha256"] for one in record.runs} == {
        path.name: sha256_file(RunDir(path).manifest) for path in STUDY
    }


def test_one_run_of_each_arm_has_its_telemetry():
    """Each has eight steps and a validation of the base before the first."""
    told = [RunDir(path).telemetry for path in STUDY if RunDir(path).telemetry.is_file()]
    assert [path.parent.name for path in told] == ["0_6fc0dd12", "3_14ba11e4"]
    for path in told:
        names = [event["event"] for event in read_events(path)]
        assert names.count("step") == 8
        assert names.index("validation") < names.index("step")


def test_attribution_is_the_one_its_run_wrote(tmp_path):
    """Written again, it has the digest in the manifest, white space included."""
    run = RunDir(RECORDS / "attribution")
    Attribution.read(run.attribution).write(tmp_path / "attribution.json")
    expected = Manifest.read(run.manifest).outputs["attribution.json"]
    assert sha256_file(tmp_path / "attribution.json") == expected


@pytest.mark.parametrize("words", _commands(), ids=lambda words: words[1])
def test_command_that_made_them_composes(words):
    """Each quoted command is accepted as it stands."""
    multirun = "-m" in words
    checked = check([word for word in words if word != "-m"], multirun=multirun)
    assert [str(problem) for problem in checked.problems] == []
    assert len(checked.cells) == (6 if multirun else 1)


def test_three_commands_are_quoted():
    """The page says how each of the three directories was made."""
    assert len(_commands()) == 3
