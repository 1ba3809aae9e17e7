"""The other processes of a run: they train along with the first one and leave no record.

``python -m mens_exp.tasks.following <port> <rank> <processes>`` is how the first process starts
one on its own machine; under torchrun every command but the first comes here too. What is trained
is not read from the command line but told by the first process.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.plan.ranks import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store

__all__ = ["follow_from_elsewhere", "main"]


def main(arguments: Sequence[str]) -> int:
    """Train along with the process that has started this one.

    Args:
        arguments: the port where the processes meet, which of them this is, and how many there are.

    Returns:
        The exit code.
    """
    from mens_exp.training.process_group import store_at

    port, number, many = map(int, arguments)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    rank = Rank(rank=number, world_size=many, local_rank=number, local_world_size=many)
    return _ended(rank, lambda: store_at(port, many))


def follow_from_elsewhere(rank: Rank) -> int:
    """Train along as one of the processes that torchrun has started; return the exit code."""
    from mens_exp.training.process_group import store_of_torchrun

    return _ended(rank, store_of_torchrun)


def _end_with(parent: int) -> None:
    """End when the first process has: a GPU's collective would wait for it for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _ended(rank: Rank, meet: Callable[[], Store]) -> int:
    import traceback

    from mens_exp.errors import MensError
    from mens_exp.tasks.one_run import complain
    from mens_exp.training.process_group import lost_touch

    try:
        _follow(rank, meet())
    except MensError as error:
        complain(getattr(error, "problems", [error]))
        return error.exit_code
    except Exception as error:  # noqa: BLE001  # the outermost place: shown whole, for the log
        lost = lost_touch(error)
        if lost is None:
            traceback.print_exc()
        else:
            complain([lost])
        return 1
    return 0


def _follow(rank: Rank, store: Store) -> None:
    """Do what the first process does, on a record that is thrown away."""
    from mens_exp.artifacts import atomic
    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.compose import from_yaml, typed
    from mens_exp.plan.preflight import writable_cache
    from mens_exp.tasks.fitting import fit, read_inputs
    from mens_exp.tasks.run import Run
    from mens_exp.training.build import device_of
    from mens_exp.training.process_group import joined, told

    known = told(store)
    with tempfile.TemporaryDirectory(prefix="mens_exp_process_") as place:
        directory = RunDir(Path(place))
        atomic.write_text(directory.config, known["config"])
        atomic.write_text(directory.manifest, known["manifest"])
        atomic.write_text(directory.chat_template, known["chat_template"])
        config = typed(from_yaml(directory.config))
        run = Run(directory, Manifest.read(directory.manifest))
        device = device_of(config.trainer.accelerator, rank.local_rank)
        try:
            with joined(rank, device, store):
                inputs = read_inputs(config, run, writable_cache())
                fit(config, run, inputs, rank, checkpoint=known["checkpoint"])
        finally:
            run.telemetry.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
