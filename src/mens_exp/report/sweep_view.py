"""Terminal view of a sweep: its cells before it starts, and their outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mens_exp.artifacts.sweep import JobState
from mens_exp.report import wording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.sweep import SweepJob, SweepRecord

__all__ = ["line", "planned_table", "result_table"]

_STYLES = {
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "yellow",
    JobState.PRUNED: "cyan",
}
_UNKNOWN = "–"
_SLURM = "slurm"


def planned_table(record: SweepRecord) -> RenderableType:
    """Say what a sweep will run, what it is expected to take, and which cells it leaves out."""
    table = _table("Sweep", "cell", "what differs", "time", "memory", "disk", "contract")
    for job in record.jobs:
        cost = job["estimate"]
        table.add_row(
            str(job["number"]),
            _differs(job["differs"]),
            _time(cost.get("time_s")),
            _size(cost.get("memory_bytes")),
            _size(cost.get("disk_bytes")),
            (job["contract"] or _UNKNOWN)[:8],
        )
    return Group(table, Text(_total(record)), *_notes(record))


def result_table(record: SweepRecord) -> RenderableType:
    """Say what came of every job."""
    table = _table("Sweep", "cell", "what differs", "state", "time", "memory", "loss", "why")
    for job in record.jobs:
        peaks = [one["peak_rss_bytes"] for one in job["attempts"] if one["peak_rss_bytes"]]
        loss, time_s = job["results"].get("tuned_val_loss"), job["results"].get("wall_s")
        table.add_row(
            str(job["number"]),
            _differs(job["differs"]),
            Text(str(job["state"]), style=_STYLES.get(JobState(job["state"]), "dim")),
            _UNKNOWN if time_s is None else wording.duration(time_s),
            _size(max(peaks, default=None)),
            _UNKNOWN if loss is None else wording.loss(loss),
            Text(wording.visible(job["reason"] or "")),
        )
    return Group(table, Text(_counted(record)))


def line(record: SweepRecord, job: SweepJob, what: str, why: str | None) -> Text:
    """Say in one line what has become of a job."""
    done = sum(one["state"] == JobState.SUCCEEDED for one in record.jobs)
    differs = ", ".join(job["differs"])
    many = len(record.jobs) if record.search is None else record.search["n_trials"]
    text = Text(f"[{done}/{many}] cell {job['number']}")
    text.append(f" ({wording.visible(differs)})" if differs else "")
    text.append(f" {what}")
    text.append(f": {wording.visible(why)}" if why else "")
    return text


def _table(title: str, *names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_edge=False)
    right = {"cell", "time", "memory", "disk", "loss"}
    for name in names:
        folds = "fold" if name in {"what differs", "why"} else "ellipsis"
        table.add_column(
            name,
            justify="right" if name in right else "left",
            overflow=folds,  # type: ignore[arg-type]  # a literal of the two
            no_wrap=folds != "fold",
        )
    return table


def _differs(texts: Sequence[str]) -> Text:
    return Text(wording.visible(" ".join(texts)) or "the only cell")


def _total(record: SweepRecord) -> str:
    """Add up what all cells take, as far as it is known."""
    times = [job["estimate"].get("time_s") for job in record.jobs]
    memory = [job["estimate"].get("memory_bytes") or 0 for job in record.jobs]
    disk = sum(job["estimate"].get("disk_bytes") or 0 for job in record.jobs)
    known = [one for one in times if one is not None]
    many = min(record.n_jobs, len(record.jobs))
    # Jobs on the CPU share its cores: two at a time are no faster than one after the other.
    on_cpu = any(job["estimate"].get("device") == "cpu" for job in record.jobs)
    slots = max(1, len(record.gpus) // record.gpus_per_job)
    beside = 1 if on_cpu else min(many, slots)
    if record.launcher == _SLURM:  # each on cores or a GPU of its own, once it has left the queue
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


def _notes(record: SweepRecord) -> list[Text]:
    notes = [Text(f"note: {wording.visible(note)}", style="yellow") for note in record.notes]
    for job in record.jobs:
        told = [wording.visible(note) for note in job["notes"]]
        notes += [Text(f"cell {job['number']}: {note}") for note in told]
    for one in record.left_out:
        name = wording.visible(", ".join(one["differs"]))
        why = wording.visible(one["why"])
        style = "red" if one["same_as"] is None else ""
        notes.append(Text(f"left out: cell {one['number']} ({name}): {why}", style=style))
    return notes


def _counted(record: SweepRecord) -> str:
    counts = {state: sum(job["state"] == state for job in record.jobs) for state in JobState}
    return ", ".join(f"{many} {state.value}" for state, many in counts.items() if many)


def _time(value_s: float | None) -> str:
    return _UNKNOWN if value_s is None else f"≈ {wording.duration(value_s)}"


def _size(count: float | None) -> str:
    return _UNKNOWN if count is None else wording.size(count)
