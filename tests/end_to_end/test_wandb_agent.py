"""The run of a W&B sweep agent, whose command wandb's own code makes from the docs' file."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path

import fork_server
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.overrides import check

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "wandb.md"
PARAMETERS = {"optim.lr": 0.000123, "lora.r": 8, "backend": "qlora"}
ENVIRONMENT = {"WANDB_PROJECT": "mine", "WANDB_RUN_ID": "abc123", "WANDB_SWEEP_ID": "swp456"}


def page_file():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return dict(yaml.safe_load(text))


def command_of_agent(parameters, monkeypatch):
    """Fill in the command of the file, like `wandb.wandb_agent.Agent` for a run."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    file = page_file()
    told = {"args": {name: {"value": value} for name, value in parameters.items()}}
    found = create_sweep_command_args(told)
    found |= {"env": [], "interpreter": [sys.executable], "program": [file["program"]]}
    command = []
    for part in create_sweep_command(copy.deepcopy(file["command"])):
        is_macro = part.startswith("${") and part.endswith("}")
        command += found[part[2:-1]] if is_macro else [part]
    return command


def test_every_value_of_the_page_is_accepted(monkeypatch):
    """Each choice, and both ends of each interval."""
    parameters = page_file()["parameters"]
    assert set(parameters) == set(PARAMETERS)
    for key, one in parameters.items():
        for value in one.get("values") or [one["min"], one["max"]]:
            command = command_of_agent({**PARAMETERS, key: value}, monkeypatch)
            assert command[1:3] == ["-m", "mens_exp"]
            assert "logger.project=mine" in command
            assert [str(problem) for problem in check(command[3:]).problems] == []


def test_the_agents_run_is_the_one_that_it_waits_for(tiny_run, tmp_path, monkeypatch):
    """Offline here; the history has the sweep's metric."""
    command = command_of_agent(PARAMETERS, monkeypatch)
    ours = [text for text in tiny_run if not text.startswith(("logger=", "optim.lr="))]
    offline = [text for text in command if text != "logger.mode=online"]
    place = tmp_path / "run"
    source = os.pathsep.join(filter(None, sys.path))
    done = fork_server.run(
        [*offline, *ours, "logger=wandb", f"hydra.run.dir={place}"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source, "HOME": str(tmp_path)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "optim.lr=0.000123" in Manifest.read(place / "manifest.json").overrides
    read = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(place / "wandb")]
    text = fork_server.run(read, check=True, capture_output=True, text=True).stdout
    records = [json.loads(line) for line in text.splitlines()]
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert (run["run_id"], run["sweep_id"], run["project"]) == ("abc123", "swp456", "mine")
    metric = page_file()["metric"]["name"]
    assert metric == "tuned/val_loss"
    assert any(metric in json.dumps(record) for record in records if record["type"] == "history")
