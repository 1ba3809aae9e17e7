"""Run commands of mens_exp, each in a process of its own that a signal stops at a chosen place.

usage: python stopped.py <scenarios.json>

A scenario is a list of commands, run one after the other:
``{"arguments": [...], "log": <file>, "signals": [{"at": <place>, "call": n, "signal": name}]}``.
The process signals itself just before call ``n`` (from 0) of the place. Prints, as JSON, how each
process ended: its exit code, or minus the number of the signal that ended it.

The processes are forked from this one after its imports, which take most of a short run's time.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HEAVY = ("bitsandbytes", "lightning", "mens_exp.cli", "peft.tuners.lora", "transformers")
PLACES = {
    "micro-batch": ("mens_exp.training.module", "TrainingModule", "training_step"),
    "validation": ("mens_exp.training.module", "TrainingModule", "validation_step"),
    "rename of a checkpoint": ("pathlib", "Path", "replace"),
    "adapter": ("mens_exp.training.callbacks.adapter_writer", None, "write_adapter"),
    "report": ("mens_exp.report.write", None, "write_report"),
}


def main() -> None:
    """Run every scenario of the file named on the command line."""
    scenarios = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for name in HEAVY:
        importlib.import_module(name)
    ends = {name: [run(one) for one in commands] for name, commands in scenarios.items()}
    sys.stdout.write(json.dumps(ends))


def run(command: dict[str, Any]) -> int:
    """Fork, run one command in the child, and wait for its end."""
    child = os.fork()
    if child == 0:
        log = os.open(command["log"], os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for planned in command["signals"]:
            arm(planned)
        from mens_exp import cli

        code = cli.main(command["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def arm(planned: dict[str, Any]) -> None:
    """Make one call of a place signal this process first."""
    module, owner, name = PLACES[planned["at"]]
    holder = importlib.import_module(module)
    if owner is not None:
        holder = getattr(holder, owner)
    original: Callable[..., Any] = getattr(holder, name)
    calls = 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if owner == "TrainingModule" and type(args[0]) is not holder:
            return original(*args, **kwargs)  # the trial before step 1 trains a module of its own
        if name != "replace" or Path(args[1]).suffix == ".ckpt":
            calls += 1
            if calls == planned["call"] + 1:
                os.kill(os.getpid(), getattr(signal, planned["signal"]))
                time.sleep(planned.get("sleep_s", 0))
        return original(*args, **kwargs)

    setattr(holder, name, watched)


if __name__ == "__main__":
    main()
