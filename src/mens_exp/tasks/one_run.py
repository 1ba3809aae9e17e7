"""One run from its cell to its exit code, and what the terminal shows of its end."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mens_exp.config.overrides import Cell
    from mens_exp.errors import MensError

__all__ = ["CANCELLED", "complain", "ended", "run_task"]

CANCELLED = 130  # 128 + SIGINT, what a shell reports for Ctrl-C


def run_task(directory: Path, cell: Cell) -> int:
    """Run one task in its directory and say how it ended."""
    from mens_exp.tasks.run import open_run

    def work() -> None:
        with open_run(directory, cell) as run:
            _task(cell)(cell.config, run)

    task = cell.config.task.name
    if task == "train":
        return ended(work, directory)
    # The others have no training state to resume.
    done = "; steps that are done stay so" if task == "corpus" else ""
    return ended(work, directory, f"the same command{done}")


def _task(cell: Cell) -> Any:
    name = cell.config.task.name
    return getattr(import_module(f"mens_exp.tasks.{name}"), name)


def ended(work: Callable[[], None], directory: Path, goes_on: str | None = None) -> int:
    """Do the work, and show its result or its error.

    Args:
        work: what is to be done.
        directory: of the run.
        goes_on: what goes on with it once it was cancelled; `resume=` where nothing is said.

    Returns:
        The exit code.
    """
    import traceback

    from mens_exp.artifacts.machine_faults import machine_fault
    from mens_exp.errors import MensError
    from mens_exp.tasks.cancellation import Cancelled

    again = goes_on or shlex.join(["python", "-m", "mens_exp", f"resume={directory}"])
    try:
        work()
    except MensError as error:
        complain(getattr(error, "problems", [error]))
        print(f"The record: {directory}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except (Cancelled, KeyboardInterrupt):
        print(f"Cancelled. Go on with: {again}", file=sys.stderr)  # noqa: T201
        return CANCELLED
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the outermost place
        refused = machine_fault(error, again)
        if refused is not None:
            complain([refused])
            print(f"The record: {directory}", file=sys.stderr)  # noqa: T201
            return refused.exit_code
        traceback.print_exc()  # a bug, shown whole
        print(f"A bug in mens_exp; the record: {directory}", file=sys.stderr)  # noqa: T201
        return 1
    _show(directory)
    return 0


def _show(directory: Path) -> None:
    """Print what came of a run."""
    from rich.console import Console

    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.report import records, terminal

    run = RunDir(directory)
    found = records.load(run)
    console = Console()
    if found.manifest.task not in {"train", "evaluate"}:
        return
    if found.items:
        console.print(terminal.completions(found.items, n=3))
    console.print(terminal.result_table(found))
    console.print(f"Report: {run.report}", soft_wrap=True, markup=False)


def complain(problems: Sequence[MensError]) -> None:
    """Print problems to standard error, each in lines of its own."""
    from rich.console import Console

    from mens_exp.report import terminal

    Console(stderr=True).print(terminal.problems(problems), soft_wrap=True)
