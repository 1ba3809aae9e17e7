"""The view of a run that its callbacks get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.telemetry import Telemetry

__all__ = ["RunRecord"]


class RunRecord(Protocol):
    """The record of a run, as long as it is open."""

    @property
    def dir(self) -> RunDir:
        """The run directory."""

    @property
    def telemetry(self) -> Telemetry:
        """The event log."""

    @property
    def manifest(self) -> Manifest:
        """The manifest; changed in place and written by :meth:`save`."""

    def save(self) -> None:
        """Write the manifest."""

    def after_close(self, fn: Callable[[Manifest], None]) -> None:
        """Call ``fn`` with the closed manifest, once it is on disk; its errors are isolated."""
