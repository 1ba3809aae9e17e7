"""hydra/sweeper=optuna: a sweep whose cells are drawn as the results of earlier ones come in."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.artifacts import atomic
from mens_exp.artifacts.machine_faults import machine_fault
from mens_exp.artifacts.sweep_dir import SweepDir
from mens_exp.config.override_values import override_of
from mens_exp.errors import ConfigError, Problems
from mens_exp.report import search_page, search_view
from mens_exp.sweeps.launcher import Launcher
from mens_exp.sweeps.launching import PLACE, finish, new_record
from mens_exp.sweeps.planning import place_problems
from mens_exp.sweeps.search_feed import Search
from mens_exp.sweeps.search_request import read_request
from mens_exp.sweeps.search_study import Study, need_optuna
from mens_exp.sweeps.writing import locked, writing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.sweep import SweepRecord
    from mens_exp.sweeps.search_cells import Cells

__all__ = ["launch_search", "resume_search"]


def launch_search(overrides: Sequence[str]) -> int:
    """Check a search's space, then draw and run its trials, and say which are best.

    Args:
        overrides: the command's, as typed.

    Returns:
        The exit code: 0 when every trial that began was completed or pruned, and one at least
        completed.

    Raises:
        MensError: nothing was started.
    """
    need_optuna()
    request = read_request(overrides)
    directory = SweepDir(request.root)
    with locked(directory, PLACE):
        Problems.raise_if(place_problems(request.root, ()))  # another launcher was quicker
        record = new_record(request, overrides, request.probed)
        record.search = request.search
        console = Console(stderr=True)
        console.print(search_view.space_table(record), soft_wrap=True)
        with writing(PLACE):
            record.write(directory.record)
        return _run(directory, record, console, request.cells)


def resume_search(
    directory: SweepDir, record: SweepRecord, console: Console, overrides: Sequence[str]
) -> int:
    """Go on with a search whose jobs stand as their directories say; its lock is held.

    Args:
        directory: of the search.
        record: of the search.
        console: where to say what happens.
        overrides: of its settings: how many trials it is to have in all.

    Raises:
        ConfigError: that is no number of trials that it could have.
        MissingExtra: Optuna is not installed.
    """
    assert record.search is not None, "a sweep that searches"
    need_optuna()
    drawn = len(record.search["trials"])
    for text in overrides:
        key, _, value = text.partition("=")
        if not value.isdecimal() or int(value) < max(drawn, 1):
            raise ConfigError(
                "out of range",
                where=key,
                found=value,
                expected=f"a whole number of trials, {drawn} or more, as so many were drawn",
            )
        record.search["n_trials"] = int(value)
    return _run(directory, record, console)


def _run(
    directory: SweepDir, record: SweepRecord, console: Console, cells: Cells | None = None
) -> int:
    """Run what is left of a search; what the system refuses its launcher stops it as a kill would.

    Raises:
        SetupError: it refused to write or to read something; what is on disk is whole.
    """
    try:
        return _searched(directory, record, console, cells)
    except (OSError, MemoryError) as error:
        again = shlex.join(
            ["python", "-m", "mens_exp", override_of("sweep.resume", str(directory.path))]
        )
        refused = machine_fault(error, again)
        if refused is None:
            raise
        raise refused from error


def _searched(
    directory: SweepDir, record: SweepRecord, console: Console, cells: Cells | None
) -> int:
    assert record.search is not None, "a sweep that searches"
    search = Search(directory, record, Study(directory.journal, record.search), cells)
    search.catch_up()
    record.write(directory.record)
    code = finish(Launcher(directory, record, console, search), search.is_finished)
    search.conclude()
    record.write(directory.record)
    atomic.write_text(directory.search_page, search_page.page(record))
    console.print(search_view.best_table(record), soft_wrap=True)
    console.print(f"The search: {directory.search_page}", soft_wrap=True, markup=False)
    return code or int(not record.search["best"])
