from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mens_exp.artifacts.run_dir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Stopped:
    """A run that a signal ended."""

    run: RunDir
    ends: list[int]
    log: str


def at(place: str, call: int, signal: str, **more: Any) -> dict[str, Any]:
    return {"at": place, "call": call, "signal": signal, **more}


# tiny_run takes four micro-batches a step and saves every second step: steps 2, 4 and 6 here.
LONGER = "trainer.max_steps=6"
VALIDATING = [LONGER, "trainer.val_check_interval=4"]
SCENARIOS: dict[str, tuple[list[str], list[list[dict[str, Any]]]]] = {
    "in mid-epoch": ([LONGER], [[at("micro-batch", 20, "SIGKILL")]]),
    "in mid-accumulation": ([LONGER], [[at("micro-batch", 22, "SIGKILL")]]),
    "before the first checkpoint": ([LONGER], [[at("micro-batch", 5, "SIGKILL")]]),
    "while a checkpoint is written": ([LONGER], [[at("rename of a checkpoint", 1, "SIGKILL")]]),
    "while a checkpoint is written, left alone": (
        [LONGER],
        [[at("rename of a checkpoint", 1, "SIGKILL")]],
    ),
    "before the adapter is written": ([LONGER], [[at("adapter", 0, "SIGKILL")]]),
    "twice": ([LONGER], [[at("micro-batch", 10, "SIGKILL")], [at("micro-batch", 9, "SIGKILL")]]),
    "with validation": (VALIDATING, [[at("micro-batch", 18, "SIGKILL")]]),
    "SIGINT": ([], [[at("micro-batch", 10, "SIGINT")]]),
    "SIGTERM": ([], [[at("micro-batch", 10, "SIGTERM")]]),
    "SIGINT twice": (
        [],
        [[at("micro-batch", 10, "SIGINT"), at("report", 0, "SIGINT", sleep_s=60)]],
    ),
    "SIGINT while closing": ([], [[at("report", 0, "SIGINT")]]),
}


@pytest.fixture(scope="session")
def stopped(
    tiny_run: list[str], cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Stopped]:
    """Every scenario, played once; each may be used up by one test, which resumes it."""
    root = tmp_path_factory.mktemp("stopped")
    commands: dict[str, list[dict[str, Any]]] = {}
    for name, (overrides, attempts) in SCENARIOS.items():
        directory = root / name.replace(" ", "_").replace(",", "")
        by_key = {text.partition("=")[0]: text for text in [*tiny_run, *overrides]}
        first = [*by_key.values(), f"hydra.run.dir={directory}"]
        commands[name] = [
            {
                "arguments": first if number == 0 else [f"resume={directory}"],
                "log": str(root / f"{directory.name}.{number}.log"),
                "signals": signals,
            }
            for number, signals in enumerate(attempts)
        ]
    scenarios = root / "scenarios.json"
    scenarios.write_text(json.dumps(commands), encoding="utf-8")
    source = os.pathsep.join(filter(None, sys.path))
    script = Path(__file__).with_name("stopped.py")
    done = subprocess.run(
        [sys.executable, str(script), str(scenarios)],
        check=False,
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": source, "MENS_EXP_CACHE": str(cache)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)

    def one(name: str) -> Stopped:
        directory = root / name.replace(" ", "_").replace(",", "")
        log = Path(commands[name][-1]["log"]).read_text(encoding="utf-8")
        return Stopped(RunDir(directory), ends[name], log)

    return one
