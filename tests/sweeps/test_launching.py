"""How a sweep ends: its page, and what is said of it."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from mens_exp.artifacts.sweep_dir import SweepDir
from mens_exp.sweeps import launching
from mens_exp.sweeps.launching import finish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mens_exp.artifacts.sweep import SweepRecord


@pytest.fixture
def ended(tmp_path: Path, make_sweep: Callable[..., SweepRecord]) -> Any:
    """A launcher whose one job has ended with 1."""
    directory = SweepDir(tmp_path)
    made = make_sweep({})
    made.write(directory.record)
    console = Console(file=io.StringIO(), width=200)
    return SimpleNamespace(directory=directory, record=made, console=console, run=lambda: 1)


def test_a_sweep_leaves_its_page_however_it_ended(ended: Any) -> None:
    """Its place is told, beside the way to go on."""
    assert finish(ended) == 1
    said = ended.console.file.getvalue()
    assert f"To look at: {ended.directory.page}" in said
    assert "sweep.resume=" in said
    assert "1 waiting" in ended.directory.page.read_text(encoding="utf-8")


def test_a_page_that_fails_undoes_no_sweep(ended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code stays that of the jobs, and the reason is told."""

    def refuse(_: SweepDir) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(launching, "write_sweep_page", refuse)
    assert finish(ended) == 1
    assert "sweep.html was not written: OSError: disk full" in ended.console.file.getvalue()
    assert not ended.directory.page.exists()
