"""Training with logger.mode=online while the service is slow, refuses, or never answers."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import fork_server
import pytest

from mens_exp.artifacts.manifest import Manifest, Status, SyncRecord
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.artifacts.telemetry import read_events

STEPS = [1, 2, 3, 4]


@pytest.fixture
def train(tmp_path, cache, rows_file, wandb_service):
    """Run `python -m mens_exp experiment=smoke logger=wandb logger.mode=online` to success."""

    def command(*overrides):
        asked = [
            "experiment=smoke",
            "logger=wandb",
            "logger.mode=online",
            "suite=none",
            "suite.items=0",
        ]
        rows = ["data=jsonl", f"data.path={rows_file}", "data.val_frac=0.1"]
        _run(tmp_path, cache, *asked, *rows, *overrides)
        (manifest,) = tmp_path.glob("outputs/train/smoke/*/manifest.json")
        return RunDir(manifest.parent)

    return command


def _run(here, cache, *arguments):
    reach = os.pathsep.join(filter(None, sys.path))
    done = fork_server.run(
        [sys.executable, "-m", "mens_exp", *arguments],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=here,
        env={**os.environ, "PYTHONPATH": reach, "MENS_EXP_CACHE": str(cache)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def sent(service, run):
    """Return the steps of the training loss that the service has received."""
    found = service.runs.get(run.path.name)
    rows = [] if found is None else found.history
    return [row["step"] for row in rows if "train/loss" in row]


def settled(run):
    """Wait for the sender process, and return the recorded delivery."""
    deadline = time.monotonic() + 300
    while run.sync_lock.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    (delivery,) = SyncRecord.read(run.sync).deliveries
    return dict(delivery)


def whole(run):
    """Check that the run shows no trace of the service's behaviour."""
    manifest = Manifest.read(run.manifest)
    assert manifest.status is Status.SUCCEEDED
    events = read_events(run.telemetry)
    assert [e["payload"]["step"] for e in events if e["event"] == "step"] == STEPS
    assert [e for e in events if e["event"] == "sink_failed"] == []


def test_a_slow_service_has_it_all_in_the_end(train, wandb_service):
    """Each answer takes 0.1 s, and the run waits for none of them."""
    wandb_service.delay_s = 0.1
    run = train("logger.wait_s=200")
    whole(run)
    assert settled(run)["why"] is None
    assert sent(wandb_service, run) == STEPS
    assert wandb_service.runs[run.path.name].exit_code == 0
    assert wandb_service.unknown == []


def test_what_a_service_refused_is_sent_later(train, wandb_service, tmp_path, cache):
    """Every request fails while the run trains; the record says so, and task=sync sends it."""
    wandb_service.refuses = lambda _: True
    run = train("logger.wait_s=0", "logger.console=true")
    whole(run)
    _until_asked(wandb_service)
    assert settled_not(run)
    assert sent(wandb_service, run) == []
    wandb_service.refuses = lambda _: False
    _end_sender(run)
    (mirror,) = run.wandb.glob("offline-run-*")  # wandb does not see a forked command's output
    (mirror / "files").mkdir(exist_ok=True)
    (mirror / "files" / "output.log").write_text("step 4/4 …\n", "utf-8")
    _run(tmp_path, cache, "task=sync", f"path={run.path}")
    assert sent(wandb_service, run) == STEPS
    printed = wandb_service.runs[run.path.name].lines["output.log"].values()
    assert "step 4/4 …" in "".join(printed)
    assert settled(run)["why"] is None


def test_a_service_that_never_answers_delays_nothing(train, wandb_service, tmp_path, cache):
    """The run ends before its sender gives up, and task=sync sends it later."""
    wandb_service.hangs = lambda _: True
    run = train("logger.wait_s=0")
    whole(run)
    _until_asked(wandb_service)
    assert wandb_service.runs == {}
    assert settled_not(run)
    wandb_service.hangs = lambda _: False
    wandb_service.released.set()
    _end_sender(run)
    _run(tmp_path, cache, "task=sync", f"path={run.path}")
    assert sent(wandb_service, run) == STEPS


def test_an_online_evaluation_is_tied_to_the_run_that_it_scored(
    train, wandb_service, tmp_path, cache
):
    """Without task=sync: it has a name, the KPIs, and the run's adapter as its input."""
    run = train("logger.wait_s=200", "data.heldout_frac=0.3")
    online = ["logger.mode=online", "logger.wait_s=200", "hydra.run.dir=scored"]
    suite = ["suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=48"]
    _run(tmp_path, cache, "task=evaluate", f"path={run.path}", *suite, *online)
    scored = RunDir(tmp_path / "scored")
    assert settled(scored)["why"] is None
    found, name = wandb_service.runs["scored"], run.path.name
    assert found.display_name.startswith(f"evaluate: {name} on heldout_syntax")
    assert (found.job_type, found.exit_code) == ("evaluate", 0)
    assert found.settings["evaluated_run"] == {"run_id": name, "wandb_run_id": name}
    card = Scorecard.read(scored.scorecard).conditions
    assert found.summary["tuned/parse_rate"] == card["tuned"]["parse_rate"]
    assert (f"adapter-{name}", "scored") in wandb_service.lineage
    assert len(wandb_service.versions(f"adapter-{name}")) == 1
    assert wandb_service.unknown == []


def _until_asked(service):
    """Wait for the sender's first request, since a run may end before its sender has started."""
    deadline = time.monotonic() + 300
    while not service.operations and time.monotonic() < deadline:
        time.sleep(0.2)
    assert service.operations


def settled_not(run):
    """Tell whether the record says that the run has not arrived."""
    (delivery,) = SyncRecord.read(run.sync).deliveries
    return delivery["digest"] is None and bool(delivery["why"])


def _end_sender(run):
    """Kill a sender that is still running, as switching off the machine would."""
    import signal

    from mens_exp.artifacts.host import lock_holder

    deadline = time.monotonic() + 60
    while (found := lock_holder(run.sync_lock)) is not None and time.monotonic() < deadline:
        try:
            os.killpg(found[0], signal.SIGKILL)
        except ProcessLookupError:
            break
        time.sleep(0.2)
