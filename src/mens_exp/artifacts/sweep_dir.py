"""The names inside the directory of a sweep; each job below it is a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SweepDir"]


@dataclass(frozen=True, slots=True)
class SweepDir:
    """One sweep's directory; nothing is made or read until asked for."""

    path: Path

    @property
    def record(self) -> Path:
        """The record of the sweep, written by its launcher alone."""
        return self.path / "sweep.json"

    @property
    def lock(self) -> Path:
        """Held by the launcher as long as it lives."""
        return self.path / "sweep.lock"

    @property
    def page(self) -> Path:
        """The sweep as a page, rendered from its record and those of its runs."""
        return self.path / "sweep.html"

    @property
    def sync(self) -> Path:
        """What W&B services have of the sweep as a whole."""
        return self.path / "sync.json"

    @property
    def sync_lock(self) -> Path:
        """Held by the process that sends it."""
        return self.path / "sync.lock"
