"""The step extract: rows of documented definitions, and of blocks of code in Markdown."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from mens_exp.corpus import functions, markdown_blocks, rust_items
from mens_exp.corpus.project_files import projects_of
from mens_exp.corpus.python_source import decode
from mens_exp.corpus.split import PROJECT_END
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult

if TYPE_CHECKING:
    from mens_exp.corpus.project_files import Project, SourceFile
    from mens_exp.rows.schema import TrainingPair

__all__ = ["extract"]

_ROOTS: Final = frozenset({"src", "lib", "main"})  # directories and files that name no module


def extract(step: StepInput) -> StepResult:
    """Read the projects that the input names, a file at a time.

    A row's group is its project and file; its category the project.

    Raises:
        MensError: an input is not there, is no checkout, or a reader is not installed.
    """
    dropped: Counter[str] = Counter()
    read: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    commits = {}
    with RowWriter(step.directory) as writer:
        for project in projects_of(step.files, step.config.extract):
            commits[project.name] = project.commit
            for file in project.files(dropped):
                read[file.language] += 1
                for pair in _pairs(project, file, dropped):
                    writer.write(pair)
                    rows[pair.language or ""] += 1
        total = writer.total
    return StepResult(
        rows_in=total + sum(dropped.values()),
        rows_out=total,
        dropped=dict(sorted(dropped.items())),
        facts={
            "commits": commits,
            "files": dict(sorted(read.items())),
            "rows_by_language": dict(sorted(rows.items())),
        },
    )


def _pairs(project: Project, file: SourceFile, dropped: Counter[str]) -> list[TrainingPair]:
    text = _text(file)
    if text is None:
        dropped["file_does_not_decode"] += 1
        return []
    group = f"{project.name}{PROJECT_END}{file.path}"
    if file.language == "python":
        pairs = functions.pairs_of(
            text,
            module=_module(file.path, ".py", "__init__").replace("/", "."),
            group=group,
            category=project.name,
            dropped=dropped,
            classes=True,
            language="python",
        )
    elif file.language == "rust":
        parts = _module(file.path, ".rs", "mod").split("/")
        crate = "::".join(["crate", *(part for part in parts if part not in _ROOTS)])
        pairs = rust_items.pairs_of(
            text, crate=crate, group=group, category=project.name, dropped=dropped
        )
    else:
        pairs = markdown_blocks.pairs_of(text, group=group, category=project.name, dropped=dropped)
    return [pair for pair in pairs if _can_be_written(pair, dropped)]


def _text(file: SourceFile) -> str | None:
    """Decode a file: Python by the encoding that it declares, the others as UTF-8."""
    if file.language == "python":
        return decode(file.data)
    try:
        text = file.data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _module(path: str, ending: str, of_directory: str) -> str:
    """Turn ``src/json/decoder.py`` into ``json/decoder`` and ``json/__init__.py`` into ``json``."""
    parts = path.removesuffix(ending).split("/")
    if parts[0] == "src" and len(parts) > 1:
        parts = parts[1:]
    return "/".join(parts[:-1] if parts[-1] == of_directory and len(parts) > 1 else parts)


def _can_be_written(pair: TrainingPair, dropped: Counter[str]) -> bool:
    """Tell whether a file of UTF-8 lines can hold a row, and a reader take it."""
    texts = (pair.prompt, pair.response)
    if all(text.strip() and "\0" not in text for text in texts):
        return True
    dropped["not_text"] += 1
    return False
