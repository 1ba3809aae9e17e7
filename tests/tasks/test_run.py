from __future__ import annotations

import math
import signal

import pytest

from mens_exp import cli
from mens_exp.artifacts import atomic, provenance
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.compose import config_digest, from_yaml
from mens_exp.errors import ConfigError, DataError, Problems, RequestError
from mens_exp.planning.contract import contract_of
from mens_exp.report import write
from mens_exp.tasks.run import Cancelled, open_run, reopen_run


def closed(run):
    return Manifest.read(run.dir.manifest)


def test_a_run_is_on_record_as_started_before_anything_is_done(cell, tmp_path):
    """Identity, seed, choices, provenance and frozen configuration are written when it opens."""
    with open_run(tmp_path / "run", cell) as run:
        manifest = closed(run)
        assert manifest.status is Status.STARTED
        assert (manifest.run_id, manifest.task, manifest.seed) == ("run", "train", 42)
        assert manifest.choices["model"] == "tiny_llama"
        assert manifest.provenance["packages"]["torch"]
        assert config_digest(from_yaml(run.dir.config)) == manifest.config_digest
        assert manifest.attempts[0]["status"] == Status.STARTED
        started = read_events(run.dir.telemetry)[0]
    assert started["event"] == "run_started"
    assert started["payload"]["config"]["data"]["seq_len"] == 192


def test_a_block_that_ends_well_is_a_success(cell, tmp_path):
    """Status, end, attempt and results agree, and both reports are written."""
    with open_run(tmp_path / "run", cell) as run:
        run.manifest.results["steps"] = 4
    manifest = closed(run)
    assert manifest.status == manifest.attempts[0]["status"] == Status.SUCCEEDED
    assert manifest.ended_utc == manifest.attempts[0]["ended_utc"]
    assert manifest.error is None
    assert manifest.results["steps"] == 4
    assert manifest.results["wall_s"] > 0
    assert run.dir.report.is_file()
    assert run.dir.model_card.is_file()
    last = read_events(run.dir.telemetry)[-1]
    assert (last["event"], last["payload"]["status"]) == ("run_finished", "succeeded")


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (
            DataError("is empty", where="rows.jsonl", remedy="add rows"),
            {
                "type": "DataError",
                "message": "rows.jsonl: is empty · Next: add rows",
                "remedy": "add rows",
                "exit_code": 2,
            },
        ),
        (
            Problems([ConfigError("one"), ConfigError("two")]),
            {"type": "Problems", "message": "one\ntwo", "remedy": None, "exit_code": 2},
        ),
        (
            ZeroDivisionError(),
            {
                "type": "ZeroDivisionError",
                "message": "ZeroDivisionError",
                "remedy": None,
                "exit_code": 1,
            },
        ),
    ],
    ids=["ours", "several", "a bug"],
)
def test_an_error_in_the_block_is_a_failure_on_record(cell, tmp_path, error, recorded):
    """Type, message, remedy and exit code are recorded, and the error is raised again."""
    with pytest.raises(type(error)), open_run(tmp_path / "run", cell) as run:
        raise error
    manifest = closed(run)
    assert manifest.status is Status.FAILED
    assert manifest.error == recorded


@pytest.mark.parametrize("error", [Cancelled("SIGINT"), KeyboardInterrupt()])
def test_a_cancelled_run_is_no_failure(cell, tmp_path, error):
    """A cancelled run records no error, as nothing went wrong."""
    with pytest.raises(type(error)), open_run(tmp_path / "run", cell) as run:
        raise error
    assert closed(run).status is Status.CANCELLED
    assert closed(run).error is None


def test_a_cancelled_run_closes_with_the_system_in_charge_of_signals(cell, tmp_path):
    """A second signal ends the process, whatever the report or a sink is doing."""
    seen = []

    def cancelled(run):
        run.after_close(lambda _: seen.append(signal.getsignal(signal.SIGINT)))
        raise Cancelled

    with pytest.raises(Cancelled), open_run(tmp_path / "run", cell) as run:
        cancelled(run)
    assert seen == [signal.SIG_DFL]


def test_every_finished_file_is_hashed(cell, tmp_path):
    """Checkpoints and half-written files are not outputs; the hashes are those on disk."""
    with open_run(tmp_path / "run", cell) as run:
        atomic.write_text(run.dir.adapter / "adapter.safetensors", "weights")
        atomic.write_text(run.dir.peft / "adapter_config.json", "{}")
        atomic.write_text(run.dir.adapter / ".peft.0-0.tmp" / "half.json", "{")
        atomic.write_text(run.dir.checkpoint(2), "state")
    outputs = closed(run).outputs
    assert sorted(outputs) == [
        "adapter/adapter.safetensors",
        "adapter/peft/adapter_config.json",
        "config.yaml",
        "run_summary.json",
        "telemetry.jsonl",
        "training_skip_stats.json",
    ]
    assert all(sha256_file(run.dir.path / name) == value for name, value in outputs.items())


def test_a_second_run_in_the_same_directory_is_refused(cell, tmp_path):
    """The first run's record does not change."""
    with open_run(tmp_path / "run", cell):
        pass
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    refused = pytest.raises(RequestError, match=r"a run already exists.*resume=")
    with refused, open_run(tmp_path / "run", cell):
        pytest.fail("the block must not begin")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_a_task_that_cannot_be_resumed_is_not_told_to(tmp_path, capsys):
    """For a plan in a directory that has one, the message only suggests another directory."""
    command = ["task=plan", "model=tiny_llama", f"hydra.run.dir={tmp_path / 'plan'}"]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert "next      choose another hydra.run.dir" in said
    assert "resume=" not in said


def test_a_run_at_work_keeps_others_out(cell, tmp_path):
    """Neither a new nor a resumed run may write to its directory."""
    with open_run(tmp_path / "run", cell) as run:
        atomic.write_text(run.dir.path / "mark", "")
        with pytest.raises(RequestError, match="still working"), open_run(run.dir.path, cell):
            pytest.fail("the block must not begin")
        again = reopen_run(run.dir, cell, step=0, notes=[])
        with pytest.raises(RequestError, match="still working"), again:
            pytest.fail("the block must not begin")
    assert len(closed(run).attempts) == 1
    assert not run.dir.lock.exists()


def test_a_report_that_fails_is_a_note(cell, tmp_path, monkeypatch):
    """The run succeeds even if its report cannot be rendered."""

    def refuse(_run):
        raise OSError("no ink")

    monkeypatch.setattr(write, "write_report", refuse)
    with open_run(tmp_path / "run", cell) as run:
        pass
    assert closed(run).status is Status.SUCCEEDED
    assert closed(run).notes == ["report failed: OSError: no ink"]


def test_a_sink_that_fails_after_the_close_is_a_note_and_the_next_one_runs(cell, tmp_path):
    """Every sink is called in order, with the closed manifest on disk."""
    seen = []

    def refuse(_manifest):
        raise ConnectionError("no network")

    with open_run(tmp_path / "run", cell) as run:
        run.after_close(refuse)
        run.after_close(lambda manifest: seen.append(manifest.status))
        run.after_close(lambda _: seen.append(closed(run).status))
    assert seen == [Status.SUCCEEDED, Status.SUCCEEDED]
    assert closed(run).status is Status.SUCCEEDED
    assert closed(run).notes == ["sink failed: ConnectionError: no network"]


def test_a_failure_stays_one_when_its_report_fails_too(cell, tmp_path, monkeypatch):
    """The first error is the one that is recorded and raised."""
    monkeypatch.setattr(write, "write_report", lambda _run: 1 / 0)
    with pytest.raises(DataError), open_run(tmp_path / "run", cell) as run:
        raise DataError("is empty")
    assert closed(run).error is not None
    assert closed(run).error["type"] == "DataError"
    assert closed(run).notes == ["report failed: ZeroDivisionError: division by zero"]


def test_a_result_that_is_not_finite_is_null_with_a_reason(cell, tmp_path):
    """JSON has no NaN, and the run must still close."""
    with open_run(tmp_path / "run", cell) as run:
        run.manifest.results.update(tuned_val_loss=math.nan, base_val_loss=2.0)
    manifest = closed(run)
    assert manifest.status is Status.SUCCEEDED
    assert manifest.results["tuned_val_loss"] is None
    assert manifest.results["base_val_loss"] == 2.0
    origin = contract_of(cell.config).unknown
    assert manifest.unknown == origin | {"results.tuned_val_loss": "not finite: nan"}


def test_a_reopened_run_goes_back_to_its_step(cell, tmp_path):
    """Later events and old reasons are removed; attempts and wall time add up."""

    def failing(run):
        for step in (1, 2, 3):
            run.telemetry.emit("step", {"step": step})
        run.unknown("results.tokens_per_s", "one step is all warm-up")
        raise DataError("is empty")

    with pytest.raises(DataError), open_run(tmp_path / "run", cell) as run:
        failing(run)
    first = closed(run).results["wall_s"]
    half = run.dir.checkpoints / ".step_00000002.ckpt.00000000-1-00000000.tmp"
    atomic.write_text(half, "of another machine, just now")
    with reopen_run(run.dir, cell, step=1, notes=["a note"]) as again:
        assert closed(again).status is Status.STARTED
        assert closed(again).error is None
        events = [(e["event"], e["payload"].get("step")) for e in read_events(run.dir.telemetry)]
        assert events == [("run_started", None), ("step", 1), ("resumed", 1)]
    manifest = closed(again)
    assert [a["status"] for a in manifest.attempts] == [Status.FAILED, Status.SUCCEEDED]
    assert [a["resumed_from_step"] for a in manifest.attempts] == [None, 1]
    assert manifest.notes == ["a note"]
    assert manifest.unknown == contract_of(cell.config).unknown  # no results of the first attempt
    assert manifest.results["wall_s"] > first
    assert half.is_file()  # its writer may still be alive


def test_other_conditions_than_before_are_noted(cell, tmp_path, monkeypatch):
    """Code or machine that changed between attempts may change the result."""
    with pytest.raises(DataError), open_run(tmp_path / "run", cell) as run:
        raise DataError("is empty")
    here = provenance.collect(tmp_path)
    moved = {**here, "commit": "f" * 40, "cpu": {"model": "another"}}
    monkeypatch.setattr(provenance, "collect", lambda _cwd: moved)
    with reopen_run(run.dir, cell, step=0, notes=[]):
        pass
    assert closed(run).notes == [
        "attempt 2 ran under other conditions than the one before: commit, cpu"
    ]
    assert closed(run).provenance["commit"] == "f" * 40
