"""A step done on its own, and the rows that it leaves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mens_exp.artifacts.atomic import json_line
from mens_exp.config.corpus import CorpusConfig
from mens_exp.corpus.steps.step import ROW_FILES, Step, StepInput, StepResult
from mens_exp.rows.schema import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mens_exp.rows.schema import TrainingPair


class Work:
    """Files of rows, and steps done on them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.out = path

    def file(self, name: str, rows: Sequence[TrainingPair]) -> Path:
        """Write rows as a step does."""
        path = self.path / "input" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(json_line(to_json(row), name) for row in rows))
        return path

    def do(self, step: Step, files: Sequence[Path], **nodes: Any) -> StepResult:
        """Do a step into a directory of its own, `out`."""
        self.out = self.path / f"out-{len(list(self.path.glob('out-*')))}"
        scratch = self.path / f"scratch-{self.out.name}"
        self.out.mkdir()
        scratch.mkdir()
        config = CorpusConfig(**nodes)
        return step(
            StepInput(files=tuple(files), directory=self.out, scratch=scratch, config=config)
        )

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return what the last step left, by file."""
        return {name: self.lines(name) for name in ROW_FILES if (self.out / name).exists()}

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of one file of the last step."""
        return [json.loads(line) for line in (self.out / name).read_text("utf-8").splitlines()]


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Write a project of files."""

    def write(files: dict[str, str], name: str = "project") -> Path:
        for path, text in files.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        return tmp_path / name

    return write
