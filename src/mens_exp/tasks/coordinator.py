"""Coordinator of a distributed run, which keeps the only record, and its workers.

Each worker is ``python -m mens_exp.tasks.coordinator``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.manifest import Status
from mens_exp.errors import MensError
from mens_exp.planning.machine import ALONE, Rank, of_torchrun
from mens_exp.tasks.run import Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._C._distributed_c10d import Store

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import TrainingError
    from mens_exp.tasks.run import Run

_NOTICED_S = 5.0  # from a broken connection until the peer process has exited


@contextmanager
def distributed_run(config: RunConfig, run: Run, checkpoint: Path | None) -> Iterator[Rank]:
    """Run all processes of the run inside the block; a single-process run starts none.

    The processes are those that torchrun has started, or they are started here.

    Args:
        config: the whole configuration.
        run: the open run; the workers receive its configuration and its current state.
        checkpoint: training state to resume from.

    Raises:
        TrainingError: a worker has ended or cannot be reached.
    """
    if config.trainer.world_size == 1:
        yield ALONE
        return
    from mens_exp.training.build import device_of
    from mens_exp.training.distributed import (
        as_peer_failure,
        joined,
        open_store,
        publish,
        started_workers,
        store_of_torchrun,
    )

    rank = of_torchrun()
    with ExitStack() as stack:
        stack.enter_context(_threads_kept())
        others = None
        if rank is None:
            many = config.trainer.world_size
            rank = Rank(rank=0, world_size=many, local_rank=0, local_world_size=many)
            meeting = open_store(many)
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix=PLACE))
            lines = {
                number: command(meeting.port, number, many, place) for number in range(1, many)
            }
            others = stack.enter_context(
                started_workers(
                    lines, run.dir.processes, stuck=lambda error: _give_up(run, error, place)
                )
            )
            store: Store = meeting
        else:
            store = store_of_torchrun()
        try:
            run.save()
            known = {
                "config": run.dir.config.read_text("utf-8"),
                "manifest": run.dir.manifest.read_text("utf-8"),
                "chat_template": run.dir.chat_template.read_text("utf-8"),
                "checkpoint": None if checkpoint is None else str(checkpoint),
            }
            publish(store, known)
            with joined(rank, device_of(config.trainer.accelerator, rank.local_rank), store):
                try:
                    yield rank
                except (MensError, Cancelled, KeyboardInterrupt):
                    if others is not None:
                        others.end()  # otherwise leaving the process group could deadlock
                    raise
        except MensError:
            raise
        except Exception as error:
            found = None if others is None else others.failed_within(_NOTICED_S)
            if (found := found or as_peer_failure(error)) is not None:
                raise found from error
            raise


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Restore the number of compute threads, which Lightning permanently splits among processes."""
    import torch

    name = "OMP_NUM_THREADS"
    threads, said = torch.get_num_threads(), os.environ.get(name)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if said is None:
            os.environ.pop(name, None)


def _give_up(run: Run, error: TrainingError, place: str) -> None:
    """Close the record and exit, because this process would wait forever for a dead one."""
    from mens_exp.tasks.run import complain

    if not run.is_closing:
        complain([error])
        run.close(Status.FAILED, error)
        run.dir.lock.unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        os._exit(error.exit_code)


PLACE = "mens_exp_process_"  # name prefix of a scratch directory
_LOOK_S = 0.2  # polling interval for the first process


def command(port: int, number: int, many: int, place: str) -> tuple[str, ...]:
    """Return the ``python`` arguments that start a worker of this process.

    Args:
        port: the rendezvous port.
        number: number of the worker, from 1.
        many: total number of processes.
        place: scratch directory; each worker uses its own subdirectory.
    """
    numbers = map(str, (port, number, many, os.getpid()))
    return ("-m", "mens_exp.tasks.coordinator", *numbers, place)


def main(arguments: Sequence[str]) -> int:
    """Train as a worker of the process that started this one.

    Args:
        arguments: the rendezvous port, the number of this process, the total number of processes,
            the pid of the first process, and a scratch directory.

    Returns:
        The exit code.
    """
    *numbers, place = arguments
    port, number, many, first = map(int, numbers)
    # Before torch is imported, which takes seconds: the first process may be killed meanwhile.
    watch = threading.Thread(target=_end_with, args=(first, Path(place)), daemon=True)
    watch.start()
    from mens_exp.training.distributed import store_at

    rank = Rank(rank=number, world_size=many, local_rank=number, local_world_size=many)
    mine = Path(place) / str(number)
    mine.mkdir()
    code = _ended(rank, lambda: store_at(port, many), mine)
    if code:
        watch.join(5 * _LOOK_S)  # if the first was killed, nothing else cleans up
    return code


def follow_from_elsewhere(rank: Rank) -> int:
    """Train as one of the processes that torchrun has started; return the exit code."""
    from mens_exp.training.distributed import store_of_torchrun

    with tempfile.TemporaryDirectory(prefix=PLACE) as place:
        return _ended(rank, store_of_torchrun, Path(place))


def _end_with(first: int, place: Path) -> None:
    """Exit once the first process has ended, because a GPU collective would wait forever for it."""
    while os.getppid() == first:
        time.sleep(_LOOK_S)
    for _ in range(100):
        shutil.rmtree(place, ignore_errors=True)
        if not place.exists():  # training may have written there meanwhile
            break
    os._exit(1)


def _ended(rank: Rank, meet: Callable[[], Store], place: Path) -> int:
    """Train as a worker, print any error, and return the exit code."""
    import traceback

    from mens_exp.errors import MensError
    from mens_exp.tasks.run import complain
    from mens_exp.training.distributed import as_peer_failure

    try:
        _follow(rank, meet(), place)
    except MensError as error:
        complain(getattr(error, "problems", [error]))
        return error.exit_code
    except Exception as error:  # noqa: BLE001  # outermost handler: full traceback for the log
        lost = as_peer_failure(error)
        if lost is None:
            traceback.print_exc()
        else:
            complain([lost])
        return 1
    return 0


def _follow(rank: Rank, store: Store, place: Path) -> None:
    """Do the work of the first process, with a throwaway record in `place`."""
    from mens_exp.artifacts import atomic
    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.compose import from_yaml, typed
    from mens_exp.planning.preflight import writable_cache
    from mens_exp.tasks.fit import fit, read_inputs
    from mens_exp.tasks.run import Run
    from mens_exp.training.build import device_of
    from mens_exp.training.distributed import joined, receive

    known = receive(store)
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
