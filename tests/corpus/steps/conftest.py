"""Fixtures that run a single step and read the rows it wrote."""

from __future__ import annotations

import json

import pytest

from mens_exp.artifacts.atomic import json_line
from mens_exp.config.corpus import CorpusConfig
from mens_exp.corpus.steps.step import ROW_FILES, StepInput
from mens_exp.rows.schema import to_json


class Work:
    """Files of rows, and single steps run on them."""

    def __init__(self, path):
        self.path = path
        self.out = path

    def file(self, name, rows):
        """Write a file of rows in the format of a step."""
        path = self.path / "input" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(json_line(to_json(row), name) for row in rows))
        return path

    def do(self, step, files, **nodes):
        """Run a step with the output directory `out`."""
        self.out = self.path / f"out-{len(list(self.path.glob('out-*')))}"
        scratch = self.path / f"scratch-{self.out.name}"
        self.out.mkdir()
        scratch.mkdir()
        config = CorpusConfig(**nodes)
        return step(
            StepInput(files=tuple(files), directory=self.out, scratch=scratch, config=config)
        )

    def rows(self):
        """Return the rows that the last step wrote, by file."""
        return {name: self.lines(name) for name in ROW_FILES if (self.out / name).exists()}

    def lines(self, name):
        """Return the JSON objects of one file of the last step."""
        return [json.loads(line) for line in (self.out / name).read_text("utf-8").splitlines()]


@pytest.fixture
def work(tmp_path):
    return Work(tmp_path)


@pytest.fixture
def tree(tmp_path):
    """Write the files of a project."""

    def write(files, name="project"):
        for path, text in files.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        return tmp_path / name

    return write
