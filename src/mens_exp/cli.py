"""The command line: check everything, then let Hydra run one task, or one task per cell.

Exit codes: 0 done, 1 bug, 2 invalid request, 3 environment, 4 gate refused, 130 cancelled.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.overrides import Cell
    from mens_exp.errors import MensError


def entry_point() -> None:
    """Run the command in ``sys.argv`` and exit with its code."""
    from mens_exp.api import bound_kernel_cache
    from mens_exp.artifacts.host import collect_rarely

    collect_rarely()
    bound_kernel_cache()
    sys.stdout, sys.stderr = _Outliving.of(sys.stdout), _Outliving.of(sys.stderr)
    sys.exit(main(sys.argv[1:]))


class _Outliving(io.TextIOWrapper):
    """Output that survives a closed pipe, so that ``… | head`` does not end a run."""

    @classmethod
    def of(cls, stream: Any) -> Any:
        """Wrap a standard stream; a stream without a file descriptor is returned unchanged."""
        if not isinstance(stream, io.TextIOWrapper):
            return stream
        told = {"encoding": stream.encoding, "errors": stream.errors}
        lines = stream.line_buffering
        return cls(stream.detach(), **told, line_buffering=lines)  # type: ignore[arg-type]

    def write(self, text: str, /) -> int:
        """Write, or drop the text if the reader is gone."""
        try:
            return super().write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop the text if the reader is gone."""
        try:
            super().flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def main(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: the arguments after ``python -m mens_exp``.

    Returns:
        The exit code.
    """
    from mens_exp.artifacts.host import machine_fault
    from mens_exp.config.compose import begin_command
    from mens_exp.errors import MensError
    from mens_exp.planning.machine import of_torchrun
    from mens_exp.tasks.run import CANCELLED, complain

    begin_command()
    rank, alone = of_torchrun(), _of_one_process(arguments)
    if rank is not None and not rank.is_first:
        if alone is not None:
            return 0  # the first process reports it
        from mens_exp.tasks.coordinator import follow_from_elsewhere

        return follow_from_elsewhere(rank)
    try:
        if rank is not None and alone is not None:
            _refuse_under_torchrun(alone)
        return _dispatch(list(arguments))
    except KeyboardInterrupt:
        print("Cancelled.", file=sys.stderr)  # noqa: T201  # outside of any run
        return CANCELLED
    except Exception as error:
        refused = error if isinstance(error, MensError) else machine_fault(error)
        if refused is None:
            raise
        problems: Sequence[MensError] = getattr(refused, "problems", [refused])
        complain(problems)
        return max(problem.exit_code for problem in problems)


def _of_one_process(arguments: Sequence[str]) -> str | None:
    """Return the argument that makes a command single-process; None for training."""
    given = [text for text in arguments if text.startswith(("-", "sweep.resume="))]
    tasks = [text for text in arguments if text.lstrip("+").startswith("task=")]
    given += [text for text in tasks[-1:] if not text.endswith("=train")]
    return given[0] if given else None


def _refuse_under_torchrun(argument: str) -> None:
    """Refuse single-process commands under torchrun; Hydra's informational flags are allowed.

    Raises:
        MensError: the command runs in one process only.
    """
    from mens_exp.errors import RequestError
    from mens_exp.planning.checks.machine import started_for_one

    if argument in {"-m", "--multirun"} or argument.startswith("sweep.resume="):
        raise RequestError(
            "torchrun started several processes for a sweep",
            found=argument,
            expected="one process, which starts those of its jobs",
            remedy="start it without torchrun; with trainer=ddp each job has several processes",
        )
    if not argument.startswith("-"):
        raise started_for_one("task", argument.partition("=")[2])


def _dispatch(arguments: list[str]) -> int:
    from hydra._internal.utils import get_args_parser

    from mens_exp.config.option_files import reading
    from mens_exp.config.override_values import spelled_out
    from mens_exp.config.overrides import sources_in

    if "--version" in arguments:
        from mens_exp import __version__

        print(f"mens_exp {__version__}")  # noqa: T201  # the requested output
        return 0
    arguments = spelled_out(arguments, multirun=bool({"-m", "--multirun"} & set(arguments)))
    parser = get_args_parser()
    parsed, rest = parser.parse_known_args(arguments)
    flags = [text for text in rest if text.startswith("-")]
    _refuse_flags(parsed, flags, arguments)
    # Hydra's parser, which some commands end in, knows no setting behind a flag.
    parsed.overrides += [text for text in rest if text not in flags]
    arguments = [text for text in arguments if text not in parsed.overrides] + parsed.overrides
    sources = sources_in(parsed.overrides, name=parsed.config_name, directory=parsed.config_dir)
    with reading(sources):
        return _answered(_without_sources(arguments, parsed), parser, parsed)


def _without_sources(arguments: list[str], parsed: Any) -> list[str]:
    """Remove the flags of the config sources, which are already set."""
    flags = {"--config-dir": parsed.config_dir, "-cd": parsed.config_dir}
    flags |= {"--config-name": parsed.config_name, "-cn": parsed.config_name}
    kept, skips = [], False
    for text in arguments:
        name, equals, _ = text.partition("=")
        if not skips and name not in flags:
            kept.append(text)
        skips = not skips and name in flags and not equals
    return kept


def _answered(arguments: list[str], parser: Any, parsed: Any) -> int:
    """Run a command after its config sources are set."""
    from mens_exp.api import checked_cells

    if parsed.help or parsed.hydra_help:
        from mens_exp.config.compose import show_help

        for action in parser._actions:  # noqa: SLF001  # Hydra's flags, as they are here
            action.help = _FLAGS.get(next(iter(action.option_strings), ""), action.help)
        if parsed.overrides:
            checked_cells(parsed.overrides, multirun=parsed.multirun, with_files=False)
        show_help(parser, parsed)
        return 0
    if parsed.cfg:
        checked_cells(parsed.overrides, multirun=parsed.multirun, with_files=False)
    if parsed.shell_completion:
        return _complete(arguments, parsed.overrides)
    if parsed.cfg or parsed.info:
        return _hydra(arguments, [])
    return _started(arguments, parsed)


# What a shell evaluates. Each asks the program that is being typed, mens-exp or python -m mens_exp,
# for what its line may go on with; lines of another Python program are left to the shell.
_SCRIPTS = {
    "bash": """_mens_exp_completion() {
    local line="${COMP_LINE:0:$COMP_POINT}" word cut choices
    local program=mens-exp module='^ *([^ ]*python[0-9.]*) +-m +mens_exp '
    if [[ "$line" =~ $module ]]; then
        program="${BASH_REMATCH[1]} -m mens_exp"
    elif [[ "$line" != *mens-exp\\ * ]]; then
        return
    fi
    word="${line##*[[:space:]]}"
    choices=$(COMP_LINE="$line" $program -sc query=bash 2>/dev/null)
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
    if [[ "$COMP_WORDBREAKS" == *=* ]]; then
        cut="${word%"${word##*=}"}"
        COMPREPLY=("${COMPREPLY[@]#"$cut"}")
    fi
}
complete -o nospace -o default -F _mens_exp_completion mens-exp python python3
""",
    "zsh": r"""_mens_exp_completion() {
    local line="${(j: :)words[1,CURRENT]}" program=mens-exp
    if [[ "$line" == *python*\ -m\ mens_exp\ * ]]; then
        program="${words[1]} -m mens_exp"
    elif [[ "$line" != *mens-exp\ * ]]; then
        _default
        return
    fi
    local -a choices
    choices=(${(f)"$(COMP_LINE=$line ${(z)program} -sc query=fish 2>/dev/null)"})
    compadd -Q -S '' -- $choices
}
compdef _mens_exp_completion mens-exp python python3
""",
    "fish": """function __mens_exp_completion
    set -l line (commandline -cp)
    set -l program mens-exp
    if string match -qr 'python[0-9.]* +-m +mens_exp ' -- $line
        set program (string match -r '^ *(\\S+)' -- $line)[2] -m mens_exp
    end
    COMP_LINE=$line $program -sc query=fish 2>/dev/null
end
complete -c mens-exp -f -a '(__mens_exp_completion)'
set -l is_module 'string match -qr -- "-m +mens_exp " (commandline -cp)'
for program in python python3
    complete -c $program -n $is_module -f -a '(__mens_exp_completion)'
end
""",
}
_FLAGS = {
    "--version": "Show the version of mens_exp and exit",
    "--shell-completion": """Complete commands in this shell, after mens-exp and python -m mens_exp:
    Bash:  eval "$(mens-exp -sc install=bash)"
    Zsh:   eval "$(mens-exp -sc install=zsh)"
    Fish:  mens-exp -sc install=fish | source
    To complete in every new shell, add the line to ~/.bashrc, to ~/.zshrc after compinit, or to
    ~/.config/fish/config.fish. uninstall=<shell> in its place undoes it in this shell.
    """,
    "--config-path": "Not offered: it would hide the built-in config groups; use --config-dir",
    "--experimental-rerun": "Not offered: it loads a pickle",
}
_UNDONE = {
    "bash": "complete -r mens-exp python python3; unset -f _mens_exp_completion",
    "zsh": "compdef -d mens-exp python python3; unfunction _mens_exp_completion",
    "fish": "complete -e -c mens-exp; complete -e -c python; complete -e -c python3",
}
_MODULE = re.compile(r"^\s*\S+\s+-m\s+mens_exp(?=\s)")
_DIRECTORY = re.compile(r"\s(?:--config-dir|-cd)[=\s]\s*(\S+)\s")


def _complete(arguments: list[str], asked: Sequence[str]) -> int:
    """Print a shell's completion script, or the completions of a command line.

    Raises:
        ConfigError: there is no such shell.
    """
    from mens_exp.config.option_files import reading
    from mens_exp.config.overrides import sources_in
    from mens_exp.errors import ConfigError

    action, _, shell = (asked[0] if asked else "").partition("=")
    if action == "query":
        # Hydra expects the program name to be one word; completions are the same for both forms.
        line = _MODULE.sub("mens-exp", os.environ.get("COMP_LINE", ""))
        found = _DIRECTORY.search(line)
        os.environ["COMP_LINE"] = _DIRECTORY.sub(" ", line)
        with reading(sources_in([], directory=found and found[1])):
            return _hydra(arguments, [])
    scripts = {"install": _SCRIPTS, "uninstall": _UNDONE}.get(action, {})
    if shell not in scripts:
        raise ConfigError(
            "is not a shell with completion",
            where="--shell-completion",
            found=" ".join(asked) or "nothing",
            expected=f"install=<{'|'.join(_SCRIPTS)}>, or uninstall=<…>",
            remedy='write eval "$(mens-exp -sc install=bash)", or zsh for bash; for fish: '
            "mens-exp -sc install=fish | source",
        )
    print(scripts[shell])  # noqa: T201  # the requested output
    return 0


def _started(arguments: list[str], parsed: Any) -> int:
    """Start or resume a run, a sweep or a study."""
    from mens_exp.api import checked_cells
    from mens_exp.corpus.source import rows_read_once

    overrides, multirun = parsed.overrides, parsed.multirun
    if _given(overrides, "study"):
        return _study(overrides, multirun=multirun)
    if _given(overrides, "resume"):
        return _resume(overrides, multirun=multirun)
    in_hydra = parsed.run or parsed.resolve or _in_process(overrides)
    if _given(overrides, "sweep.resume") or (multirun and not in_hydra):
        return _sweep(overrides)
    with rows_read_once():
        cells = checked_cells(overrides, multirun=multirun)
        if not (multirun or parsed.resolve):
            return _run(cells[0])
    return _hydra(arguments, cells)


def _run(cell: Cell) -> int:
    """Run one task in the directory that Hydra creates for it."""
    from mens_exp.config.compose import run_composed
    from mens_exp.tasks.run import run_task

    return run_composed(cell.composed, lambda directory: run_task(directory, cell))


def _sweep(overrides: Sequence[str]) -> int:
    """Launch or resume a sweep."""
    if _given(overrides, "sweep.resume"):
        from mens_exp.sweeps.resume import resume_sweep

        return resume_sweep(overrides)
    from mens_exp.config.overrides import chosen_sweeper
    from mens_exp.config.sweep import IN_ORDER, OPTUNA

    sweeper = chosen_sweeper(overrides)
    if sweeper == OPTUNA:
        from mens_exp.sweeps.searching import launch_search

        return launch_search(overrides)
    if sweeper != IN_ORDER:
        from mens_exp.sweeps.plugin_sweeper import launch_by_sweeper

        return launch_by_sweeper(overrides)
    from mens_exp.sweeps.multirun import launch

    return launch(overrides)


def _study(overrides: Sequence[str], *, multirun: bool) -> int:
    """Run or resume a study."""
    from mens_exp.errors import ConfigError
    from mens_exp.sweeps.studying import conduct

    if multirun:
        raise ConfigError(
            "a study defines its own runs", where="study", found="-m", remedy="drop -m"
        )
    return conduct(overrides)


def _given(overrides: Sequence[str], key: str) -> bool:
    """Return whether the last override of a key sets a value."""
    values = [text.lstrip("+") for text in overrides if text.lstrip("+").startswith(f"{key}=")]
    return bool(values) and values[-1] != f"{key}=null"


def _in_process(overrides: Sequence[str]) -> bool:
    """Return whether Hydra's own launcher runs all cells in this process."""
    from mens_exp.config.override_values import IN_PROCESS, launcher_of

    return launcher_of(overrides, multirun=True) == IN_PROCESS


def _behind(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the argument after a flag, if it looks like the flag's value."""
    place = list(arguments).index(flag) + 1 if flag in arguments else len(arguments)
    after = arguments[place] if place < len(arguments) else "-"
    return None if "=" in flag or "=" in after or after.startswith("-") else after


def _refuse_flags(parsed: Any, unknown: list[str], arguments: Sequence[str]) -> None:
    """Refuse unknown flags, and Hydra flags that would bypass the checks.

    Raises:
        MensError: there are such flags.
    """
    from mens_exp.config.suggestions import of_flag
    from mens_exp.errors import ConfigError, Problems

    problems: list[ConfigError] = []
    if parsed.config_path is not None:
        problems.append(
            ConfigError(
                "would hide the built-in config groups",
                where="--config-path",
                found=parsed.config_path,
                expected="--config-dir, which adds a directory to them",
                remedy=f"write --config-dir {parsed.config_path}",
            )
        )
    if parsed.experimental_rerun is not None:
        problems.append(
            ConfigError(
                "is not supported: it loads a pickle, which can run any code, and checks nothing",
                where="--experimental-rerun",
                found=parsed.experimental_rerun,
                expected="a run's own record",
                remedy="write task=inspect inspect.replay=true path=<run>, or resume=<run>",
            )
        )
    for flag in unknown:
        expected = "settings as key=value, without dashes; --hydra-help shows the flags there are"
        value = _behind(flag, arguments)
        found = flag if value is None else f"{flag} {value}"
        remedy = of_flag(flag, value)
        problems.append(ConfigError("unknown flag", found=found, expected=expected, remedy=remedy))
    Problems.raise_if(problems)


def _hydra(arguments: list[str], cells: list[Cell]) -> int:
    """Pass the command to Hydra, which creates each run directory and calls back for each cell."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from mens_exp.config.compose import VERSION_BASE, prepare_hydra
    from mens_exp.config.option_files import config_directory, primary_config
    from mens_exp.errors import ConfigError
    from mens_exp.tasks.run import CANCELLED, run_task

    codes: list[int] = []

    def one(_config: Any) -> int:
        settings = HydraConfig.get()
        number = settings.job.num if len(cells) > 1 else 0
        code = run_task(Path(settings.runtime.output_dir), cells[number])
        codes.append(code)
        if code == CANCELLED:
            raise SystemExit(code)
        return code

    prepare_hydra()
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        with _frozen(config_directory(), is_sweep=len(cells) > 1) as groups:
            application = hydra.main(
                version_base=VERSION_BASE, config_path=str(groups), config_name=primary_config()
            )(one)
            application()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except ValueError as error:  # raised by Hydra for incompatible flags
        raise ConfigError("the flags do not go together", found=str(error)) from error
    finally:
        sys.argv = before
    return max(codes, default=1 if cells else 0)


@contextmanager
def _frozen(groups: Path, *, is_sweep: bool) -> Iterator[Path]:
    """Copy all config groups for a sweep, because Hydra reads them again for each job."""
    if not is_sweep:
        yield groups
        return
    from mens_exp.config.option_files import frozen_as, user_directories

    with tempfile.TemporaryDirectory(prefix="mens_exp_conf_") as copy:
        own = enumerate(user_directories())
        theirs = [shutil.copytree(one, Path(copy) / f"own_{number}") for number, one in own]
        with frozen_as(theirs):
            yield shutil.copytree(groups, Path(copy) / groups.name)


def _resume(overrides: Sequence[str], *, multirun: bool) -> int:
    from mens_exp.api import split_pairs
    from mens_exp.errors import ConfigError
    from mens_exp.tasks.run import ended
    from mens_exp.tasks.train import completed, prepare_resumption, resume_training

    if multirun:
        raise ConfigError("only one run can be resumed at a time", where="resume", remedy="drop -m")
    pairs = split_pairs(overrides)
    asked = pairs.pop("resume")
    done = None if pairs else completed(asked)
    if done is not None:
        note = f"The run had ended; its missing pages have been written: {done.report}"
        print(note, file=sys.stderr)  # noqa: T201  # nothing else is left to do
        return 0
    resumption = prepare_resumption(asked, pairs)
    for note in resumption.notes:
        print(note, file=sys.stderr)  # noqa: T201  # printed before the plan table
    return ended(lambda: resume_training(resumption), resumption.directory.path)
