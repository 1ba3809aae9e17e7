from __future__ import annotations

import pytest

from mens_exp.artifacts.digest import sha256_bytes
from mens_exp.artifacts.manifest import Failure, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState
from mens_exp.sweeps.outcome import damage, outcome
from mens_exp.sweeps.process import Ended

UTC, LATER = "2026-11-20T05:58:01.123Z", "2026-11-20T06:00:00.000Z"
ERROR = Failure(type="DataError", message="no rows", remedy=None, exit_code=2)


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "run")


def attempt(started_utc):
    return {
        "started_utc": started_utc,
        "ended_utc": None,
        "status": Status.STARTED,
        "resumed_from_step": None,
    }


def test_the_error_on_record_is_the_reason(run, write_manifest):
    """The reason has its type and message."""
    write_manifest(run, Status.FAILED, error=ERROR, attempts=[attempt(LATER)])
    found = outcome(run, Ended(exit_code=2), since_utc=UTC)
    assert (found.state, found.reason) == (JobState.FAILED, "DataError: no rows")
    assert not found.may_pass


def test_an_error_of_an_earlier_attempt_is_not(run, write_manifest):
    """The latest attempt ended before it opened the record."""
    write_manifest(run, Status.FAILED, error=ERROR, attempts=[attempt(UTC)])
    run.log.write_text("Traceback …\nImportError: no torch\n", "utf-8")
    found = outcome(run, Ended(exit_code=1), since_utc=LATER)
    assert found.reason == "ImportError: no torch"
    assert found.may_pass


def test_a_death_that_nobody_saw_may_pass(run, write_manifest):
    """The record of another launcher's process only says that it had started."""
    write_manifest(run, Status.STARTED)
    found = outcome(run, Ended(exit_code=None), since_utc=UTC)
    assert (found.state, found.may_pass) == (JobState.FAILED, True)


def test_what_nobody_saw_is_read_from_the_record(run, write_manifest):
    """An earlier launcher's process succeeded or was cancelled."""
    write_manifest(run, Status.SUCCEEDED)
    assert outcome(run, Ended(exit_code=None), since_utc=UTC).state is JobState.SUCCEEDED
    write_manifest(run, Status.CANCELLED)
    assert outcome(run, Ended(exit_code=None), since_utc=UTC).state is JobState.CANCELLED


def test_a_kill_after_success_is_no_success_yet(run, write_manifest):
    """Its report may be missing, which another attempt renders."""
    write_manifest(run, Status.SUCCEEDED)
    found = outcome(run, Ended(exit_code=-9), since_utc=UTC)
    assert (found.state, found.may_pass) == (JobState.FAILED, True)
    assert found.reason == "killed by SIGKILL, as the system does when memory runs out"


def test_damage_is_told_by_file(run, write_manifest):
    """A file is whole, changed or missing, or the record has another configuration."""
    run.path.mkdir()
    file = run.path / "plan.json"
    file.write_bytes(b"{}")
    whole = write_manifest(run, Status.SUCCEEDED, outputs={"plan.json": sha256_bytes(b"{}")})
    assert damage(run, whole, "c" * 64) is None
    assert damage(run, whole, "d" * 64) == "manifest.json is of another configuration"
    file.write_bytes(b"[]")
    assert damage(run, whole, "c" * 64) == "plan.json has changed"
    file.unlink()
    assert damage(run, whole, "c" * 64) == "plan.json is gone"
