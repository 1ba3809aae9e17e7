"""The other processes of a run: they train along with the first one and leave no record.

``python -m mens_exp.tasks.following <port> <rank> <processes> <first> <place>`` is how the first
process starts one on its own machine; under torchrun every command but the first comes here too.
What is trained is not read from the command line but told by the first process.
"""

from __future__ import annotations

import os
import shutil
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

__all__ = ["PLACE", "command", "follow_from_elsewhere", "main"]

PLACE = "mens_exp_process_"  # begins the name of a directory for what is thrown away
_LOOK_S = 0.2  # between two looks whether the first process is still there


def command(port: int, number: int, many: int, place: str) -> tuple[str, ...]:
    """Return the arguments of ``python`` that start one beside this process.

    Args:
        port: where the processes meet.
        number: of the process, from 1.
        many: processes in all.
        place: a directory for what is thrown away; each takes its own below it.
    """
    numbers = map(str, (port, number, many, os.getpid()))
    return ("-m", "mens_exp.tasks.following", *numbers, place)


def main(arguments: Sequence[str]) -> int:
    """Train along with the process that has started this one.

    Args:
        arguments: the port where the processes meet, which of them this is, how many there are,
            the system's number of the first, and a directory for what they throw away.

    Returns:
        The exit code.
    """
    *numbers, place = arguments
    port, number, many, first = map(int, numbers)
    # Before torch is loaded, which takes seconds: the first process may have been killed meanwhile.
    watch = threading.Thread(target=_end_with, args=(first, Path(place)), daemon=True)
    watch.start()
    from mens_exp.training.process_group import store_at

    rank = Rank(rank=number, world_size=many, local_rank=number, local_world_size=many)
    mine = Path(place) / str(number)
    mine.mkdir()
    code = _ended(rank, lambda: store_at(port, many), mine)
    if code:
        watch.join(5 * _LOOK_S)  # where the first was killed, nobody else clears up
    return code


def follow_from_elsewhere(rank: Rank) -> int:
    """Train along as one of the processes that torchrun has started; return the exit code."""
    from mens_exp.training.process_group import store_of_torchrun

    with tempfile.TemporaryDirectory(prefix=PLACE) as place:
        return _ended(rank, store_of_torchrun, Path(place))


def _end_with(first: int, place: Path) -> None:
    """End when the first process has: a GPU's collective would wait for it for ever."""
    while os.getppid() == first:
        time.sleep(_LOOK_S)
    for _ in range(100):
        shutil.rmtree(place, ignore_errors=True)
        if not place.exists():  # what trains may have written there meanwhile
            break
    os._exit(1)


def _ended(rank: Rank, meet: Callable[[], Store], place: Path) -> int:
    """Train along, and show what goes wrong; return the exit code."""
    import traceback

    from mens_exp.errors import MensError
    from mens_exp.tasks.one_run import complain
    from mens_exp.training.process_group import lost_touch

    try:
        _follow(rank, meet(), place)
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


def _follow(rank: Rank, store: Store, place: Path) -> None:
    """Do what the first process does, on a record in `place` that is thrown away."""
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
    directory = RunDir(place)
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
