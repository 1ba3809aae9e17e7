"""Terminal views of sweeps, encoded documents, chats and the findings of task=doctor.

Trained tokens are marked by colour on a terminal, and also by brackets, for pipes, files and
readers who cannot distinguish green.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mens_exp.artifacts.sweep import JobState
from mens_exp.report import wording

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mens_exp.artifacts.sweep import SweepJob, SweepRecord

_STYLES = {
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "yellow",
    JobState.PRUNED: "cyan",
}
_UNKNOWN = "–"
_SLURM = "slurm"


def planned_table(record: SweepRecord) -> RenderableType:
    """Show a sweep's planned jobs, their expected cost, and omitted cells."""
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
    """Show the result of every job."""
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


def job_line(record: SweepRecord, job: SweepJob, what: str, why: str | None) -> Text:
    """Describe the state of a job in one line."""
    done = sum(one["state"] == JobState.SUCCEEDED for one in record.jobs)
    differs = ", ".join(job["differs"])
    many = len(record.jobs) + (len(record.study["later"]) if record.study else 0)
    many = many if record.search is None else record.search["n_trials"]
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


_BOUND = "│"  # between tokens
_OPEN, _CLOSE = "⟦", "⟧"  # around what is trained
_NEWLINE, _TAB, _SPACE = "⏎\n", "⇥", "·"
_TRAINED, _CONTROL, _QUIET = "green underline", "bold magenta", "dim"
_WINDOW = 8  # tokens decoded before one, so that a decoder that looks back has what it needs
_MOST_PARTS = 8  # a character has at most four bytes; a decoder that never settles is cut here


class Speller(Protocol):
    """The part of a tokenizer that showing needs."""

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens spelled out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownDocument:
    """One document of a row.

    Attributes:
        title: what the row is called, and which of its documents this is.
        ids: its tokens.
        supervised: which of them are learned.
        cut: tokens it lost to the limit.
    """

    title: str
    ids: Sequence[int]
    supervised: Sequence[bool]
    cut: int


def token_legend() -> Text:
    """Say how to read what `shown` draws."""
    text = Text("Rows as they are trained: ")
    text.append(f"{_OPEN}trained{_CLOSE}", style=_TRAINED)
    text.append("  read only  ")
    text.append("<control token>", style=_CONTROL)
    text.append(f"  {_BOUND} ends a token, {_SPACE} is a space at its edge, ⏎ a newline")
    return text


def shown_document(document: ShownDocument, speller: Speller) -> Text:
    """Draw a document.

    Args:
        document: what to draw.
        speller: the tokenizer that made it.

    Returns:
        A line of counts, then each token between bars, what is trained in brackets. Tokens that
        make one character between them stand together, with how many they are.
    """
    learned = sum(document.supervised)
    text = Text()
    text.append(f"{document.title}: ", style="bold")
    text.append(f"{len(document.ids)} tokens, {learned} trained")
    if document.cut:
        text.append(f", {document.cut} cut off", style="yellow")
    text.append("\n")
    inside = False
    control = speller.special_ids
    for start, end, piece in _pieces(document.ids, document.supervised, speller):
        is_learned = bool(document.supervised[start])
        if is_learned is not inside:
            text.append(_CLOSE if inside else _OPEN, style=_TRAINED)
        elif start:
            text.append(_BOUND, style=_QUIET)
        inside = is_learned
        text.append_text(
            _cell(piece, end - start, learned=is_learned, control=document.ids[start] in control)
        )
    if inside:
        text.append(_CLOSE, style=_TRAINED)
    return text.append("\n")


def dropped_row(title: str, documents: int, seq_len: int) -> Text:
    """Say that a row, or a part of it, is not trained on at all."""
    what = "a document of it is" if documents == 1 else f"{documents} documents of it are"
    text = Text()
    text.append(f"{title}: ", style="bold")
    text.append(f"{what} dropped: nothing learned is within {seq_len} tokens", style="yellow")
    return text.append("\n")


def _cell(piece: str, tokens: int, *, learned: bool, control: bool) -> Text:
    style = " ".join([_TRAINED] * learned + [_CONTROL] * control)
    cell = Text(_visible(piece), style=style)
    if tokens > 1:
        cell.append(f"‥{tokens}", style=_QUIET)
    return cell


def _visible(piece: str) -> str:
    """Return a token's text with white space at its edges, and what no screen shows, visible."""
    body = piece.strip(" ")
    if not body:
        return _SPACE * len(piece)
    before = len(piece) - len(piece.lstrip(" "))
    after = len(piece) - len(piece.rstrip(" "))
    shown_body = "".join(map(_character, body))
    return f"{_SPACE * before}{shown_body}{_SPACE * after}"


def _character(character: str) -> str:
    if character == "\n":
        return _NEWLINE
    if character == "\t":
        return _TAB
    if character.isprintable():
        return character
    return ascii(character)[1:-1]


def _pieces(
    ids: Sequence[int], supervised: Sequence[bool], speller: Speller
) -> Iterator[tuple[int, int, str]]:
    """Yield begin, end and text of each token, or of tokens that only together make text."""
    start = 0
    for end in range(1, len(ids) + 1):
        before = list(ids[max(0, start - _WINDOW) : start])
        context = speller.spell(before)
        text = speller.spell([*before, *ids[start:end]])
        is_settled = text.startswith(context) and len(text) > len(context)
        is_whole = is_settled and not text.endswith("\ufffd")
        parts = end < len(ids) and supervised[end] == supervised[start]
        if is_whole or end - start == _MOST_PARTS or not parts:
            yield start, end, text.removeprefix(context)
            start = end


_CURSOR = "▌"
_CONTROL_CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def answer_columns(answers: Mapping[str, tuple[str, bool]], titles: Mapping[str, str]) -> Table:
    """Lay out answers side by side.

    Args:
        answers: condition -> its text so far, and whether it is whole.
        titles: condition -> the head of its column.
    """
    table = Table(expand=True, show_lines=False)
    for name in answers:
        table.add_column(titles[name], ratio=1, overflow="fold")
    cells = [
        Text(_printable(text) if done else f"{_printable(text)}{_CURSOR}")
        for text, done in answers.values()
    ]
    table.add_row(*cells)
    return table


def answer_sections(answers: Mapping[str, tuple[str, bool]], titles: Mapping[str, str]) -> str:
    """Write answers below each other, each under its title."""
    parts = [
        f"{titles[name]}\n{'-' * len(titles[name])}\n{_printable(text)}"
        for name, (text, _) in answers.items()
    ]
    return "\n\n".join(parts)


def _printable(text: str) -> str:
    """Keep what a model wrote from steering the terminal: control codes become U+FFFD."""
    return _CONTROL_CODES.sub("\N{REPLACEMENT CHARACTER}", text)


class State(StrEnum):
    """The meaning of a finding for a run."""

    GOOD = "good"
    NOTE = "note"  # limits something
    BAD = "bad"  # stops something


_MARKS = {State.GOOD: ("✓", "green"), State.NOTE: ("!", "yellow"), State.BAD: ("✗", "bold red")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at, and what to do where it is not as it should be."""

    name: str
    state: State
    found: str
    remedy: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """Return the finding as a JSON object."""
        return {
            "name": self.name,
            "state": self.state.value,
            "found": self.found,
            "remedy": self.remedy,
        }


def findings_table(findings: Iterable[Finding]) -> Table:
    """Put each finding on a line with its mark, its remedy under it."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.state]
        told = Text(finding.found)
        if finding.remedy is not None:
            told.append(f"\nNext: {finding.remedy}", style=style)
        table.add_row(Text(mark, style=style), Text(finding.name), told)
    return table
