from __future__ import annotations

import io
import json
import runpy
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
from rich.console import Console

from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.provenance import code_digest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import (
    Dimension,
    JobState,
    SearchRecord,
    SweepDir,
    SweepJob,
    SweepRecord,
)
from mens_exp.sweeps import executors
from mens_exp.sweeps.launcher import Launcher
from mens_exp.sweeps.process import Child

UTC = "2026-11-20T05:58:01.123Z"


def _job(number, **more):
    """A job in its state at launch."""
    made = {
        "number": number,
        "directory": f"{number}_job",
        "differs": [f"seed={number}"],
        "state": JobState.WAITING,
        "reason": None,
        "config_digest": "c" * 64,
        "contract": None,
        "estimate": {"time_s": None, "memory_bytes": None, "disk_bytes": None},
        "results": {},
        "notes": [],
        "attempts": [],
    }
    return SweepJob(**{**made, **more})


def _record(*jobs, **more):
    """A sweep of the given jobs, one at a time and without retries."""
    made = {
        "sweep_id": "s",
        "created_utc": UTC,
        "command": ["seed=1,2"],
        "code_sha256": code_digest(),
        "n_jobs": 1,
        "threads": 1,
        "retries": 0,
        "changes": "refuse",
        "jobs": list(jobs),
    }
    return SweepRecord(**{**made, **more})


def _manifest(run, status, **more):
    """Write a run's record."""
    made = {
        "run_id": run.path.name,
        "task": "train",
        "status": status,
        "started_utc": UTC,
        "config_digest": "c" * 64,
        "seed": 1,
    }
    written = Manifest(**{**made, **more})
    run.path.mkdir(parents=True, exist_ok=True)
    written.write(run.manifest)
    return written


@pytest.fixture
def write_manifest():
    """Return a function that writes a run's record with a given status."""
    return _manifest


@pytest.fixture
def make_sweep():
    """Make the record of a sweep; each argument holds the changed fields of one job."""

    def made(*jobs, **more):
        return _record(*(_job(number, **one) for number, one in enumerate(jobs)), **more)

    return made


def dimension(key, **more):
    """A key that is drawn, from choices by default."""
    made = {
        "key": key,
        "kind": "choice",
        "values": [],
        "low": None,
        "high": None,
        "step": None,
        "log": False,
    }
    return Dimension(**{**made, **more})


@pytest.fixture
def make_search():
    """Make the search part of a record: the rank and the learning rate of ten trials."""

    def made(**more):
        usual = {
            "sampler": "random",
            "seed": 0,
            "startup_trials": 10,
            "n_trials": 10,
            "pruner": "none",
            "pruner_startup_trials": None,
            "pruner_min_steps": 1,
            "objectives": ["val_loss"],
            "directions": ["minimize"],
            "fixed": [],
            "space": [
                dimension("lora.r", values=["4", "8"]),
                dimension("optim.lr", kind="float", low=1e-5, high=1e-2, log=True),
            ],
            "trials": [],
            "best": [],
            "importance": {},
            "importance_unknown": None,
        }
        return SearchRecord(**{**usual, **more})

    return made


# The stand-in for a job. It executes the list of steps in its directory, one list for each
# attempt. `end` writes the record, `exit` ends, `kill` dies by a signal, `wait` waits for a file.
STAND_IN = """
import json, os, signal, sys, time
place = sys.argv[1]
scripts = json.load(open(f"{place}/scripts.json"))
number = len([n for n in os.listdir(place) if n.startswith("tried_")])
open(f"{place}/tried_{number}", "w").write(json.dumps(dict(os.environ)))
for step, value in scripts[min(number, len(scripts) - 1)]:
    if step == "end":
        os.replace(f"{place}/manifest_{value}.json", f"{place}/manifest.json")
    elif step == "say":
        print(value, flush=True)
    elif step == "exit":
        sys.exit(value)
    elif step == "kill":
        os.kill(os.getpid(), getattr(signal, value))
    elif step == "on interrupt":
        signal.signal(signal.SIGINT, lambda *_, code=value: sys.exit(code))
        open(f"{place}/listens", "w").close()
    elif step == "on end":
        signal.signal(signal.SIGTERM, lambda *_, code=value: sys.exit(code))
    elif step == "wait":
        began = time.time()
        while not os.path.exists(value) and time.time() - began < 30:
            time.sleep(0.01)
"""


@pytest.fixture
def stand_in(tmp_path):
    """The program that stands in for jobs."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN, encoding="utf-8")
    return script


@pytest.fixture
def scripted(tmp_path):
    """Write the directories of jobs, one list of scripts for each; return the sweep's record."""

    def made(*scripts, **more):
        directory = SweepDir(tmp_path / "sweep")
        jobs = [_job(number) for number in range(len(scripts))]
        for one, script_of_one in zip(jobs, scripts, strict=True):
            run = RunDir(directory.path / one["directory"])
            for status in Status:
                _manifest(run, status, results={"wall_s": 2.0, "tuned_val_loss": 1.5})
                run.manifest.replace(run.path / f"manifest_{status.value}.json")
            for frozen in (run.config, run.job, run.report):
                frozen.touch()
            (run.path / "scripts.json").write_text(json.dumps(script_of_one), encoding="utf-8")
        return directory, _record(*jobs, **more)

    return made


@pytest.fixture
def sweep(stand_in, scripted, monkeypatch):
    """Make a launcher whose jobs are stand-ins, one list of scripts for each."""

    def start(arguments, log, environment):
        with log.open("ab") as output:
            return Child(
                subprocess.Popen(
                    [sys.executable, "-S", str(stand_in), *arguments],
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
            )

    monkeypatch.setattr(executors, "start", start)
    monkeypatch.setattr(executors.LocalExecutor, "look_s", 0.01)

    def made(*scripts, **more):
        return Launcher(*scripted(*scripts, **more), Console(file=io.StringIO()))

    return made


@pytest.fixture
def forked_by_slurm(programs, monkeypatch):
    """Let Slurm's scripts, which name their launcher's interpreter, use one that forks.

    The forked process does not descend from Slurm's, so signals reach only the batch script.
    """
    python = str(programs / "python")
    source = f"{fork_server._before_each}\nimport sys; sys.executable = {python!r}\n"
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(fork_server, "_before_each", source)


@pytest.fixture(scope="module")
def slurm_of_one_node():
    """Use a one-node cluster's commands in this process and in all that it starts."""
    stand_in = runpy.run_path(str(Path(__file__).with_name("slurm_cluster.py")))
    with pytest.MonkeyPatch.context() as patch, stand_in["cluster"]() as environment:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield
