"""The dry mode of benchmarks/gpu.py: a CUDA machine's slices on the CPU with tiny shapes."""

from __future__ import annotations

import json
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import fork_server
import gpu_results
import gpu_slices
import pytest
import torch
from gpu_results import SLICES, GpuResults, State

from mens_exp.errors import MensError

PASSED = "tests/gpu/test_qlora_cuda.py::test_the_main_path_runs_on_the_gpu"
SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "gpu.py")


def run(place, *words, code=0):
    """Run the script with enough time for a busy machine, and return its output."""
    command = [sys.executable, SCRIPT, "--results", str(place), "--minutes", "14", *words]
    done = fork_server.run(command, cwd=place, capture_output=True)
    printed = (done.stdout + done.stderr).decode()
    assert done.returncode == code, printed
    return printed


def slices_in(place, name="gpu_dry"):
    return GpuResults.read(place / f"{name}.json").slices


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """Return the results of a dry run in two starts; a GPU test had passed before the second."""
    place = tmp_path_factory.mktemp("gpu")
    run(place, "--dry", "2x2048", "nccl")
    results = GpuResults.read(place / "gpu_dry.json")
    first = dict(results.slices)
    stopped = {"state": State.STOPPED, "reason": "out of time", "figures": []}
    results.slices["tests"] = {**first["nccl"], **stopped, "tests": {PASSED: "passed"}}
    results.write(place / "gpu_dry.json")
    return place, first, run(place, "--dry")


@pytest.fixture
def stored(dry, tmp_path):
    """Return a copy of those results as JSON to be edited, and its path."""
    value = json.loads((dry[0] / "gpu_dry.json").read_text("utf-8"))
    return value, tmp_path / "gpu_dry.json"


def test_a_dry_run_leaves_a_result_of_every_slice(dry):
    """Figures are finite, with commit, machine and versions; the missing GPU has a reason."""
    found = slices_in(dry[0])
    assert list(found) == sorted(SLICES)
    for name, one in found.items():
        assert one["state"] == State.DONE, one["reason"]
        assert one["command"] == f"python benchmarks/gpu.py {name} --dry"
        assert re.fullmatch("[0-9a-f]{40}", one["commit"])
        assert one["versions"]["torch"] == torch.__version__
        assert one["figures"]
        assert all(math.isfinite(figure["value"]) for figure in one["figures"])
        if not torch.cuda.is_available():
            assert one["card"] is None
            assert "finds no CUDA device" in one["unknown"]["card"]


def test_a_second_start_leaves_alone_what_is_done(dry):
    """It runs the slices that were not requested in the first start."""
    place, first, printed = dry
    found = slices_in(place)
    for name in ("2x2048", "nccl"):
        assert f"{name}: done already" in printed
        assert found[name] == first[name]
    assert set(found) - set(first) == {"1x8192", "main_job", "tests"}


@pytest.mark.parametrize("name", ["2x2048", "1x8192"])
def test_libraries_are_stepped_in_turns(name, dry):
    """Our figure has a ratio to each library, and its memory beside the plan's."""
    one = slices_in(dry[0])[name]
    figures = {figure["name"]: figure for figure in one["figures"]}
    assert "Unsloth" in one["missing"]
    assert "TRL" in one["facts"], one["missing"]
    assert one["facts"]["mens_exp"] == "activations recomputed; 2 turns, 4 steps"
    against = figures["mens_exp beside TRL: speed"]
    assert against["ratio"] > 0
    assert against["value"] == figures["mens_exp: speed"]["value"]
    memory = figures["mens_exp: peak memory"]
    assert memory["reference"] == "the plan's figure"
    assert 0 < memory["reference_value"] < 1
    assert figures["mens_exp beside mens_exp in FP8: speed"]["ratio"] > 0
    liger = "mens_exp with Liger-Kernel"
    if find_spec("liger_kernel") is None:
        assert one["missing"][liger].startswith("not installed: liger_kernel")
    else:  # on the CPU torch's kernels are used
        assert one["facts"][liger].startswith(one["facts"]["mens_exp"])
        assert figures[f"mens_exp beside {liger}: speed"]["ratio"] > 0
    assert ("mens_exp without checkpointing" in one["facts"]) == (name == "2x2048")


def test_a_dry_run_meets_no_goal(dry):
    """Its figures mean nothing, as the page says at the top."""
    goals = [goal for one in slices_in(dry[0]).values() for goal in one["goals"]]
    assert [goal["name"] for goal in goals] == ["speed on one H200", "peak memory"]
    assert {goal["met"] for goal in goals} == {None}
    page = (dry[0] / "gpu_dry.md").read_text("utf-8")
    assert "its figures mean nothing" in page.partition("## ")[0]
    assert "cannot be told here" in page
    for title in SLICES.values():
        assert f"## {title}" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_machine_without_a_gpu_skips_every_slice_with_the_reason(tmp_path):
    """Results of real runs are in a separate file."""
    run(tmp_path)
    found = slices_in(tmp_path, "gpu")
    assert {one["state"] for one in found.values()} == {State.SKIPPED}
    assert all("finds no CUDA device" in one["reason"] for one in found.values())
    page = (tmp_path / "gpu.md").read_text("utf-8")
    assert "figures mean nothing" not in page


def test_again_measures_anew(dry, tmp_path, stored):
    """Only the requested slices are measured again."""
    value, path = stored
    path.write_text(json.dumps(value), "utf-8")
    run(tmp_path, "--dry", "--again", "nccl")
    found = slices_in(tmp_path)
    assert found["nccl"]["utc"] > value["slices"]["nccl"]["utc"]
    assert found["2x2048"] == value["slices"]["2x2048"]


def test_a_slice_stops_in_time_and_the_next_start_runs_it(tmp_path):
    """A sixteenth of a minute is below the reserve for ending its processes."""
    printed = run(tmp_path, "--dry", "2x2048", "nccl", "--minutes", "0.0625")
    assert "run the command again for 2x2048, nccl" in printed
    stopped = slices_in(tmp_path)
    for name in ("2x2048", "nccl"):
        assert stopped[name]["state"] == State.STOPPED
        assert stopped[name]["reason"] == "out of time"
    assert "nothing is left" in run(tmp_path, "--dry", "nccl")
    assert slices_in(tmp_path)["nccl"]["state"] == State.DONE


def test_tests_go_on_after_those_that_have_ended(dry):
    """A passed test is not repeated, and every other test of the directory runs."""
    tests = slices_in(dry[0])["tests"]["tests"]
    assert tests[PASSED] == "passed"
    files = {name.partition("::")[0] for name in tests}
    there = Path(SCRIPT).parents[1].glob("tests/gpu/test_*.py")
    assert files == {f"tests/gpu/{path.name}" for path in there}
    if not torch.cuda.is_available():
        others = {outcome for name, outcome in tests.items() if name != PASSED}
        assert all(one.startswith("skipped: needs ") for one in others)


class Told:
    """A job whose pytest reports some tests, and then ends or times out."""

    earlier = None

    def __init__(self, place, told, code=None):
        self.place, self.told, self.code = place, told, code

    def finished(self, words, log, cwd, **environment):
        log.write_text("Traceback\nMemoryError\n", "utf-8")
        lines = [json.dumps({"test": name, "outcome": outcome}) for name, outcome in self.told]
        Path(environment[gpu_slices.REPORT]).write_text("".join(f"{x}\n" for x in lines), "utf-8")
        return self.code


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ([("a", "out of time"), ("a", "passed"), ("b", "out of time")], {"a": "passed"}),
        ([("b", "out of time")], {"b": "out of time"}),
    ],
)
def test_a_test_is_given_up_only_where_it_had_all_the_time(told, kept, tmp_path):
    """The next start begins with a test that had to share its time."""
    found = gpu_slices.tests_slice(Told(tmp_path, told))
    assert found.state is State.STOPPED
    assert found.tests == kept


@pytest.mark.parametrize("told", [[], [("a", "passed")]])
def test_a_pytest_that_breaks_is_a_failure(told, tmp_path):
    """A crash of Python has the exit code of failed tests; finished tests are kept."""
    job = Told(tmp_path, told, code=1)
    found = gpu_slices.tests_slice(job)
    assert found.state is State.FAILED
    assert found.reason == "pytest ended with exit code 1: MemoryError"
    assert found.tests == dict(told)


def test_a_test_that_failed_is_a_figure_of_a_slice_that_is_done(tmp_path):
    """The message is kept."""
    told = [("a", "passed"), ("b", "failed: E assert 1 == 2"), (gpu_slices.SESSION, "1")]
    found = gpu_slices.tests_slice(Told(tmp_path, told, code=1))
    assert found.state is State.DONE
    assert {figure["name"]: figure["value"] for figure in found.figures} == {
        "GPU tests passed": 1,
        "GPU tests failed": 1,
        "GPU tests skipped": 0,
        "GPU tests out of time": 0,
    }
    assert found.tests == {"a": "passed", "b": "failed: E assert 1 == 2"}


def test_processes_of_a_slice_find_what_the_script_finds(tmp_path, monkeypatch):
    """A relative path to wheels would otherwise be resolved in another directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "src:wheels")
    job = gpu_slices.Job(device="cpu", end=0, place=tmp_path / "slice", earlier=None, card=None)
    places = job.environment()["PYTHONPATH"].split(":")
    assert places[1:] == [str(tmp_path / "src"), str(tmp_path / "wheels")]


def test_a_job_that_lacks_a_package_is_skipped_and_any_other_failure_is_one(tmp_path):
    """The reason is the package's name, or the last line of the output."""
    log = tmp_path / "log"
    log.write_text("Traceback\nModuleNotFoundError: No module named 'wandb'\n", "utf-8")
    found = gpu_slices.refused(log, "exit code 1")
    assert (found.state, found.reason) == (State.SKIPPED, "not installed: wandb")
    log.write_text("Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n\n", "utf-8")
    found = gpu_slices.refused(log, "exit code 1")
    assert found.state is State.FAILED
    assert found.reason == "exit code 1: torch.OutOfMemoryError: CUDA out of memory."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry", "3x4096"], "slice must be one of 2x2048, 1x8192, main_job, nccl, tests"),
        (["--minutes", "0"], "--minutes must be more than 0 (got 0)"),
        (["--commit", "0123456"], "--commit must be 40 hexadecimal digits (got 0123456)"),
    ],
)
def test_a_wrong_request_is_refused(words, message, tmp_path):
    """The error comes before anything runs."""
    assert message in run(tmp_path, *words, code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_ends_the_script_before_its_work(tmp_path):
    """Results that took minutes could not be added to it."""
    (tmp_path / "gpu_dry.json").write_text("{}", "utf-8")
    assert "gpu_dry.json" in run(tmp_path, "--dry", code=2)


def _renamed(value):
    value["slices"]["3x4096"] = value["slices"].pop("2x2048")


WRONG = {
    "a slice that is not known": _renamed,
    "done for a reason": lambda value: value["slices"]["nccl"].update(reason="out of time"),
    "stopped for none": lambda value: value["slices"]["nccl"].update(state="stopped"),
    "a state of its own": lambda value: value["slices"]["nccl"].update(state="ended"),
    "done without a figure": lambda value: value["slices"]["nccl"].update(figures=[]),
    "no card and no reason": lambda value: value["slices"]["nccl"].update(card=None, unknown={}),
    "a figure without its unit": lambda value: value["slices"]["nccl"]["figures"][0].pop("unit"),
    "a key that is not known": lambda value: value["slices"]["nccl"].update(colour="red"),
    "another format": lambda value: value.update(format="mens_exp_benchmark"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_a_file_with_a_wrong_value_is_refused(change, stored):
    """The error gives the place."""
    value, path = stored
    change(value)
    path.write_text(json.dumps(value), "utf-8")
    with pytest.raises(MensError, match=r"gpu_dry\.json"):
        GpuResults.read(path)


def test_the_page_judges_a_goal_only_where_it_can(dry):
    """On the goal's own card each goal is marked yes or no."""
    results = GpuResults.read(dry[0] / "gpu_dry.json")
    (fast, small) = results.slices["2x2048"]["goals"]
    fast["met"], small["met"] = True, False
    rows = [
        line for line in gpu_results.drawn(results).splitlines() if " ≥ " in line or " ≤ " in line
    ]
    assert [row.split(" | ")[-1] for row in rows] == ["yes |", "no |"]
