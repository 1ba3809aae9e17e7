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
    def batch(self) -> Path:
        """Files to and from a batch system: scripts, output, attempts."""
        return self.path / "batch"

    def attempts(self, number: int) -> Path:
        """Return the log of the attempts at a job that the launcher does not start itself."""
        return self.batch / f"attempts_{number}.jsonl"

    @property
    def journal(self) -> Path:
        """In a search, Optuna's journal of its trials."""
        return self.path / "search.journal"

    @property
    def search_page(self) -> Path:
        """In a search, its record as a page."""
        return self.path / "search.html"

    @property
    def page(self) -> Path:
        """The sweep as a page, rendered from its record and those of its runs."""
        return self.path / "sweep.html"

    @property
    def sync(self) -> Path:
        """The parts of the sweep as a whole that W&B services have."""
        return self.path / "sync.json"

    @property
    def sync_lock(self) -> Path:
        """Held by the process that sends it."""
        return self.path / "sync.lock"
