"""The process of a job: ``python -m mens_exp.sweeps.job <directory> [--accept-changes]``.

The process runs the configuration that was frozen at launch, or resumes an earlier attempt. On
several Slurm nodes, srun starts it once for each process of the job (``--nodes=2``).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.host import collect_rarely, machine_fault, run_lock
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.provenance import code_digest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import Job
from mens_exp.errors import MensError, Problems, RequestError
from mens_exp.planning.machine import of_torchrun
from mens_exp.tasks.run import CANCELLED, ended, run_task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from mens_exp.config.overrides import Cell
    from mens_exp.planning.machine import Rank

ACCEPT_CHANGES, NODES = "--accept-changes", "--nodes"
# A failed process waits this long before it exits, because srun then kills the others, and the
# first one must have closed the record. On a single machine, the first process waits as long.
_NOTICED_S = 30.0
# With these variables, Lightning assumes a cluster job of several tasks and would requeue it.
OF_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS")
_KEPT = frozenset({"job.json", "job.lock", "job.log", "config.yaml"})


def main(arguments: Sequence[str]) -> int:
    """Run a job.

    Args:
        arguments: the job's directory; optionally ``--accept-changes``, to accept changes since
            the launch, and ``--nodes``, the number of nodes on which srun has started processes.

    Returns:
        The same exit code as a single run.
    """
    collect_rarely()
    given = _parsed(arguments)
    run = RunDir(given.run)
    rank = _of_srun(given.nodes) if given.nodes > 1 else None
    if rank is not None and not rank.is_first:
        return _follow(rank)
    # A launcher in the background of a shell ignores Ctrl-C, and its children inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with run_lock(run.job_lock):
            return _work(run, accept=given.accept_changes)
    except MensError as error:
        # On one line, because the sweep's record quotes the last line of the log as the reason.
        print("; ".join(map(str, getattr(error, "problems", [error]))), file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return CANCELLED
    except (OSError, MemoryError) as error:  # before its run was opened, or after it was closed
        refused = machine_fault(error, "sweep.resume")
        if refused is None:
            raise
        print(refused, file=sys.stderr)  # noqa: T201
        return refused.exit_code


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mens_exp.sweeps.job")
    parser.add_argument("run", type=Path)
    parser.add_argument(ACCEPT_CHANGES, action="store_true")
    parser.add_argument(NODES, type=int, default=1)
    return parser.parse_args(arguments)


def _of_srun(nodes: int) -> Rank | None:
    """Set torchrun's variables to the rank that srun gave this process, and return the rank."""
    processes = int(os.environ["SLURM_STEP_NUM_TASKS"])
    os.environ |= {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(processes // nodes),
    }
    for name in OF_TASKS:
        os.environ.pop(name, None)
    return of_torchrun()


def _follow(rank: Rank) -> int:
    """Train as a worker; the first process ends the workers."""
    from mens_exp.tasks.coordinator import follow_from_elsewhere

    def hear(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, hear)  # the first process closes the record; srun then ends this
    code = follow_from_elsewhere(rank)
    if code:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_NOTICED_S)
    return code


def _work(run: RunDir, *, accept: bool) -> int:
    job = Job.read(run.job)
    if not run.manifest.exists():
        return run_task(run.path, _frozen(run, job, accept=accept))
    manifest = Manifest.read(run.manifest)
    if manifest.status is Status.SUCCEEDED:  # killed afterwards, while rendering its report
        return _render(run)
    cell = _frozen(run, job, accept=accept)
    if cell.config.task.name != "train":
        _archive(run, len(list(run.path.glob("attempt_*"))) + 1)
        return run_task(run.path, cell)
    from mens_exp.tasks.train import prepare_resumption, resume_training

    resumption = prepare_resumption(str(run.path), {})
    return ended(lambda: resume_training(resumption), run.path)


def _frozen(run: RunDir, job: Job, *, accept: bool) -> Cell:
    """Read the configuration that was frozen at launch.

    Raises:
        RequestError: the configuration, the code or the rows have changed since the launch.
        Problems: several of these.
    """
    from mens_exp.config.compose import Composed, from_yaml, stored_digest, typed
    from mens_exp.config.overrides import Cell

    values = from_yaml(run.config)
    if stored_digest(run.config) != job.config_digest:
        raise RequestError(
            "the frozen configuration has changed",
            where=str(run.config),
            expected="what the sweep was launched with",
            remedy="start a new sweep for other settings",
        )
    composed = Composed(overrides=tuple(job.overrides), values=values, choices=job.choices)
    cell = Cell(composed=composed, config=typed(values), number=job.number)
    if not accept:
        Problems.raise_if(list(_changes(job, cell)))
    return cell


def _changes(job: Job, cell: Cell) -> Iterator[MensError]:
    """Yield changes since the launch of the sweep.

    Raises:
        DataError: rows that it names cannot be read.
    """
    remedy = "restore it, or continue anyway with sweep.changes=accept"
    if code_digest() != job.code_sha256:
        yield RequestError("the code of mens_exp has changed since the launch", remedy=remedy)
    for name, sha256 in job.own_files.items():
        path = Path.cwd() / name
        if not path.is_file() or sha256_file(path) != sha256:
            yield RequestError("has changed since the launch", where=name, remedy=remedy)
    if job.contract is not None:
        from mens_exp.planning import preflight
        from mens_exp.planning.contract import contract_of

        now = contract_of(cell.config).digest
        if now != job.contract:
            yield from preflight.check_data(cell.config)  # raises if rows are not there at all
            yield RequestError(
                "the files that it names have changed since the launch",
                where="data",
                found=f"contract {now[:12]}",
                expected=job.contract[:12],
                remedy=remedy,
            )


def _render(run: RunDir) -> int:
    if not run.report.exists():
        from mens_exp.report.write import write_report

        write_report(run)
    return 0


def _archive(run: RunDir, number: int) -> None:
    """Move the output of an attempt to attempt_<number>; only training resumes."""
    aside = run.path / f"attempt_{number}"
    aside.mkdir()
    for path in sorted(run.path.iterdir()):
        if path.name not in _KEPT and not path.name.startswith("attempt_"):
            path.replace(aside / path.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
