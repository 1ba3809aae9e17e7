from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mens_exp import cli
from mens_exp.artifacts.inspection import Inspection
from mens_exp.config.overrides import check

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.overrides import Cell


@pytest.fixture(scope="session")
def cell(tiny_run: list[str]) -> Cell:
    """One composed training run; only to be read."""
    checked = check(tiny_run)
    assert not checked.problems
    return checked.cells[0]


@pytest.fixture
def break_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Raise an error just before a micro-batch is trained on, until told otherwise."""
    from mens_exp.training.module import TrainingModule

    original = TrainingModule.training_step

    def planned(number: int | None, error: BaseException | None = None) -> None:
        def step(self: Any, batch: Any, index: int) -> Any:
            if batch.index == number:
                raise error or KeyboardInterrupt
            return original(self, batch, index)

        monkeypatch.setattr(TrainingModule, "training_step", step)

    return planned


@pytest.fixture
def broken(break_at: Callable[..., None], train_in: Callable[..., RunDir]) -> Callable[..., RunDir]:
    """A training run that was cancelled, or failed, before a micro-batch."""
    from mens_exp.tasks.cancellation import Cancelled

    def made(
        directory: Any, at: int, *overrides: str, error: BaseException | None = None
    ) -> RunDir:
        break_at(at, error or Cancelled("SIGINT"))
        run = train_in(directory, *overrides, code=1 if error else 130)
        break_at(None)
        return run

    return made


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Type a command in an empty directory, and return what it said."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "200")

    def command(*overrides: str, code: int = 0) -> str:
        assert cli.main(list(overrides)) == code
        said = capsys.readouterr()
        return said.out + said.err

    return command


@pytest.fixture
def inspect(typed: Callable[..., str], tmp_path: Path) -> Callable[..., Inspection]:
    """Inspect a path and return the record."""
    number = iter(range(99))

    def command(path: Any, *overrides: str, code: int = 0) -> Inspection:
        own = tmp_path / "here" / f"inspection_{next(number)}"
        typed("task=inspect", f"path={path}", *overrides, f"hydra.run.dir={own}", code=code)
        return Inspection.read(own / "inspection.json")

    return command
