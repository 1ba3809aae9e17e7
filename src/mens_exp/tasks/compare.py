"""task=compare: paired comparison of arms by seed and item, with a verdict on the evidence."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.atomic import write_text
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.decision_ledger import cycles_of, read_ledger
from mens_exp.artifacts.run_dir import RunDir, runs
from mens_exp.errors import MensError, RequestError
from mens_exp.evals.kpis import as_recorded
from mens_exp.evals.sequential import looks_of
from mens_exp.evals.study import conducted
from mens_exp.report import comparison_view, html, terminal, wording
from mens_exp.report.document import markdown_page
from mens_exp.tasks.promotion_evidence import cycle_of, freeze, runs_of
from mens_exp.tasks.study_runs import read_study
from mens_exp.training.wandb_mirror import mirror

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run


def compare(config: RunConfig, run: Run) -> None:
    """Read the runs, compare their arms, and write record, page and table."""
    assert config.path is not None, "validation has asked for it"
    mirror(config, run)
    paths = config.path.split(",")
    read = read_study(paths)
    record = conducted(paths, read.runs, config.compare.factors, config.compare)
    record.left_out = read.left_out
    record.notes += [*read.unverifiable, *as_recorded(record.contrasts[0]["kpis"])]
    if config.ledger is not None:
        _note_cycle(record, Path(config.ledger).expanduser())
        run.manifest.results.update(frozen=record.frozen)
    _note_looks(record, config, run.dir)
    run.manifest.inputs.update(
        runs={one["run_id"]: {"manifest_sha256": one["manifest_sha256"]} for one in record.runs}
    )
    run.manifest.facts.update(factors=record.factors, reference=record.reference)
    run.manifest.results.update(_results(record))
    _write(record, run.dir)
    if config.out is not None:
        _write(record, RunDir(Path(config.out).expanduser()))
    where = run.dir if config.out is None else RunDir(Path(config.out).expanduser())
    shown = comparison_view.document(record, wording.path(where.path), config.ledger)
    console = terminal.console(quiet=not run.prints)
    terminal.show(*comparison_view.brief(record), on=console)
    terminal.say(f"Report: {where.comparison_page}", on=console)
    terminal.say_next(shown.steps, on=console)


def _note_cycle(record: Comparison, ledger: Path) -> None:
    """Record the ledger cycle of the study, or the reason why it is exploratory.

    The digests of a cycle's runs are frozen before anyone has seen the results.
    """
    if not ledger.is_file():
        raise RequestError(
            "no such ledger",
            where="ledger",
            found=str(ledger),
            expected="the file that task=promote promote.open_cycle=<name> writes",
        )
    cycle, why = cycle_of(record, cycles_of(read_ledger(ledger)))
    record.cycle = None if cycle is None else cycle["cycle"]
    record.exploratory = why or None
    record.frozen = freeze(ledger, runs_of(record, record.cycle or ""))
    if record.frozen is not None:
        number, sha256 = record.frozen["entry"], record.frozen["sha256"]
        record.notes.append(f"Runs are frozen by entry {number} of the ledger, {sha256}.")


def _note_looks(record: Comparison, config: RunConfig, own: RunDir) -> None:
    """Count other looks at the same arms, in every available record of a comparison."""
    others, unread = [], 0
    for file in dict.fromkeys(path.absolute() for path in _records(record, config, own)):
        try:
            others.append((str(file), Comparison.read(file)))
        except MensError:
            unread += 1
    record.looks = looks_of(record, others)
    if unread:
        files = "1 compare.json" if unread == 1 else f"{unread} compare.json files"
        record.notes.append(f"looks were not counted in {files} that could not be read")


def _records(record: Comparison, config: RunConfig, own: RunDir) -> Iterator[Path]:
    """Yield the files of other comparisons.

    They are searched for under ``outputs``, next to this comparison, its output and the runs that
    it read, and in the evidence of the ledger.
    """
    yield from (run.comparison for run in runs(Path("outputs")) if run.comparison.is_file())
    written = [own.path] if config.out is None else [own.path, Path(config.out).expanduser()]
    places = [
        *(path.parent for path in written),
        *(Path(one["path"]).parent for one in record.runs),
    ]
    for place in dict.fromkeys(path.absolute() for path in places):
        name = RunDir(place).comparison.name
        near = (glob.glob(pattern, root_dir=place) for pattern in (name, f"*/{name}"))  # noqa: PTH207  # Path.glob stops at the first place that may not be read
        yield from (place / file for found in near for file in sorted(found))
    if config.ledger is not None:
        made = (entry["decision"] for entry in read_ledger(Path(config.ledger).expanduser()))
        named = [Path(one["path"]) for two in made if two is not None for one in two["evidence"]]
        yield from (path for path in named if path.is_file())


def _write(record: Comparison, place: RunDir) -> None:
    """Write the record and the files rendered from it."""
    shown = comparison_view.document(record, wording.path(place.path))
    table, page = markdown_page(shown), html.page(comparison_view.drawn(shown, record))
    record.write(place.comparison)
    write_text(place.comparison_table, table)
    write_text(place.comparison_page, page)


def _results(record: Comparison) -> dict[str, Any]:
    """Return the headline figures for the manifest."""
    primary = {one["arm"]: one["kpis"][record.primary] for one in record.contrasts}
    return {
        "runs": len(record.runs),
        "arms": len(record.arms),
        "primary": record.primary,
        "verdicts": {arm: kpi["verdict"].value for arm, kpi in primary.items()},
        "differences": {arm: kpi["estimate"] for arm, kpi in primary.items()},
        "confounded": sorted(one["arm"] for one in record.contrasts if one["confounded_by"]),
    }
