"""`wandb sweep` and `wandb agent` as a user runs them, against a stand-in of the service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
import yaml

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events
from mens_exp.training.wandb_names import recorded_agent

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "wandb.md"
DRAWN = [
    {"optim.lr": 0.000123, "lora.r": 8, "backend": "qlora"},
    {"optim.lr": 0.000456, "lora.r": 16, "backend": "lora"},
]


def page_file():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return dict(yaml.safe_load(text))


@pytest.fixture
def environment(tmp_path, wandb_service, shell_path):
    """A user's shell environment, with a `python` and an account."""
    return {
        **os.environ,
        "PATH": shell_path,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WANDB_ERROR_REPORTING": "false",
    }


@pytest.fixture
def wandb_command(tmp_path, environment):
    """Run a W&B command in the test's directory, and return its output."""

    def run(*arguments):
        done = fork_server.run(
            [sys.executable, "-m", "wandb", *arguments],
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
            env=environment,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def sweep_of_the_page(tmp_path, tiny_run, wandb_command):
    """Create the sweep of the docs with tiny jobs; return the argument of `wandb agent`."""

    def created(*overrides, **changes):
        file = page_file() | changes
        fixed = {text.partition("=")[0]: text for text in [*tiny_run, *overrides]}
        for key in ("logger", *file["parameters"]):
            fixed.pop(key, None)
        file["command"] = [*file["command"], "logger=wandb", "logger.wait_s=120", *fixed.values()]
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
        said = wandb_command("sweep", "--project", "mine", "sweep.yaml")
        (told,) = re.findall(r"wandb agent (\S+)", said)
        return re.sub(r"\x1b\[[0-9;]*m", "", told)

    return created


def runs_in(place):
    """Return the runs by the ids that the agent gave them."""
    found = {}
    for path in place.glob("outputs/train/*/*/manifest.json"):
        manifest = Manifest.read(path)
        agent = recorded_agent(manifest)
        assert agent is not None
        found[agent.run_id] = (RunDir(path.parent), manifest)
    return found


def test_an_agent_runs_the_sweep_of_the_page_and_the_service_has_its_runs(
    sweep_of_the_page,
    wandb_command,
    wandb_service,
    wandb_sweeps,
    tmp_path,
):
    """The ids are the agent's, and each run has the sweep's metric."""
    wandb_sweeps.suggestions = list(DRAWN)
    told = sweep_of_the_page()
    assert told == "lab/mine/sweep000"
    assert wandb_sweeps.by_name["sweep000"].config["metric"] == page_file()["metric"]
    wandb_command("agent", told)
    assert wandb_service.unknown == []
    assert [one["type"] for one in wandb_sweeps.commands] == ["run", "run", "exit"]
    ours = runs_in(tmp_path)
    assert set(wandb_service.runs) == set(ours) == {"sweep000r0", "sweep000r1"}
    for number, drawn in enumerate(DRAWN):
        run, (_, manifest) = wandb_service.runs[f"sweep000r{number}"], ours[f"sweep000r{number}"]
        assert (run.sweep, run.project, run.exit_code) == ("sweep000", "mine", 0)
        assert run.summary["tuned/val_loss"] == manifest.results["tuned_val_loss"]
        assert run.settings["lora"]["r"] == drawn["lora.r"]
        assert {key: run.settings[key] for key in drawn} == drawn  # as the search reads them
        assert manifest.status is Status.SUCCEEDED


def test_the_local_controller_draws_from_what_the_runs_came_to(
    sweep_of_the_page,
    wandb_command,
    wandb_service,
    wandb_sweeps,
    environment,
    tmp_path,
):
    """W&B's own local search reads the first run and draws the second."""
    pytest.importorskip("sweeps", reason="sweeps is missing: pip install 'wandb[sweeps]'")
    lane = {"backend": {"values": ["qlora", "lora"]}, "lora.r": {"values": [8]}}
    told = sweep_of_the_page(method="grid", parameters=lane, controller={"type": "local"})
    with (tmp_path / "controller.log").open("wb") as log:
        controller = fork_server.Popen(
            [sys.executable, "-m", "wandb", "controller", "sweep000"],
            cwd=tmp_path,
            env={**environment, "WANDB_ENTITY": "lab", "WANDB_PROJECT": "mine"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            wandb_command("agent", told)
            assert controller.wait(120) == 0
        finally:
            controller.kill()
            controller.wait()
    assert wandb_service.unknown == []
    # The grid has two cells and no third is drawn: the runs' configurations had both.
    drawn = [run.settings["backend"] for run in wandb_service.runs.values()]
    assert sorted(drawn) == ["lora", "qlora"]
    assert [run.exit_code for run in wandb_service.runs.values()] == [0, 0]
    assert {run.sweep for run in wandb_service.runs.values()} == {"sweep000"}
    assert all("tuned/val_loss" in run.summary for run in wandb_service.runs.values())


def test_a_run_that_is_stopped_in_the_service_ends_in_order(
    sweep_of_the_page,
    wandb_service,
    wandb_sweeps,
    environment,
    tmp_path,
):
    """The agent stops the run: its record says cancelled, and the service has all steps."""
    wandb_sweeps.suggestions = DRAWN[:1]
    told = sweep_of_the_page("trainer.max_steps=100000", "checkpoint.every_n_steps=100000")
    with (tmp_path / "agent.log").open("wb") as log:
        agent = fork_server.Popen(
            [sys.executable, "-m", "wandb", "agent", told],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            run = waited_for(lambda: has_steps(wandb_service))
            wandb_sweeps.stopping.add(run.name)
            assert agent.wait(300) == 0
        finally:
            agent.kill()
            agent.wait()
    assert [one["type"] for one in wandb_sweeps.commands][-2:] == ["stop", "exit"]
    ((directory, manifest),) = runs_in(tmp_path).values()
    assert manifest.status is Status.CANCELLED
    assert manifest.error is None
    waited_for(lambda: not directory.sync_lock.exists())
    assert run.exit_code == 1
    assert run.summary["status"] == "cancelled"
    last = [event["payload"] for event in read_events(directory.telemetry)]
    steps = [one["step"] for one in last if "train/loss" in one]
    assert [row["step"] for row in run.history if "train/loss" in row] == steps


def has_steps(service):
    """Return the agent's run, once the service has two steps of it."""
    run = service.runs.get("sweep000r0")
    rows = [] if run is None else [row for row in run.history if "train/loss" in row]
    return run if len(rows) > 1 else None


def waited_for(found):
    deadline = time.monotonic() + 240
    while not (what := found()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.2)
    return what


def test_what_an_agent_ran_offline_is_sent_later_as_the_agents_run(
    sweep_of_the_page,
    wandb_command,
    wandb_service,
    wandb_sweeps,
    tmp_path,
    monkeypatch,
):
    """It is sent once, with its id and sweep, however often task=sync runs."""
    wandb_sweeps.suggestions = DRAWN[:1]
    command = [
        "logger.mode=offline" if "mode=" in text else text for text in page_file()["command"]
    ]
    wandb_command("agent", sweep_of_the_page(command=command))
    run = wandb_service.runs["sweep000r0"]
    assert not run.is_begun
    ((directory, manifest),) = runs_in(tmp_path).values()
    synced = ["task=sync", f"path={directory.path}"]
    assert cli.main([*synced, f"hydra.run.dir={tmp_path}/first"]) == 0
    assert set(wandb_service.runs) == {"sweep000r0"}
    assert (run.sweep, run.project, run.exit_code) == ("sweep000", "mine", 0)
    assert run.summary["tuned/val_loss"] == manifest.results["tuned_val_loss"]
    assert {key: run.settings[key] for key in DRAWN[0]} == DRAWN[0]
    wandb_service.operations.clear()
    assert cli.main([*synced, f"hydra.run.dir={tmp_path}/second"]) == 0
    assert wandb_service.operations == []
