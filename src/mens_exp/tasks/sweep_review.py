"""A sweep, read for review: its record, what its runs left, and its arms held together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.atomic import write_text
from mens_exp.artifacts.sweep import SweepRecord
from mens_exp.config.compare import CompareConfig
from mens_exp.errors import MensError, RequestError
from mens_exp.evals.study import conducted
from mens_exp.evals.sweep_cells import SweepReview, cells_of, columns_of, predictions_of
from mens_exp.tasks.study_runs import read_study

if TYPE_CHECKING:
    from mens_exp.artifacts.comparison import Comparison
    from mens_exp.artifacts.sweep_dir import SweepDir

__all__ = ["read_sweep", "write_sweep_page"]

_MOST_ITEMS = 30  # of each run; more would make a page of megabytes


def read_sweep(directory: SweepDir) -> SweepReview:
    """Read a sweep, however far it got.

    Raises:
        DataError: its own record is missing or damaged; a run's only costs that run its values.
    """
    record = SweepRecord.read(directory.record)
    cells = cells_of(directory, record)
    kpis, costs = columns_of(cells)
    comparison, why = _compared(directory, record)
    predictions, more = predictions_of(directory, cells, items=_MOST_ITEMS)
    return SweepReview(
        record=record,
        cells=cells,
        kpis=kpis,
        costs=costs,
        predictions=predictions,
        more_predictions=more,
        comparison=comparison,
        why_not_compared=why,
    )


def write_sweep_page(directory: SweepDir) -> None:
    """Render ``sweep.html`` from the records of a sweep.

    Raises:
        DataError: its own record is missing or damaged.
    """
    from mens_exp.report.sweep_page import page  # matplotlib takes a second to import

    write_text(directory.page, page(read_sweep(directory)))


def _compared(directory: SweepDir, record: SweepRecord) -> tuple[Comparison | None, str]:
    """Compare the runs that ended well, by what a comparison is by default."""
    found = [directory.path / job["directory"] for job in record.jobs]
    paths = [str(path.absolute()) for path in found if (path / "manifest.json").is_file()]
    try:
        read = read_study(paths)
        if not read.runs:
            raise RequestError("no training run of this sweep has ended well")
        made = conducted([str(directory.path.absolute())], read.runs, [], CompareConfig())
    except MensError as error:
        return None, f"Not compared: {error}"
    made.left_out = read.left_out
    made.notes += read.unverifiable
    return made, ""
