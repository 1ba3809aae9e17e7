"""Inputs and output directory of a corpus, checked before a step begins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.digest import sha256_file
from mens_exp.corpus.project_files import projects_of
from mens_exp.corpus.steps.pipeline import CORPUS_PAGE, CORPUS_RECORD, LOCK, STEP_RECORD
from mens_exp.corpus.steps.step import INPUT
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.rows.files import resolve_files
from mens_exp.rows.stored import opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.corpus import CorpusConfig

__all__ = ["hashes", "input_files", "place_problems"]

_STEP: Final = re.compile(r"\d\d-[a-z]+")
_SHOWN: Final = 3  # names of what is in the way


def input_files(config: CorpusConfig) -> list[Path]:
    """Return what the first step reads; nothing where `corpus.input` is null.

    Raises:
        DataError: a glob matches nothing, or a file is named twice.
        Problems: several of these.
    """
    return [] if config.input is None else resolve_files(config.input, INPUT)


def place_problems(config: CorpusConfig) -> list[MensError]:
    """List what keeps a corpus from being read and written; nothing is touched."""
    try:
        files = input_files(config)
    except (DataError, Problems) as error:
        return list(getattr(error, "problems", [error]))
    problems: list[MensError] = [*_unreadable(files, config)]
    assert config.output is not None, "the rules ask for it"
    output = Path(config.output)
    problems += _within_each_other(files, output)
    problems += _in_the_way(output)
    return problems


def hashes(files: Sequence[Path], config: CorpusConfig) -> dict[str, str]:
    """Return the name of each input with the SHA-256 of its content, in order.

    Raises:
        MensError: one cannot be read.
    """
    if config.steps[0] == "extract":
        return {project.name: project.sha256() for project in projects_of(files, config.extract)}
    found: dict[str, str] = {}
    for number, path in enumerate(files, start=1):
        name = path.name if path.name not in found else f"{number}/{path.name}"
        found[name] = sha256_file(path)
    return found


def _unreadable(files: Sequence[Path], config: CorpusConfig) -> Iterator[MensError]:
    if config.steps[0] == "extract":
        try:
            projects_of(files, config.extract)
        except MensError as error:
            yield from getattr(error, "problems", [error])
        return
    for path in files:
        try:
            opened(path, INPUT).close()
        except DataError as error:
            yield error


def _within_each_other(files: Sequence[Path], output: Path) -> Iterator[DataError]:
    """Refuse a corpus that would read what it writes."""
    written = output.resolve()
    for path in files:
        read = path.resolve()
        if written == read or read in written.parents or written in read.parents:
            yield DataError(
                "the output lies in the input"
                if written not in read.parents
                else "the input lies in the output",
                where="corpus.output",
                found=f"{output} and {path}",
                expected="two places apart: a second run would read what the first one wrote",
                remedy="choose another corpus.output",
            )


def _in_the_way(output: Path) -> Iterator[DataError]:
    """Refuse to write among files that no corpus made."""
    if not output.exists():
        return
    if not output.is_dir():
        yield DataError("not a directory", where="corpus.output", found=str(output))
        return
    foreign = sorted(path.name for path in output.iterdir() if not _is_ours(path))
    if foreign:
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        yield DataError(
            "the directory holds something else",
            where="corpus.output",
            found=f"{output}: {', '.join(foreign[:_SHOWN])}{more}",
            expected="an empty directory, a new one, or the corpus of an earlier run",
            remedy="choose another corpus.output; nothing there was touched",
        )


def _is_ours(path: Path) -> bool:
    if path.name in {CORPUS_PAGE, CORPUS_RECORD, LOCK}:
        return path.is_file()
    if path.name.startswith("."):
        return path.name.endswith((".tmp", ".old", ".taking"))  # of a process that was killed
    return bool(_STEP.fullmatch(path.name)) and (path / STEP_RECORD).is_file()
