"""A sweep as a document: its planned jobs, and its cells, costs, verdicts and predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from mens_exp.artifacts.sweep import INTERRUPTED, JobState
from mens_exp.report import comparison_view, html, wording
from mens_exp.report.document import (
    Answer,
    Cell,
    Document,
    Item,
    Note,
    Plot,
    Section,
    Step,
    Table,
    Tone,
    bullets,
    cells_of,
    next_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mens_exp.artifacts.comparison import Comparison
    from mens_exp.artifacts.sweep import StudyRecord, SweepJob, SweepRecord
    from mens_exp.evals.observations import Column, Prediction, SweepReview
    from mens_exp.report.document import Part

_MOST_TEXT = 2_000  # characters of a prompt or an answer
_FIRST = 4  # initially visible KPIs, and as many costs
_AXES = 3  # KPIs with an axis, and as many costs
_TONES: dict[str, Tone] = {
    JobState.SUCCEEDED: Tone.GOOD,
    JobState.FAILED: Tone.BAD,
    JobState.CANCELLED: Tone.WARN,
    JobState.PRUNED: Tone.QUIET,
    INTERRUPTED: Tone.WARN,
}
_UNKNOWN = "–"
_SLURM = "slurm"


def planned_parts(record: SweepRecord) -> list[Part]:
    """Return a sweep's planned jobs, their expected cost, and omitted cells."""
    rows = [
        (
            str(job["number"]),
            _differs(job["differs"]),
            _time(job["estimate"].get("time_s")),
            _size(job["estimate"].get("memory_bytes")),
            _size(job["estimate"].get("disk_bytes")),
            (job["contract"] or _UNKNOWN)[:8],
        )
        for job in record.jobs
    ]
    heads = ("cell", "what differs", "time", "memory", "disk", "contract")
    table = Table(heads, rows, title="Sweep")
    return [table, Note(_total(record)), *_remarks(record)]


def result_parts(record: SweepRecord) -> list[Part]:
    """Return the result of every job."""
    rows = []
    for job in record.jobs:
        peaks = [one["peak_rss_bytes"] for one in job["attempts"] if one["peak_rss_bytes"]]
        loss, time_s = job["results"].get("tuned_val_loss"), job["results"].get("wall_s")
        rows.append(
            (
                str(job["number"]),
                Cell(_differs(job["differs"]), detail=job["reason"] or ""),
                _state(job["state"]),
                _UNKNOWN if time_s is None else wording.duration(time_s),
                _size(max(peaks, default=None)),
                _UNKNOWN if loss is None else wording.loss(loss),
            )
        )
    heads = ("cell", "what differs", "state", "time", "memory", "loss")
    table = Table(heads, rows, title="Sweep")
    counts = {state: sum(job["state"] == state for job in record.jobs) for state in JobState}
    said = ", ".join(f"{many} {state.value}" for state, many in counts.items() if many)
    return [table, Note(said)]


def steps(place: str, again: Sequence[str] = (), *, is_done: bool) -> list[Step]:
    """Return the next commands after a sweep, including the one that resumes it."""
    if not is_done:
        command = wording.command(*again) if again else wording.command(("sweep.resume", place))
        return [Step(command, "continue, once the cause is fixed")]
    command = wording.command("task=compare", ("path", place))
    return [Step(command, "compare its arms seed by seed")]


def steps_after_study(record: SweepRecord, place: Path) -> list[Step]:
    """Return the next commands after a study: check its comparison, or continue it.

    Args:
        record: the record of the study's sweep.
        place: its directory.
    """
    assert record.study is not None, "a study"
    made = record.study["comparison"]
    if made is None:
        return [Step(wording.command(*record.command), "continue it")]
    checked = wording.command("task=inspect", ("path", wording.path(place / made)), _VERIFIES)
    return [Step(checked, "check it against the records of its runs")]


_VERIFIES = "inspect.verify=true"


def job_line(record: SweepRecord, job: SweepJob, what: str, why: str | None) -> str:
    """Describe the state of a job in one line."""
    done = sum(one["state"] == JobState.SUCCEEDED for one in record.jobs)
    many = len(record.jobs) + (len(record.study["later"]) if record.study else 0)
    many = many if record.search is None else record.search["n_trials"]
    differs = f" ({', '.join(job['differs'])})" if job["differs"] else ""
    return f"[{done}/{many}] cell {job['number']}{differs} {what}{f': {why}' if why else ''}"


def _state(state: str) -> Cell:
    return Cell(state, tone=_TONES.get(state, Tone.PLAIN))


def _differs(texts: Sequence[str]) -> str:
    return " ".join(texts) or "the only cell"


def _total(record: SweepRecord) -> str:
    """Return the total cost of all cells, as far as it is known."""
    times = [job["estimate"].get("time_s") for job in record.jobs]
    memory = [job["estimate"].get("memory_bytes") or 0 for job in record.jobs]
    disk = sum(job["estimate"].get("disk_bytes") or 0 for job in record.jobs)
    known = [one for one in times if one is not None]
    many = min(record.n_jobs, len(record.jobs))
    # CPU jobs share the cores: two at a time are no faster than one after the other.
    on_cpu = any(job["estimate"].get("device") == "cpu" for job in record.jobs)
    slots = max(1, len(record.gpus) // record.gpus_per_job)
    beside = 1 if on_cpu else min(many, slots)
    if record.launcher == _SLURM:  # each job has its own cores or GPU once it leaves the queue
        beside = max(1, many)
    time = _time(sum(known) / beside) if len(known) == len(times) else _UNKNOWN
    peak = sum(sorted(memory, reverse=True)[: record.n_jobs])
    at_a_time = f"{many} at a time, {_many(record.threads, 'thread')} each"
    if record.gpus:
        each = f"{record.gpus_per_job} each of " if record.gpus_per_job > 1 else ""
        at_a_time += f", {each}GPU {', '.join(record.gpus)} in turn"
    return (
        f"{_many(len(record.jobs), 'cell')}, {at_a_time}: {time}, "
        f"{_size(peak or None)} of memory at most, {_size(disk or None)} of disk"
    )


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _time(value_s: float | None) -> str:
    return _UNKNOWN if value_s is None else f"≈ {wording.duration(value_s)}"


def _size(count: float | None) -> str:
    return _UNKNOWN if count is None else wording.size(count)


def _remarks(record: SweepRecord) -> list[Note]:
    notes = bullets((f"note: {note}" for note in record.notes), Tone.WARN)
    for job in record.jobs:
        notes += bullets(f"cell {job['number']}: {note}" for note in job["notes"])
    return [*notes, *_left_out(record)]


def _left_out(record: SweepRecord) -> Iterator[Note]:
    for one in record.left_out:
        text = f"left out: cell {one['number']} ({', '.join(one['differs'])}): {one['why']}"
        yield Note(text, Tone.BAD if one["same_as"] is None else Tone.PLAIN, item=True)


def document(review: SweepReview, after: Sequence[Step] = ()) -> Document:
    """Return the document of a sweep with all results of its runs."""
    record, compared = review.record, review.comparison
    states = [cell.state for cell in review.cells]
    counts = ", ".join(f"{states.count(one)} {one}" for one in dict.fromkeys(states))
    headline = review.why_not_compared
    found: list[Part] = [Note(review.why_not_compared, Tone.QUIET)]
    if compared is not None:
        from mens_exp.report.study_plots import comparison_drawings  # matplotlib takes a second

        headline = comparison_view.headline(compared)
        table, *findings = comparison_view.verdicts(compared).parts
        found = [table, *findings, *comparison_drawings(compared)]
    notes = [*_left_out(record), *bullets(record.notes)]
    kind = f"sweep of {len(review.cells)} cells: {counts or 'no cells'}"
    answers = []
    if record.study is not None:
        kind = f"study, {kind}"
        found_out = [*_answers_to(record.study, compared), Note(headline)]
        answers = [Section("What came of it", found_out)]
        headline = record.study["settings"]["hypothesis"]
    return Document(
        title=record.sweep_id if record.study is None else record.study["name"],
        kind=kind,
        headline=headline,
        command=wording.command(*([] if record.study else ["-m"]), *record.command),
        meta=cells_of(
            [
                ("Launched", wording.moment(record.created_utc)),
                ("Jobs at a time", f"{record.n_jobs}, {_many(record.threads, 'thread')} each"),
                ("Code", record.code_sha256[:12]),
                *_registration(record),
            ]
        ),
        parts=[
            *answers,
            next_steps(after),
            Section("Cells", [_cells(review), *notes]),
            Section("Parallel coordinates", [_coordinates(review)]),
            Section("Verdicts", found),
            Section("Predictions", list(_predictions(review))),
        ],
        source="sweep.json and the records of its runs",
        steps=after,
    )


def _answers_to(study: StudyRecord, compared: Comparison | None) -> Iterator[Note]:
    """Yield the findings of a study, and its missing runs."""
    if compared is not None:
        yield from comparison_view.hypothesis(compared, study["settings"])
    if study["stopped"]:
        yield Note(f"Stopped early: {study['stopped']}.")
    if study["later"]:
        yield Note(f"{_many(len(study['later']), 'run')} not made.", Tone.WARN)


def _registration(record: SweepRecord) -> Iterator[tuple[str, str]]:
    """Yield where and when a study was registered, and the digest of its settings."""
    if (study := record.study) is None:
        return
    if study["entry"] is None or study["registered_utc"] is None:
        yield "Registered", "not yet"
    else:
        when = wording.moment(study["registered_utc"])
        where = f"entry {study['entry']} of {study['ledger']}"
        yield "Registered", f"{when}, {where}, {study['entry_sha256']}"
    yield "Settings", study["sha256"][:12]


def fragments(review: SweepReview) -> dict[str, str]:
    """Render every plot as a separate page, by name; plots without data are omitted."""
    plots = [_coordinates(review)]
    if review.comparison is not None:
        from mens_exp.report.study_plots import comparison_drawings

        plots += comparison_drawings(review.comparison)
    return {plot.name: html.drawing(plot.svg) for plot in plots if plot.svg}


def _cells(review: SweepReview) -> Table:
    columns = [*review.kpis, *review.costs]
    extra = [i >= _FIRST for several in (review.kpis, review.costs) for i in range(len(several))]
    factors = review.factors
    before = len(factors) + 3
    rows: list[list[Cell | str]] = [
        [
            str(cell.number),
            *(cell.factors.get(name, "") for name in factors),
            Cell(
                cell.state,
                tone=_TONES.get(cell.state, Tone.PLAIN),
                detail=cell.reason or cell.why_unknown or "",
            ),
            Cell("open", link=f"./{quote(cell.directory)}/report.html")
            if cell.has_report
            else Cell(absent="no report"),
            *(_measured(cell.values.get(column.name), column) for column in columns),
        ]
        for cell in review.cells
    ]
    return Table(
        ["cell", *factors, "status", "run", *map(_title, columns)],
        rows,
        filters=frozenset(range(1, before - 1)),
        extra=frozenset(before + place for place, hidden in enumerate(extra) if hidden),
        name="cells",
    )


def _title(column: Column) -> str:
    name, unit = column.name, column.unit
    is_told = unit in {"1", "bytes"} or name.endswith(f"_{unit}") or name == unit
    return name if is_told else f"{name} ({unit})"


def _measured(value: float | None, column: Column) -> Cell:
    if value is None:
        return Cell(_UNKNOWN, sort="")
    is_size = column.unit == "bytes"
    text = wording.size(value) if is_size else f"{value:.5g}".replace("-", wording.MINUS)
    return Cell(text, sort=repr(value))


def _coordinates(review: SweepReview) -> Plot:
    """Draw every cell as a line over factors, costs and KPIs."""
    from mens_exp.report.study_plots import Line, parallel

    measured = [*review.costs[:_AXES], *review.kpis[:_AXES]]
    axes = [*review.factors, *(column.name for column in measured)]
    colors = _arm_colors(review)
    lines = [
        Line(
            cell=cell.number,
            arm=cell.arm,
            color=colors[cell.arm],
            values={**cell.factors, **cell.values},
        )
        for cell in review.cells
    ]
    svg = parallel(axes, lines, colors)
    return Plot(
        name="parallel_coordinates",
        title="A line a cell, from its factors over its costs to its KPIs",
        caption="",
        svg=svg,
        absent="" if svg else "No two factors, costs or KPIs are known.",
        wide=True,
    )


def _arm_colors(review: SweepReview) -> dict[str, str]:
    """Assign compared arms the colours of the comparison, and other arms the next ones."""
    from mens_exp.report.plots import ARMS, css_of

    first = [] if review.comparison is None else [arm["name"] for arm in review.comparison.arms]
    names = list(dict.fromkeys(cell.arm for cell in review.cells))
    order = [*(name for name in first if name in names), *(n for n in names if n not in first)]
    return {name: css_of(ARMS[i % len(ARMS)]) for i, name in enumerate(order)}


def _predictions(review: SweepReview) -> Iterator[Part]:
    """Collect the answers of all cells to each item; equal answers are merged."""
    by_item: dict[str, list[Prediction]] = {}
    for one in review.predictions:
        by_item.setdefault(one.item, []).append(one)
    if not by_item:
        yield Note("No run of this sweep evaluated items.", Tone.QUIET)
    for item, some in by_item.items():
        yield Item(
            name=item,
            prompt=_cut(some[0].prompt),
            reference=_cut(some[0].reference),
            answers=[
                *_answers("base", [(one, one.base, 0) for one in some]),
                *_answers("tuned", [(one, one.tuned, 1) for one in some]),
            ],
            keys=[str(one.cell) for one in some],
        )
    if review.more_predictions:
        more = f"{review.more_predictions} more are in the runs' own events.jsonl."
        yield Note(more, Tone.QUIET)


def _answers(side: str, given: Sequence[tuple[Prediction, str | None, int]]) -> Iterator[Answer]:
    groups: dict[tuple[str, str], list[str]] = {}
    for one, text, place in given:
        if text is not None:
            groups.setdefault((text, _kpis(one, place)), []).append(str(one.cell))
    for (text, kpis), cells in groups.items():
        who = f"{side} · cell{'s' * (len(cells) > 1)} {', '.join(cells)}"
        yield Answer(who=who, text=_cut(text), detail=kpis, keys=cells)


def _kpis(one: Prediction, place: int) -> str:
    words = {True: "yes", False: "no"}
    return " · ".join(
        f"{name.replace('_', ' ')}: {words[value]}"
        for name, both in one.kpis.items()
        if (value := both[place]) is not None
    )


def _cut(text: str) -> str:
    left = len(text) - _MOST_TEXT
    return text if left <= 0 else f"{text[:_MOST_TEXT]} … and {left} characters more"
