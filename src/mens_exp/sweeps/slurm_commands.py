"""Slurm's commands: the sbatch script of a sweep, its submission, and the states of its jobs.

The script's array has one task per job; states are queried once for all of them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.host import python_path
from mens_exp.errors import ConfigError, MensError, RequestError, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.sweep import SlurmLauncher

_ASK_S = 60.0  # a busy controller answers within half a minute
_SILENCE = (
    "Unable to contact",
    "configuration source",
    "Connection refused",
    "authentic",
    "timed out",
    "did not answer",  # within _ASK_S
)
_NO_SUCH_NODE = "Requested node configuration is not available"
# `sinfo` on nodes that have not registered (unknown), do not respond (*), or are out of service
_ABSENT = ("unknown", "*", "down", "drain", "fail", "maint", "reboot")
_TOOLS = ("sbatch", "squeue", "scancel", "scontrol")
# Options covered by a setting, and options that control how jobs are stopped, requeued and queried.
_OURS = frozenset(
    {"account", "comment", "constraint", "cpus-per-task", "exclude", "gpus-per-node", "gres", "mem"}
    | {"partition", "qos"}
    | {"array", "chdir", "error", "export", "job-name", "nodes", "ntasks", "ntasks-per-node"}
    | {"no-requeue", "open-mode", "output", "parsable", "requeue", "signal", "test-only", "time"}
    | {"wait", "wrap"}
)


def script(
    launcher: SlurmLauncher, numbers: Sequence[int], *, batch: Path, arguments: Sequence[str]
) -> str:
    """Write the script of an array of jobs.

    Args:
        launcher: the settings.
        numbers: job numbers; each is the index of its task.
        batch: directory for Slurm's own output.
        arguments: arguments of ``python -m mens_exp.sweeps.slurm_task``.
    """
    options = [f"--{name}={shlex.quote(value)}" for name, value in _options(launcher).items()]
    indices = ",".join(map(str, numbers))
    options += [
        f"--array={indices}%{launcher.array_parallelism}",
        f"--chdir={shlex.quote(str(Path.cwd()))}",
        f"--output={shlex.quote(str(batch / 'slurm_%A_%a.out'))}",
        f"--nodes={launcher.nodes or 1}",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{launcher.signal_delay_s}",
    ]
    for name, value in launcher.additional_parameters.items():
        flag = f"--{name.replace('_', '-')}"
        options.append(flag if value is True else f"{flag}={shlex.quote(str(value))}")
    reach = python_path(os.environ)
    command = [sys.executable, "-m", "mens_exp.sweeps.slurm_task", *arguments]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "",
            *(["set -e", *launcher.setup, "set +e"] if launcher.setup else []),
            f"export PYTHONPATH={shlex.quote(reach)}",
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def _options(launcher: SlurmLauncher) -> dict[str, str]:
    """Return the sbatch options of the settings that are set."""
    memory = None if launcher.mem_gb is None else f"{round(launcher.mem_gb * 1024)}M"
    given = {
        "job-name": launcher.name,
        "partition": launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
        "exclude": launcher.exclude,
        "comment": launcher.comment,
        "time": launcher.timeout_min,
        "cpus-per-task": launcher.cpus_per_task,
        "gpus-per-node": launcher.gpus_per_node,
        "gres": launcher.gres,
        "mem": memory,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def slurm_problems(launcher: SlurmLauncher, many: int) -> list[MensError]:
    """List reasons why Slurm would reject a sweep's jobs, with ``sbatch --test-only``.

    Args:
        launcher: the settings.
        many: the number of jobs.
    """
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    if missing:
        return [
            SetupError(
                "Slurm's commands were not found",
                where="hydra/launcher",
                found=f"no {', '.join(missing)} on the PATH",
                expected="the machine that jobs are submitted from",
                remedy="run the sweep on a login node of the cluster, or with hydra/launcher=local",
            )
        ]
    wrong = list(_setting_problems(launcher))
    if wrong:
        return wrong
    text = script(launcher, range(many), batch=Path.cwd(), arguments=[])
    try:
        call(["sbatch", "--test-only"], text)
    except OSError as error:
        return [refused(str(error))]
    return []


def _setting_problems(launcher: SlurmLauncher) -> Iterator[MensError]:
    for key, value in launcher.additional_parameters.items():
        if key.replace("_", "-") in _OURS:
            yield ConfigError(
                "is set by the launcher itself",
                where=f"hydra.launcher.additional_parameters.{key}",
                found=str(value),
                expected="an option of sbatch that has no setting in hydra.launcher",
                remedy=f"drop {key}, or give the setting",
            )
    if launcher.signal_delay_s >= 60 * launcher.timeout_min:
        yield ConfigError(
            "leaves a job no time before its end is announced",
            where="hydra.launcher.signal_delay_s",
            found=launcher.signal_delay_s,
            expected=f"less than the {60 * launcher.timeout_min} seconds of timeout_min",
            remedy="allow more time, or announce the end later",
        )


def is_passing(said: str) -> bool:
    """Return whether a Slurm command's failure may be temporary: no answer, or unavailable nodes.

    A controller reports that no node fits while the fitting nodes are out of service or have not
    registered since it was started (measured on 22.05).
    """
    return any(text in said for text in _SILENCE) or (_NO_SUCH_NODE in said and _lacks_nodes())


def _lacks_nodes() -> bool:
    """Return whether some nodes currently accept no jobs."""
    try:
        states = call(["sinfo", "--noheader", "--Node", "--format=%T"]).split()
    except OSError:
        return True
    return any(word in state for state in states for word in _ABSENT)


def refused(said: str) -> MensError:
    """Return the error for a Slurm command's message: a fault of Slurm, or of the request."""
    if is_passing(said):
        if _NO_SUCH_NODE in said:
            what = "Slurm lacks nodes for the jobs at the moment"
            remedy = "try again when `sinfo` shows all nodes in service, or correct the setting"
        else:
            what = "Slurm does not answer"
            remedy = "see what `sinfo` says, or run the sweep with hydra/launcher=local"
        return SetupError(what, where="hydra/launcher", found=said, remedy=remedy)
    return RequestError(
        "Slurm rejected the jobs",
        where="hydra.launcher",
        found=said,
        remedy="correct the setting; `sinfo` lists partitions, and what their nodes have",
    )


def call(command: Sequence[str], text: str = "") -> str:
    """Run one of Slurm's commands.

    Args:
        command: its name and arguments.
        text: its standard input.

    Returns:
        Its standard output.

    Raises:
        OSError: it failed; the error contains its message.
    """
    try:
        done = subprocess.run(  # noqa: S603  # Slurm's own programs, looked up on the PATH
            list(command), input=text, capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} did not answer in {_ASK_S:g} seconds") from error
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise OSError("; ".join(said) or f"{command[0]}: exit code {done.returncode}")
    return done.stdout


_FIELDS = ("ArrayJobID", "ArrayTaskID", "State", "Reason", "exit_code", "Command")
# In every other state, a job is waiting or running.
_OVER = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"}
    | {"OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "TIMEOUT"}
)
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One task of a job array, as Slurm reports it.

    Attributes:
        queue_id: Slurm's id, ``<array>_<index>``.
        number: its index, which is the job's number in the sweep.
        state: Slurm's name of the state.
        reason: Slurm's reason for the state.
        exit_code: exit code of its script; None if there is none yet.
    """

    queue_id: str
    number: int
    state: str
    reason: str
    exit_code: int | None

    @property
    def is_over(self) -> bool:
        """Whether it will not run again."""
        return self.state in _OVER

    @property
    def is_waiting(self) -> bool:
        """Whether it is queued and not running."""
        return self.state in _WAITING


def queue_of(batch: Path) -> dict[str, Seen]:
    """Return Slurm's state of the tasks whose scripts are in a directory, by id.

    Slurm forgets a job some minutes after its end (``MinJobAge``).

    Raises:
        OSError: Slurm does not answer.
    """
    columns = ",".join(f"{name}:|" for name in _FIELDS)
    text = call(["squeue", "--me", "--noheader", "--array", "--states=all", f"--Format={columns}"])
    seen = {}
    for line in text.splitlines():
        array, index, state, reason, status, script = line.split("|", maxsplit=5)
        if not index.isdecimal() or not script.startswith(f"{batch}{os.sep}"):
            continue  # of another sweep, or not of a sweep
        one = Seen(
            queue_id=f"{array}_{index}",
            number=int(index),
            state=state,
            reason=reason,
            exit_code=_exit_code(status),
        )
        seen[one.queue_id] = one
    return seen


def _exit_code(status: str) -> int | None:
    """Decode a status in the form of wait()."""
    try:
        return os.waitstatus_to_exitcode(int(status))
    except ValueError:  # none yet
        return None
