"""Signals that a process sends itself at chosen places of a run.

A planned signal is ``{"at": <place>, "call": n, "signal": name}``: the process signals itself just
before call ``n`` (from 0) of the place, and sleeps ``sleep_s`` seconds after it, 0 by default.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from pathlib import Path

PLACES = {
    "micro-batch": ("mens_exp.training.module", "TrainingModule", "training_step"),
    "validation": ("mens_exp.training.module", "TrainingModule", "validation_step"),
    "rename of a checkpoint": ("pathlib", "Path", "replace"),
    "adapter": ("mens_exp.training.callbacks.adapter_writer", None, "write_adapter"),
    "report": ("mens_exp.report.write", None, "write_report"),
}


def source(planned):
    """Return the code that a process executes first, for `fork_server.Popen(before=…)`."""
    here = str(Path(__file__).parent)
    return (
        f"import sys; sys.path.append({here!r}); import json, planned_signals\n"
        f"for one in json.loads({json.dumps(planned)!r}): planned_signals.arm(one)\n"
    )


def arm(planned):
    """Signal this process before one call of a place."""
    module, owner, name = PLACES[planned["at"]]
    holder = importlib.import_module(module)
    if owner is not None:
        holder = getattr(holder, owner)
    original = getattr(holder, name)
    calls = 0

    def watched(*args, **kwargs):
        nonlocal calls
        if owner == "TrainingModule" and type(args[0]) is not holder:
            return original(*args, **kwargs)  # the probe before step 1 trains its own module
        if name != "replace" or Path(args[1]).suffix == ".ckpt":
            calls += 1
            if calls == planned["call"] + 1:
                os.kill(os.getpid(), getattr(signal, planned["signal"]))
                time.sleep(planned.get("sleep_s", 0))
        return original(*args, **kwargs)

    setattr(holder, name, watched)
