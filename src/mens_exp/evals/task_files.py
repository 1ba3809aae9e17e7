"""Tasks of a benchmark in a file: one JSON object a line, gzipped or not."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from mens_exp.artifacts.record import read_bytes
from mens_exp.artifacts.typed_json import parse_json
from mens_exp.errors import DataError, Problems
from mens_exp.rows.stored import bounded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["tasks_in"]


_MOST_PROBLEMS: Final = 20
_CHUNK: Final = 2**20


class _Named(Protocol):
    @property
    def id(self) -> str: ...


Task = TypeVar("Task", bound=_Named)


def tasks_in(path: Path, task_of: Callable[[Any, str], Task]) -> list[Task]:
    """Read the tasks of a file.

    Args:
        path: JSONL, or JSONL.gz.
        task_of: makes a task of a line's value and its place (``file:line``).

    Raises:
        DataError: the file cannot be read or holds no task, or a line is no such task, or one
            that is there already.
        Problems: several lines.
    """
    tasks: dict[str, Task] = {}
    problems: list[DataError] = []
    for number, line in enumerate(io.BytesIO(_unpacked(path)), 1):
        if not line.strip():
            continue
        if len(problems) >= _MOST_PROBLEMS:
            break
        try:
            task = task_of(parse_json(line, f"{path}:{number}"), f"{path}:{number}")
        except DataError as error:
            problems.append(error)
            continue
        if tasks.setdefault(task.id, task) is not task:
            where = f"{path}:{number}"
            problems.append(DataError("this task is there already", where=where, found=task.id))
    Problems.raise_if(problems)
    if not tasks:
        raise DataError("the file holds no task", where=str(path))
    return list(tasks.values())


def _unpacked(path: Path) -> bytes:
    content = read_bytes(path)
    if path.suffix != ".gz":
        return content
    try:
        with gzip.open(io.BytesIO(content)) as file:
            return b"".join(bounded(iter(lambda: file.read(_CHUNK), b""), path))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("the file is not gzipped", where=str(path), found=str(error)) from error
