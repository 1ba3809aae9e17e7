"""The first process of a run: it has the others train along, and keeps the only record."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mens_exp.artifacts.manifest import Status
from mens_exp.errors import MensError
from mens_exp.plan.ranks import ALONE, Rank, of_torchrun
from mens_exp.tasks import following
from mens_exp.tasks.cancellation import Cancelled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch._C._distributed_c10d import Store

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import TrainingError
    from mens_exp.tasks.run import Run

__all__ = ["several"]

_NOTICED_S = 5.0  # from a broken connection to the end of the process at its other side


@contextmanager
def several(config: RunConfig, run: Run, checkpoint: Path | None) -> Iterator[Rank]:
    """Have all processes of the run train along inside the block; nothing is started for one.

    They are those that torchrun has started, or are started here.

    Args:
        config: the whole configuration.
        run: the open run; the others get its configuration and what it knows already.
        checkpoint: training state to go on from.

    Raises:
        TrainingError: one of the others has ended, or cannot be reached.
    """
    if config.trainer.world_size == 1:
        yield ALONE
        return
    from mens_exp.training.build import device_of
    from mens_exp.training.other_processes import started
    from mens_exp.training.process_group import (
        joined,
        lost_touch,
        open_store,
        store_of_torchrun,
        tell,
    )

    rank = of_torchrun()
    with ExitStack() as stack:
        stack.enter_context(_threads_kept())
        others = None
        if rank is None:
            many = config.trainer.world_size
            rank = Rank(rank=0, world_size=many, local_rank=0, local_world_size=many)
            meeting = open_store(many)
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix=following.PLACE))
            lines = {
                number: following.command(meeting.port, number, many, place)
                for number in range(1, many)
            }
            others = stack.enter_context(
                started(lines, run.dir.processes, stuck=lambda error: _give_up(run, error, place))
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
            tell(store, known)
            with joined(rank, device_of(config.trainer.accelerator, rank.local_rank), store):
                try:
                    yield rank
                except (MensError, Cancelled, KeyboardInterrupt):
                    if others is not None:
                        others.end()  # leaving the group may wait for what they wait for
                    raise
        except MensError:
            raise
        except Exception as error:
            found = None if others is None else others.failed_within(_NOTICED_S)
            if (found := found or lost_touch(error)) is not None:
                raise found from error
            raise


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Put back how many threads compute: Lightning shares them out among processes for good."""
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
    """Close the record and end: this process waits for another that has ended, and always will."""
    from mens_exp.tasks.one_run import complain

    if not run.is_closing:
        complain([error])
        run.close(Status.FAILED, error)
        run.dir.lock.unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        os._exit(error.exit_code)
