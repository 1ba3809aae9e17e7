"""Faults at the file writes of tasks: the campaign's tools, a small sample of it, and its page.

`make soak` runs the whole campaign (tests/support/campaign.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import sys
from types import SimpleNamespace

import after_faults
import campaign
import fork_server
import pytest
import reliability_page
from disk_faults import VARIABLE, Fault, Site, Watcher, source
from fuzz_readers import READERS

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="stops calls by seccomp; run it on Linux"
)

SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))
WRITERS = """
import os, subprocess, numpy
from safetensors.numpy import save_file
os.mkdir("d")
with open("d/text", "w") as file: file.write("0123456789")
os.replace("d/text", "d/renamed")
save_file({"x": numpy.zeros(4)}, "rust.safetensors")
subprocess.run(["sh", "-c", "echo hello > of_a_child"], check=True)
os.unlink("of_a_child")
"""
TEXT = 'open("file", "wb", 0).write(b"0123456789"); open("more", "wb", 0).write(b"x")'


@pytest.fixture
def watched(tmp_path):
    """Run Python source under a watcher; return the ended process and the watcher."""

    def run(text, fault=None):
        with Watcher(tmp_path, fault) as watcher:
            done = fork_server.run(
                [sys.executable, "-c", text],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env={**os.environ, VARIABLE: watcher.address},
                before=source(),
            )
        return done, watcher

    return run


def test_python_native_code_and_children_are_all_seen(watched, tmp_path):
    """Python's files, a temporary file of Rust and the output of a shell are all watched."""
    done, watcher = watched(WRITERS)
    assert done.returncode == 0, done.stderr
    seen = {(site.kind, site.place) for site in watcher.calls}
    assert {
        ("mkdir", "d"),
        ("create", "d/text"),
        ("write", "d/text"),
        ("rename", "d/renamed"),
        ("create", "of_a_child"),
        ("write", "of_a_child"),
        ("unlink", "of_a_child"),
    } <= seen
    rust = {kind for kind, place in seen if place in {"rust.safetensors", ".#"}}
    assert {"create", "rename"} <= rust
    assert (tmp_path / "d/renamed").read_text() == "0123456789"


@pytest.mark.parametrize(
    ("action", "left", "code"),
    [
        ("kill", b"", -signal.SIGKILL),
        ("torn", b"01234", -signal.SIGKILL),
        ("short", b"01234", 0),
        ("error", b"", 1),
        ("full", b"", 1),
    ],
)
def test_each_fault_does_what_it_says(watched, tmp_path, action, left, code):
    """The fault fires at the named call; a torn or short write leaves five of the ten bytes."""
    done, watcher = watched(TEXT, Fault(Site("write", "file"), 1, action))
    assert watcher.fired
    assert done.returncode == code
    assert (tmp_path / "file").read_bytes() == left
    assert (tmp_path / "more").exists() == (action == "short")
    if code == 1:
        words = {"error": "Input/output error", "full": "No space left on device"}
        assert words[action] in done.stderr


def test_a_full_disk_stays_full_and_a_failed_call_fails_once(watched, tmp_path):
    """After EIO a second file can be written; after ENOSPC it cannot."""
    again = f"try:\n    {TEXT}\nexcept OSError:\n    open('later', 'w').close()"
    for action, code in (("error", 0), ("full", 1)):
        (tmp_path / "later").unlink(missing_ok=True)
        done, _ = watched(again, Fault(Site("write", "file"), 1, action))
        assert done.returncode == code
        assert (tmp_path / "later").exists() == (code == 0)


def run_at(root):
    """Write a run whose record says that it succeeded, with one output file."""
    run = root / "run"
    run.mkdir()
    (run / "weights").write_bytes(b"whole")
    outputs = {"weights": hashlib.sha256(b"whole").hexdigest()}
    record = {"status": "succeeded", "outputs": outputs}
    (run / "manifest.json").write_text(json.dumps(record), "utf-8")


def test_the_judge_sees_what_a_fault_may_leave(tmp_path):
    """A changed, a missing, a torn and a left-over file are each reported."""
    run_at(tmp_path)
    expected = after_faults.read(tmp_path)
    assert list(after_faults.believed(tmp_path)) == []
    assert list(after_faults.differences(tmp_path, expected, "")) == []
    (tmp_path / "run/weights").write_bytes(b"who")
    assert list(after_faults.believed(tmp_path)) == ["run says succeeded with another weights"]
    assert list(after_faults.differences(tmp_path, expected, "")) == ["run/weights: differs"]
    (tmp_path / "run/.weights.0-1-2.tmp").write_bytes(b"w")
    (tmp_path / "run/weights").unlink()
    assert list(after_faults.believed(tmp_path)) == ["run says succeeded without weights"]
    assert list(after_faults.differences(tmp_path, expected, "")) == [
        "left over: run/.weights.0-1-2.tmp",
        "run/weights is missing",
    ]
    (tmp_path / "run/manifest.json").write_text('{"status": "succ', "utf-8")
    assert list(after_faults.believed(tmp_path)) == ["run/manifest.json is half-written"]


@pytest.mark.parametrize(
    ("blocks", "is_seen"), [((None, None), True), ((40, 40), True), ((None, 40), False)]
)
def test_the_tokens_of_a_plan_differ_only_if_one_is_an_estimate(tmp_path, blocks, is_seen):
    """The exact count is known only when the rows are in the cache, as for the next command."""
    plans = [
        {"data": {"train_blocks": count}, "tokens_total": total, "steps": 4}
        for count, total in zip(blocks, (768, 698), strict=True)
    ]
    expected, found = (json.dumps(plan).encode() for plan in plans)
    (tmp_path / "plan.json").write_bytes(found)
    problems = list(after_faults.differences(tmp_path, {"plan.json": expected}, ""))
    assert bool(problems) is is_seen
    (tmp_path / "plan.json").write_bytes(found.replace(b'"steps": 4', b'"steps": 5'))
    assert list(after_faults.differences(tmp_path, {"plan.json": expected}, ""))


@pytest.mark.parametrize(
    ("said", "code", "wrong"),
    [
        ("the disk is full\n  next      make room on it", 3, None),
        ("Traceback (most recent call last):", 1, "a traceback"),
        ("A bug in mens_exp; the record: run", 1, "calls itself a bug"),
        ("the disk is full", 3, "no next step"),
        ("Cancelled. Go on with: resume=run", -9, "ended by signal 9"),
    ],
)
def test_the_judge_reads_how_a_command_ends(said, code, wrong):
    """A failure has to name a next step, and must be neither a traceback nor reported as a bug."""
    done = SimpleNamespace(stdout="", stderr=said, returncode=code)
    found = list(after_faults.refusal(done))
    assert [one.startswith(wrong) for one in found] == [True] if wrong else found == []


def test_a_sample_of_the_campaign_ends_well(tmp_path, monkeypatch):
    """Two tasks that take a second each; CAMPAIGN_SEED=n draws other cases."""
    print(f"CAMPAIGN_SEED={SEED}")
    monkeypatch.setattr(fork_server, "_before_each", campaign.BEFORE_EACH)
    tasks = [task for task in campaign.TASKS if task.name in ("corpus", "promote")]
    place = campaign.Place(tmp_path)
    cases = list(campaign.sample(tasks, place, SEED))[:4]
    assert {case.task.name for case in cases} == {"corpus", "promote"}
    problems = {campaign.told(case): place.play(case) for case in cases}
    assert problems == {name: [] for name in problems}, f"CAMPAIGN_SEED={SEED}"


def test_the_page_is_drawn_from_the_results():
    """`make docs` wrote it from the JSON results of the campaign and of fuzzing."""
    shown = (campaign.RESULTS.parents[2] / "docs/measured/reliability.md").read_text("utf-8")
    results = json.loads(campaign.RESULTS.read_text("utf-8"))
    fuzzing = json.loads(reliability_page.FUZZING.read_text("utf-8"))
    assert reliability_page.page(results, fuzzing) == shown
    assert set(fuzzing["readers"]) == set(READERS)
    for one in results["campaigns"]:
        played = sum(count for task in one["tasks"] for count in task["played"].values())
        planned = sum(task["planned"] for task in one["tasks"])
        assert f"{played:,} of {planned:,} cases" in shown
        assert sum(task["well"] for task in one["tasks"]) == played - len(one["problems"])


@pytest.mark.parametrize(
    ("action", "place", "problem", "is_kept"),
    [
        ("error", "own#/#.safetensors", "own1/5.safetensors is there", True),
        ("error", "own#/#.safetensors", "own1/report.html is there", False),
        ("error", "own#/#.safetensors", "left over: own1/.manifest.lock", False),
        ("kill", "own#/#.safetensors", "own1/5.safetensors is there", False),
        ("error", "cache/.#.lock", "run/weights is missing", False),
    ],
)
def test_a_deletion_that_failed_keeps_a_file_like_it_alone(
    tmp_path, action, place, problem, is_kept
):
    fault = Fault(Site("unlink", place), 1, action)
    assert campaign._is_what_the_fault_kept(tmp_path, fault, problem) is is_kept
    elsewhere = Fault(Site("write", place), 1, action)
    assert not campaign._is_what_the_fault_kept(tmp_path, elsewhere, problem)


def test_a_killed_process_keeps_a_lock_that_nobody_holds(tmp_path):
    """A lock that is held, names a holder, belongs elsewhere or is missing does not count."""
    lock = tmp_path / ".d76de11ab3d9df347e5ad2869e8581ef.lock"
    killed = Fault(Site("unlink", ".#.lock"), 1, "kill")
    problem = f"left over: {lock.name}"

    def is_kept(fault=killed):
        return campaign._is_what_the_fault_kept(tmp_path, fault, problem)

    assert not is_kept()
    lock.touch()
    assert is_kept()
    assert not is_kept(Fault(Site("unlink", "cache/.#.lock"), 1, "kill"))
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not is_kept()
    lock.write_text("4711")
    assert not is_kept()


def test_a_case_can_be_played_again_by_its_name():
    text = "merge: error at unlink 35 of own#/.scratch.#-#-#.tmp/#.safetensors"
    assert campaign.told(campaign.case_named(text)) == text
    assert campaign.case_named("ddp: kill of process 33 after 44%") is None
