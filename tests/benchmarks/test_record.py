from __future__ import annotations

import json
import math

import pytest
import record
from record import Better, Results, Size

from mens_exp.errors import DataError, MensError, Problems

QUESTION = "How fast?"


@pytest.fixture
def stored(tmp_path, run_of):
    """Return a file of one run as JSON to be edited, and its path."""
    path = tmp_path / "speed.json"
    Results(name="speed", question=QUESTION, runs=[run_of()]).write(path)
    return json.loads(path.read_text("utf-8")), path


def read(value, path):
    path.write_text(json.dumps(value), "utf-8")
    return Results.read(path)


def begun(monkeypatch, tmp_path, *arguments):
    """Start a script called speed as a shell would."""
    monkeypatch.setattr("sys.argv", ["speed.py", "--results", str(tmp_path), *arguments])
    return record.begin(record.command_line("/somewhere/speed.py", "Speed."))


def test_a_file_reads_back_as_it_was_written(stored):
    """Every value round-trips."""
    value, path = stored
    found = Results.read(path)
    assert found.question == QUESTION
    assert found.runs == value["runs"]


def _without_name(run):
    del run["figures"][0]["name"]


def _twice(run):
    run["figures"].append(run["figures"][0])


def _null_without_reason(run):
    run["machine"]["cpu"] = None


def _reason_without_null(run):
    run["unknown"]["machine.cpu"] = "nobody asked"


WRONG = {
    "a value that is text": lambda run: run["figures"][0].update(value="100"),
    "a value that is true": lambda run: run["figures"][0].update(value=True),
    "a figure without its name": _without_name,
    "a key that is not known": lambda run: run["figures"][0].update(colour="red"),
    "two figures of one name": _twice,
    "no figure": lambda run: run["figures"].clear(),
    "a direction of its own": lambda run: run["figures"][0].update(better="bigger"),
    "a size of its own": lambda run: run.update(size="medium"),
    "a reference without its value": lambda run: run["figures"][0].update(reference_value=None),
    "a ratio to nothing": lambda run: run["figures"][0].update(reference_value=0),
    "a reference without its ratio": lambda run: run["figures"][0].update(ratio=None),
    "half a range": lambda run: run["figures"][0].update(lowest=1),
    "a short commit": lambda run: run.update(commit="0123456"),
    "a null without its reason": _null_without_reason,
    "a reason without its null": _reason_without_null,
    "a version that is a number": lambda run: run["versions"].update(torch=2.13),
    "no time": lambda run: run.pop("utc"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_a_file_with_a_wrong_value_is_refused(change, stored):
    """The error gives the place in the run."""
    value, path = stored
    change(value["runs"][0])
    with pytest.raises((DataError, Problems), match=r"runs\[0\]"):
        read(value, path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused(number, stored):
    """All spellings of JSON readers are tried."""
    value, path = stored
    value["runs"][0]["figures"][0]["value"] = "HERE"
    path.write_text(json.dumps(value).replace('"HERE"', number), "utf-8")
    with pytest.raises(DataError):
        Results.read(path)


def test_a_repeated_key_is_refused(stored):
    """The second value would silently replace the first."""
    _, path = stored
    text = path.read_text("utf-8").replace('"value": 100', '"value": 100, "value": 200')
    path.write_text(text, "utf-8")
    with pytest.raises(DataError, match="twice"):
        Results.read(path)


@pytest.mark.parametrize("change", [{"runs": []}, {"format": "other"}, {"version": 2}])
def test_another_file_is_refused(change, stored):
    """Files without a run, of another format or of a newer version are refused."""
    value, path = stored
    with pytest.raises(DataError):
        read({**value, **change}, path)


def test_an_unknown_value_with_its_reason_is_read(stored):
    """Runs copied from text have fewer values than a script writes."""
    value, path = stored
    value["runs"][0]["commit"] = None
    value["runs"][0]["machine"]["cpu"] = None
    value["runs"][0]["unknown"] = {"commit": "not stated", "machine.cpu": "not stated"}
    assert read(value, path).runs[0]["unknown"]["commit"] == "not stated"


def test_a_reference_of_nothing_has_no_ratio(stored):
    """For example, no study was wrong by the reference's count."""
    value, path = stored
    value["runs"][0]["figures"][0].update(reference_value=0, ratio=None)
    assert read(value, path).runs[0]["figures"][0]["ratio"] is None


def test_a_figure_is_the_median_of_its_rounds():
    """By hand: the ratio is the median of 2/1, 4/8 and 9/3, not 4 / 3."""
    found = record.figure("speed", [2, 4, 9], "s", Better.LOWER, ("GEMM", [1, 8, 3]))
    assert found["value"] == 4
    assert (found["lowest"], found["highest"]) == (2, 9)
    assert found["reference_value"] == 3
    assert found["ratio"] == 2


def test_a_figure_of_one_round_has_no_range():
    """Its ratio to a reference of several rounds uses their median: 6 / 3."""
    found = record.figure("speed", 6.0, "s", None, ("GEMM", [2, 3, 9]))
    assert found["lowest"] is None
    assert found["highest"] is None
    assert found["ratio"] == 2


def test_runs_are_added_to_those_that_there_are(monkeypatch, tmp_path, figure_of, capsys):
    """Runs are sorted by age, each with the printed figures."""
    for number in (1, 2):
        given = begun(monkeypatch, tmp_path)
        record.finish(QUESTION, [figure_of(value=number)], given)
    runs = Results.read(tmp_path / "speed.json").runs
    assert [run["figures"][0]["value"] for run in runs] == [1, 2]
    assert runs[0]["size"] == Size.FULL
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_is_not_written(value, monkeypatch, tmp_path, figure_of):
    """Nothing of that run is written."""
    given = begun(monkeypatch, tmp_path)
    with pytest.raises(MensError):
        record.finish(QUESTION, [figure_of(value=value)], given)
    assert list(tmp_path.iterdir()) == []


def test_two_figures_of_one_name_are_not_written(monkeypatch, tmp_path, figure_of):
    """The page could not tell them apart."""
    given = begun(monkeypatch, tmp_path)
    with pytest.raises(MensError, match="speed"):
        record.finish(QUESTION, [figure_of(), figure_of(value=1)], given)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_ends_the_script_before_its_work(monkeypatch, tmp_path, capsys):
    """Results that took minutes could not be added to it."""
    (tmp_path / "speed.json").write_text("{}", "utf-8")
    with pytest.raises(SystemExit) as ended:
        begun(monkeypatch, tmp_path)
    assert ended.value.code == 2
    assert "speed.json" in capsys.readouterr().err


def test_a_command_names_no_path_of_this_machine(monkeypatch, tmp_path):
    """The note and the path of the results, which do not affect figures, are left out too."""
    parser = record.command_line("/somewhere/speed.py", "Speed.")
    parser.add_argument("rest", nargs="*")
    words = ["--note=busy", "3", "data.path=/home/me/rows.jsonl", "~/run", "--smallest"]
    monkeypatch.setattr("sys.argv", ["speed.py", *words, "--results", str(tmp_path)])
    command = record.begin(parser).described["command"]
    assert command == "python benchmarks/speed.py 3 data.path=PATH PATH --smallest"
