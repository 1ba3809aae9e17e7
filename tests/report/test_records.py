from __future__ import annotations

import pytest

from mens_exp.artifacts.atomic import write_text
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.errors import DataError, MensError
from mens_exp.report.summary import load


def test_load_reads_every_record(write_run):
    """The run has three steps, two validations, two completions and the other documents."""
    records = load(write_run())
    assert [p["train/loss"] for p in records.payloads("step")] == [2.1, 1.8, 1.6]
    assert len(records.payloads("validation")) == 2
    assert len(records.items) == 2
    assert records.scorecard is not None
    assert records.plan is not None
    assert records.config == "seed: 1\n"


def test_load_needs_nothing_but_the_manifest(failed_run):
    """A run that failed early has only a manifest."""
    records = load(failed_run)
    assert records.plan is None
    assert records.scorecard is None
    assert records.config is None
    assert records.events == records.items == ()


def test_load_refuses_a_directory_without_a_manifest(tmp_path):
    """A directory without a manifest is not a run."""
    with pytest.raises(MensError, match=r"manifest\.json"):
        load(RunDir(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_load_refuses_a_damaged_plan(failed_run, text):
    """The message names the file."""
    write_text(failed_run.plan, text)
    with pytest.raises(DataError, match=r"plan\.json"):
        load(failed_run)


def test_why_absent_prefers_the_recorded_reason(write_run):
    """The manifest explains the missing GPU memory; for foo there is no reason."""
    records = load(write_run())
    assert records.why_absent("results.peak_cuda_bytes") == "this run used no GPU"
    assert records.why_absent("results.foo") == "not recorded"


def test_why_absent_names_the_failure(failed_run):
    """Values that a failed run lacks were not reached."""
    assert load(failed_run).why_absent("results.steps") == "not reached: the run failed"
