"""The command line: check everything, then let Hydra run one task, or one for each cell.

Exit codes: 0 done, 2 the request, 3 the environment, 4 a gate said no, 1 a bug, 130 cancelled.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.overrides import Cell
    from mens_exp.errors import MensError

__all__ = ["entry_point", "main"]

_CANCELLED = 130  # 128 + SIGINT, what a shell reports for Ctrl-C


def entry_point() -> None:
    """Run the command of ``sys.argv`` and exit with its code."""
    # oneDNN reads it when torch is loaded. Its default keeps 1,024 kernels, one for each shape met,
    # and the process grows for hundreds of steps; 128 hold what a step uses (experiments/LOG.md).
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: what follows ``python -m mens_exp``.

    Returns:
        The exit code.
    """
    from mens_exp.config.compose import begin_command
    from mens_exp.errors import MensError, Problems

    begin_command()
    try:
        return _dispatch(list(arguments))
    except Problems as several:
        _complain(several.problems)
        return max(problem.exit_code for problem in several.problems)
    except MensError as error:
        _complain([error])
        return error.exit_code
    except KeyboardInterrupt:
        print("Cancelled.", file=sys.stderr)  # noqa: T201  # outside of any run
        return _CANCELLED


def _dispatch(arguments: list[str]) -> int:
    from hydra._internal.utils import get_args_parser

    from mens_exp.config.overrides import spelled_out

    if "--version" in arguments:
        from mens_exp import __version__

        print(f"mens_exp {__version__}")  # noqa: T201  # what was asked for
        return 0
    arguments = spelled_out(arguments)
    parsed, rest = get_args_parser().parse_known_args(arguments)
    _refuse_flags(parsed, rest)
    if parsed.help or parsed.hydra_help or parsed.info or parsed.shell_completion:
        return _hydra(arguments, [])
    if parsed.cfg:
        _checked_cells(parsed.overrides, multirun=parsed.multirun, with_files=False)
        return _hydra(arguments, [])
    resume = [text for text in parsed.overrides if text.lstrip("+").startswith("resume=")]
    if resume and resume[-1] != "resume=null":
        return _resume(parsed.overrides, multirun=parsed.multirun)
    return _hydra(arguments, _checked_cells(parsed.overrides, multirun=parsed.multirun))


def _refuse_flags(parsed: Any, unknown: list[str]) -> None:
    """Refuse flags that nobody knows, and Hydra's own that would bypass what is checked here.

    Raises:
        MensError: there are such flags.
    """
    from mens_exp.errors import ConfigError, Problems

    problems = [
        ConfigError(
            "has no effect here",
            where=f"--{name.replace('_', '-')}",
            found=str(getattr(parsed, name)),
            expected="overrides of the configuration that --cfg job shows",
        )
        for name in ("config_path", "config_name", "config_dir", "experimental_rerun")
        if getattr(parsed, name) is not None
    ]
    if unknown:
        expected = "a flag that --hydra-help shows"
        problems.append(ConfigError("unknown flag", found=" ".join(unknown), expected=expected))
    Problems.raise_if(problems)


def _checked_cells(
    overrides: Sequence[str], *, multirun: bool, with_files: bool = True
) -> list[Cell]:
    """Compose every cell, and raise all problems of the command together."""
    from mens_exp.config.overrides import check
    from mens_exp.errors import Problems
    from mens_exp.tasks.settle import settled

    checked = check(overrides, multirun=multirun)
    problems = list(checked.problems)
    for cell in checked.cells if with_files else ():
        problems += settled(cell)
        problems += _used_directory(cell, multirun=multirun)
    Problems.raise_if(list({str(problem): problem for problem in problems}.values()))
    return list(checked.cells)


def _used_directory(cell: Cell, *, multirun: bool) -> list[MensError]:
    """Refuse a directory that holds a run, before Hydra writes its own files into it."""
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.tasks.run import run_is_there

    directory = cell.composed.sweep_dir if multirun else cell.composed.run_dir
    if directory is None or not RunDir(Path(directory)).manifest.exists():
        return []
    return [run_is_there(Path(directory))]


def _hydra(arguments: list[str], cells: list[Cell]) -> int:
    """Hand the command to Hydra, which makes the run directory and calls back for each cell."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from mens_exp.config.compose import CONFIG_NAME, VERSION_BASE, config_directory, prepare_hydra
    from mens_exp.errors import ConfigError

    codes: list[int] = []

    def one(_config: Any) -> int:
        settings = HydraConfig.get()
        number = settings.job.num if len(cells) > 1 else 0
        code = _run_task(Path(settings.runtime.output_dir), cells[number])
        codes.append(code)
        if code == _CANCELLED:
            raise SystemExit(code)
        return code

    prepare_hydra()
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        with _frozen(config_directory(), is_sweep=len(cells) > 1) as groups:
            application = hydra.main(
                version_base=VERSION_BASE, config_path=str(groups), config_name=CONFIG_NAME
            )(one)
            application()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except ValueError as error:  # how Hydra refuses flags that do not go together
        raise ConfigError("the flags do not go together", found=str(error)) from error
    finally:
        sys.argv = before
    return max(codes, default=1 if cells else 0)


@contextmanager
def _frozen(groups: Path, *, is_sweep: bool) -> Iterator[Path]:
    """Copy all config groups for a sweep, where Hydra reads them again for each job."""
    if not is_sweep:
        yield groups
        return
    from mens_exp.config.own_conf import frozen_as, own_directory

    own = own_directory()
    with tempfile.TemporaryDirectory(prefix="mens_exp_conf_") as copy:
        theirs = None if own is None else shutil.copytree(own, Path(copy) / "own")
        with frozen_as(theirs):
            yield shutil.copytree(groups, Path(copy) / groups.name)


def _run_task(directory: Path, cell: Cell) -> int:
    """Run one task in its directory and say how it ended."""
    from mens_exp.tasks.run import open_run

    def work() -> None:
        with open_run(directory, cell) as run:
            _task(cell)(cell.config, run)

    if cell.config.task.name == "corpus":
        return _ended(work, directory, "the same command; steps that are done stay so")
    return _ended(work, directory)


def _task(cell: Cell) -> Any:
    name = cell.config.task.name
    return getattr(import_module(f"mens_exp.tasks.{name}"), name)


def _resume(overrides: Sequence[str], *, multirun: bool) -> int:
    from mens_exp.errors import ConfigError
    from mens_exp.tasks.resume import go_on, prepare

    if multirun:
        raise ConfigError("one run at a time goes on", where="resume", remedy="drop -m")
    pairs = dict(text.lstrip("+").partition("=")[::2] for text in overrides)
    resumption = prepare(pairs.pop("resume"), pairs)
    for note in resumption.notes:
        print(note, file=sys.stderr)  # noqa: T201  # said before the plan table
    return _ended(lambda: go_on(resumption), resumption.directory.path)


def _ended(work: Any, directory: Path, goes_on: str | None = None) -> int:
    """Do the work, and show its result or its error."""
    import traceback

    from mens_exp.errors import MensError
    from mens_exp.tasks.cancellation import Cancelled

    try:
        work()
    except MensError as error:
        _complain(getattr(error, "problems", [error]))
        print(f"The record: {directory}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except (Cancelled, KeyboardInterrupt):
        print(  # noqa: T201
            f"Cancelled. Go on with: {goes_on or f'python -m mens_exp resume={directory}'}",
            file=sys.stderr,
        )
        return _CANCELLED
    except (Exception, SystemExit):  # noqa: BLE001  # the outermost place: a bug, shown whole
        traceback.print_exc()
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
    console.print(f"Report: {run.report}", soft_wrap=True)


def _complain(problems: Sequence[MensError]) -> None:
    from rich.console import Console

    from mens_exp.report import terminal

    Console(stderr=True).print(terminal.problems(problems), soft_wrap=True)
