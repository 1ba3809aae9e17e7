from __future__ import annotations

import sys
from dataclasses import dataclass

import fork_server
import planned_signals
import pytest

from mens_exp.artifacts.run_dir import RunDir


@dataclass
class Stopped:
    """A run that a signal stopped."""

    run: RunDir
    ends: list[int]
    log: str


def at(place, call, signal, **more):
    return {"at": place, "call": call, "signal": signal, **more}


# tiny_run takes two micro-batches a step and saves every second step: 2, 4 and 6 here.
LONGER = "trainer.max_steps=6"
VALIDATING = [LONGER, "trainer.val_check_interval=2"]
SCENARIOS = {
    "in mid-epoch": ([LONGER], [[at("micro-batch", 10, "SIGKILL")]]),
    "in mid-accumulation": ([LONGER], [[at("micro-batch", 11, "SIGKILL")]]),
    "before the first checkpoint": ([LONGER], [[at("micro-batch", 3, "SIGKILL")]]),
    "while a checkpoint is written": ([LONGER], [[at("rename of a checkpoint", 1, "SIGKILL")]]),
    "before the adapter is written": ([LONGER], [[at("adapter", 0, "SIGKILL")]]),
    "twice": ([LONGER], [[at("micro-batch", 5, "SIGKILL")], [at("micro-batch", 5, "SIGKILL")]]),
    "with validation": (VALIDATING, [[at("micro-batch", 9, "SIGKILL")]]),
    "SIGINT": ([], [[at("micro-batch", 5, "SIGINT")]]),
    "SIGTERM": ([], [[at("micro-batch", 5, "SIGTERM")]]),
    "SIGINT twice": (
        [],
        [[at("micro-batch", 5, "SIGINT"), at("report", 0, "SIGINT", sleep_s=60)]],
    ),
    "SIGINT while closing": ([], [[at("report", 0, "SIGINT")]]),
}


@pytest.fixture
def stopped(tiny_run, tmp_path):
    """Run a scenario: commands in processes that send signals to themselves."""

    def play(name):
        overrides, attempts = SCENARIOS[name]
        directory = tmp_path / "stopped"
        by_key = {text.partition("=")[0]: text for text in [*tiny_run, *overrides]}
        ends, log = [], ""
        for number, planned in enumerate(attempts):
            first = [*by_key.values(), f"hydra.run.dir={directory}"]
            done = fork_server.run(
                [
                    *(sys.executable, "-m", "mens_exp"),
                    *(first if number == 0 else [f"resume={directory}"]),
                ],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                before=planned_signals.source(planned),
                timeout=300,
            )
            ends.append(done.returncode)
            log = done.stdout + done.stderr
        return Stopped(RunDir(directory), ends, log)

    return play
