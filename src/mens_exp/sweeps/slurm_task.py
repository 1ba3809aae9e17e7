"""A job's batch process: ``python -m mens_exp.sweeps.slurm_task <sweep> --timeout-min=… …``.

Slurm runs it on a node for each start of a task of the job array. It starts the job, forwards
Slurm's warning of the time limit, records how the job ended, and requeues it at the time limit. A
job of several nodes is started by one ``srun``.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.host import lock_holder
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import AttemptLog, SweepDir, SweepRecord
from mens_exp.sweeps.job import ACCEPT_CHANGES, NODES, OF_TASKS
from mens_exp.sweeps.process import Ended, environment_of, start
from mens_exp.sweeps.slurm_commands import call, is_passing
from mens_exp.tasks.run import CANCELLED, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from mens_exp.sweeps.process import Process

TIMEOUT, PREEMPTED = "TIMEOUT", "PREEMPTED"
_LOOK_S = 0.5
_HEAR_S = 0.1  # a job takes seconds at least
_SLACK_S = 90  # a warning comes up to a minute early (sbatch's man page), plus the job's startup
_GONE_S = 5  # by default, Slurm sends SIGKILL 30 s after SIGTERM
_BY_SIGNAL = 128  # srun's exit code minus the signal's number


def main(arguments: Sequence[str]) -> int:
    """Run one task.

    Returns:
        The exit code of the job; 0 if it is requeued.
    """
    given = _parsed(arguments)
    directory = SweepDir(given.sweep)
    number = int(os.environ["SLURM_ARRAY_TASK_ID"])
    record = SweepRecord.read(directory.record)
    job = next(one for one in record.jobs if one["number"] == number)
    processes = job.get("processes", 1)
    run, log = RunDir(directory.path / job["directory"]), AttemptLog(directory.attempts(number))
    environment = environment_on_node(record.threads, processes)
    across = _srun(given.nodes, processes, record.threads) if given.nodes > 1 else []
    if across:
        environment |= {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(_free_port())}
    queue_id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{number}"
    began, warned = time.monotonic(), _Warned()
    while lock_holder(run.job_lock) is not None and not warned.was:
        time.sleep(_LOOK_S)  # Slurm lost track of an earlier start that is still running
    ended = supervise(
        [str(run.path), f"{NODES}={given.nodes}", *[ACCEPT_CHANGES] * given.accept_changes],
        run.log,
        environment,
        log,
        before=across,
        processes=processes,
        queue_id=queue_id,
        signals=warned.taken,
    )
    if across and warned.is_ended:
        _close(run)
    why = None
    if warned.was and ended.exit_code != 0:
        warning_s = 60 * given.timeout_min - given.signal_delay_s - _SLACK_S
        why = TIMEOUT if time.monotonic() - began >= warning_s else PREEMPTED
    log.ended(ended.exit_code, peak_rss_bytes=ended.peak_rss_bytes, why=why)
    mine = [one for one in log.attempts() if one.get("queue_id") == queue_id]
    late = sum(one.get("why") == TIMEOUT for one in mine)
    is_due = why == PREEMPTED or (why == TIMEOUT and late <= given.max_num_timeout)
    if is_due and not run.pruned.exists():
        call(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
        return 0
    code = ended.exit_code
    return code if code is not None and code >= 0 else 1


def supervise(
    arguments: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    log: AttemptLog,
    *,
    processes: int,
    queue_id: str,
    signals: Callable[[], list[int]],
    before: Sequence[str] = (),
) -> Ended:
    """Run a job to its end; the caller records the end and its reason.

    Args:
        arguments: arguments of ``python -m mens_exp.sweeps.job``.
        output: file for the job's output.
        environment: environment of the job.
        log: log of its attempts.
        processes: number of processes of the job, including workers.
        queue_id: the batch system's id of the job.
        signals: returns the signals to forward to the job, each once.
        before: the command that starts its processes on several nodes.

    Raises:
        OSError: the system cannot start another process.
    """
    process = start(arguments, output, environment, before)
    process.has_others = processes > 1
    log.began(process.pid, process.started, host=socket.gethostname(), queue_id=queue_id)
    pending: list[int] = []
    try:
        while (ended := process.ended()) is None:
            pending += signals()
            pending = [one for one in pending if not _passed_on(process, one, bool(before))]
            time.sleep(_HEAR_S)
    except BaseException:  # for example, another library's signal handler ends this process
        process.pass_on(signal.SIGTERM)
        raise
    if not before:
        return ended
    code = ended.exit_code
    if code is not None and code > _BY_SIGNAL and code != CANCELLED:
        code = _BY_SIGNAL - code
    return Ended(exit_code=code)  # the measured peak memory is only that of srun


def _passed_on(process: Process, number: int, is_across: bool) -> bool:
    """Send a signal to a job's processes; return whether it was sent or need not be sent again.

    On SIGTERM, srun kills all its processes at once (measured on 22.05), so ``scancel`` signals
    them instead; the caller tries again if the controller does not answer.
    """
    if not is_across:
        process.pass_on(number)
        return True
    try:
        call(["scancel", f"--signal={number}", os.environ["SLURM_JOB_ID"]])
    except OSError as error:
        return not is_passing(str(error))
    return True


def _close(run: RunDir) -> None:
    """Close the record of a job that Slurm cancels, if srun killed its processes before they could.

    srun does not forward SIGTERM: it kills the processes of all nodes at once.
    """
    until = time.monotonic() + _GONE_S
    while lock_holder(run.job_lock) is not None and time.monotonic() < until:
        time.sleep(_HEAR_S)
    manifest = Manifest.read(run.manifest) if run.manifest.is_file() else None
    if manifest is not None and manifest.status is Status.STARTED:
        manifest.notes.append("closed by the job's batch process, after srun had ended the others")
        Run(run, manifest).close(Status.CANCELLED)


def _srun(nodes: int, processes: int, threads: int) -> list[str]:
    """Return the srun command that starts a job on all nodes; a failed process ends the others.

    Args:
        nodes: number of nodes.
        processes: processes on each of them.
        threads: cores of the job on each of them.
    """
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes * processes}",
        f"--ntasks-per-node={processes}",
        f"--cpus-per-task={max(1, threads // processes)}",
        "--kill-on-bad-exit=1",
    ]


def _free_port() -> int:
    """Return a free port of this node for the rendezvous of the processes."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mens_exp.sweeps.slurm_task")
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--timeout-min", type=int, required=True)
    parser.add_argument("--signal-delay-s", type=int, required=True)
    parser.add_argument("--max-num-timeout", type=int, required=True)
    parser.add_argument(NODES, type=int, default=1)
    parser.add_argument(ACCEPT_CHANGES, action="store_true")
    return parser.parse_args(arguments)


def environment_on_node(threads: int, processes: int) -> dict[str, str]:
    """Return the environment of a job whose devices a batch system has assigned.

    Args:
        threads: threads of the job.
        processes: number of processes of the job.
    """
    made = environment_of(0, threads=threads, gpus=[], processes=processes)
    return {name: value for name, value in made.items() if name not in OF_TASKS}


class _Warned:
    """Handlers of Slurm's signals: SIGUSR1 warns of the time limit, and SIGTERM ends the job."""

    def __init__(self) -> None:
        self.was, self._left = False, False
        self.is_ended = False
        signal.signal(signal.SIGUSR1, self._hear)
        signal.signal(signal.SIGTERM, self._hear_end)  # Slurm sends it to the job's process too

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._left = self._left or not self.was
        self.was = True

    def _hear_end(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.is_ended = True

    def taken(self) -> list[int]:
        """Return, once, the signal to forward to the job."""
        left, self._left = self._left, False
        return [signal.SIGTERM] if left else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
