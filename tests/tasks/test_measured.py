from __future__ import annotations

import json

import pytest

from mens_exp.artifacts.manifest import Manifest
from mens_exp.planning.throughput_model import entries, ledger_path
from mens_exp.tasks import plan as measured
from mens_exp.tasks.plan import keep_measurement, note_plan, step_s


def test_finished_run_is_in_the_ledger(finished, cache):
    """One ledger line has what the run's plan predicted and what its record measured."""
    manifest = Manifest.read(finished.manifest)
    plan = json.loads(finished.plan.read_text("utf-8"))
    contract = manifest.contract or {}
    mine = (contract["digest"], step_s(manifest.results))  # other tests ran it too
    known = entries(ledger_path(cache))
    found = [e for e in known if (e.contract, e.measured_step_s) == mine]
    if not found:  # another test has emptied the ledger since
        keep_measurement(manifest, plan, cache, {})
        found = entries(ledger_path(cache))
    entry = found[-1]
    # None if the process that ran the tests held much else before.
    assert entry.measured_peak_bytes in {None, manifest.results["peak_rss_bytes"]}
    assert entry.predicted_peak_bytes == plan["memory_bytes"]["formula"]
    assert (entry.family, entry.backend) == ("llama", "qlora")
    assert entry.device == plan["device"]["name"]
    assert entry.measured_step_s is not None
    assert entry.flop_per_step == plan["time_s"]["flop_per_step"]


def test_manifest_and_plan_carry_one_contract(finished):
    """The digest is in both, and the report shows it."""
    manifest = Manifest.read(finished.manifest)
    assert manifest.contract is not None
    digest = manifest.contract["digest"]
    assert json.loads(finished.plan.read_text("utf-8"))["contract_digest"] == digest
    assert digest in finished.report.read_text("utf-8")


@pytest.mark.parametrize(
    "overrides",
    [
        ["backend=burn"],
        ["backend=burn", "model=tiny_qwen2", "lora=all_linear"],
        ["backend=burn", "model=tiny_gpt2"],
        ["backend=burn", "model=tiny_gpt2", "backend.train_base=false"],
        ["backend=full", "model=tiny_gpt2"],
    ],
)
def test_the_plan_counts_the_parameters_that_train(train_in, tmp_path, overrides):
    """As the manifest has read them from the graph: biases, norms and positions included."""
    run = train_in(tmp_path / "run", *overrides, "trainer.max_steps=1")
    plan = json.loads(run.plan.read_text("utf-8"))
    facts = Manifest.read(run.manifest).facts
    assert plan["trainable_parameters"] == facts["trainable_parameters"]


@pytest.fixture
def results():
    """The record of ten steps of a hundred tokens, at fifty tokens a second."""
    return {"tokens": 1000, "steps": 10, "tokens_per_s": 50.0, "peak_rss_bytes": 7}


def test_mean_step_follows_from_the_rate(results):
    """A hundred tokens at fifty a second are two seconds; no single step was ever timed."""
    assert step_s(results) == 2.0
    assert step_s({**results, "tokens_per_s": None}) is None


PLAN = {
    "parameters": 94_208,
    "tokens_per_step": 2048,
    "device": {"kind": "cpu", "name": "a CPU"},
    "backend": "qlora",
    "time_s": {"flop_per_step": 1e9, "step_s": 3.0},
    "memory_bytes": {"formula": 5, "components": {"framework": 3}},
}


def manifest_of(results):
    return Manifest(
        run_id="run",
        task="train",
        started_utc="2026-11-20T05:58:01.123Z",
        config_digest="ab" * 32,
        seed=1,
        results=results,
    )


@pytest.mark.parametrize(("kind", "measured_peak"), [("cpu", 7), ("cuda", 11)])
def test_peak_is_that_of_the_device(results, tmp_path, kind, measured_peak):
    """Resident memory on a CPU, the allocator's peak on a GPU."""
    plan = {**PLAN, "device": {"kind": kind, "name": "a device"}}
    keep_measurement(manifest_of({**results, "peak_cuda_bytes": 11}), plan, tmp_path, {})
    (entry,) = entries(ledger_path(tmp_path))
    assert (entry.predicted_peak_bytes, entry.measured_peak_bytes) == (5, measured_peak)


@pytest.mark.parametrize(
    ("held", "measured_peak"),
    [({"cpu": 3}, 7), ({"cpu": 4}, None), ({"cuda": 5}, 7)],
)
def test_what_a_notebook_holds_is_not_memory_of_the_run(results, tmp_path, held, measured_peak):
    """The framework's own 3 bytes are; of 5 that are predicted, 1 more is too much."""
    keep_measurement(manifest_of(results), PLAN, tmp_path, held)
    (entry,) = entries(ledger_path(tmp_path))
    assert (entry.measured_peak_bytes, entry.measured_step_s) == (measured_peak, 2.0)


def test_the_memory_of_a_crowded_process_does_not_raise_a_forecast(train_in, tmp_path, monkeypatch):
    """A run in a process that holds a GiB for other purposes measures a rate, but no memory."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    others = bytearray(1 << 30)
    others[:: 1 << 12] = b"\1" * len(others[:: 1 << 12])
    run = train_in(tmp_path / "run", "trainer.max_steps=2")
    (entry,) = entries(ledger_path(tmp_path / "cache"))
    assert Manifest.read(run.manifest).results["peak_rss_bytes"] > 1 << 30
    assert entry.measured_peak_bytes is None
    assert entry.measured_step_s is not None


def test_notes_of_the_plan_are_kept_once(results):
    """Conversion for a phone is noted once, and not again by a run that is resumed."""
    manifest = manifest_of(results)
    for _ in range(2):
        note_plan(manifest, {"notes": ["conversion is yours"], "warnings": ["it may fail"]})
    assert manifest.notes == ["conversion is yours", "it may fail"]


def test_ledger_that_cannot_be_written_is_a_note(results, tmp_path, monkeypatch):
    """The run has succeeded even if its ledger line cannot be written, which is noted."""

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(measured, "append", full)
    manifest = manifest_of(results)
    keep_measurement(manifest, PLAN, tmp_path, {})
    assert manifest.notes == ["the ledger was not written: no space left"]
