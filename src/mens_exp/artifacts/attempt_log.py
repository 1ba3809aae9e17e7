"""Attempts at one job of a sweep, noted where they happen, one line for each begin and end.

A batch system starts a job on its own time, and again when it likes, whether or not the launcher
lives: so the attempts are written beside the job, and the launcher reads them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypedDict

from mens_exp.artifacts.atomic import json_line
from mens_exp.artifacts.manifest import utc_now
from mens_exp.artifacts.record import cut_torn_end, read_lines
from mens_exp.artifacts.sweep import JobAttempt

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["AttemptLog"]

_UNSEEN = "it was killed, and began again"


class _Line(TypedDict, total=False):
    """One line: `event` is ``began`` or ``ended``; the rest is of a :class:`JobAttempt`."""

    event: str
    utc: str
    pid: int
    process_started: float
    queue_id: str
    host: str
    exit_code: int | None
    peak_rss_bytes: int | None
    why: str | None


class AttemptLog:
    """The log of one job."""

    def __init__(self, path: Path) -> None:
        """Take a file, which the first line makes."""
        self._path = path

    def began(self, pid: int, process_started: float, *, host: str, queue_id: str | None) -> None:
        """Note that a process began on the job."""
        line = _Line(event="began", utc=utc_now(), pid=pid, process_started=process_started)
        line["host"] = host
        if queue_id is not None:
            line["queue_id"] = queue_id
        self._append(line)

    def ended(
        self, exit_code: int | None, *, peak_rss_bytes: int | None = None, why: str | None = None
    ) -> None:
        """Note that the last process has ended."""
        line = _Line(event="ended", utc=utc_now(), exit_code=exit_code, why=why)
        line["peak_rss_bytes"] = peak_rss_bytes
        self._append(line)

    def attempts(self) -> list[JobAttempt]:
        """Read all attempts, in order; one without an end runs, or nobody saw how it ended.

        Raises:
            DataError: a line is not of this form.
        """
        if not self._path.exists():
            return []
        made: list[JobAttempt] = []
        for line in read_lines(self._path, _Line, torn_end=True):
            if line["event"] == "began":
                if made and made[-1]["ended_utc"] is None:
                    made[-1]["ended_utc"], made[-1]["why"] = line["utc"], _UNSEEN
                made.append(_attempt(line))
            elif made:  # the line of its begin may have been torn
                made[-1]["ended_utc"], made[-1]["exit_code"] = line["utc"], line["exit_code"]
                made[-1]["peak_rss_bytes"], made[-1]["why"] = line["peak_rss_bytes"], line["why"]
        return made

    def _append(self, line: _Line) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_end(self._path)
        with self._path.open("ab") as file:
            file.write(json_line(line, str(self._path)))
            file.flush()
            os.fsync(file.fileno())


def _attempt(line: _Line) -> JobAttempt:
    made = JobAttempt(
        pid=line["pid"],
        process_started=line["process_started"],
        started_utc=line["utc"],
        ended_utc=None,
        exit_code=None,
        peak_rss_bytes=None,
        host=line["host"],
    )
    if "queue_id" in line:
        made["queue_id"] = line["queue_id"]
    return made
