"""The JSON records of one run directory, read once and handed to every renderer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.attribution import Attribution
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.scorecard import ItemEvent, Scorecard, read_item_events
from mens_exp.artifacts.telemetry import Event, read_events
from mens_exp.artifacts.typed_json import parse_json
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.artifacts.run_dir import RunDir

__all__ = ["Records", "load"]

_NOT_REACHED = {
    "failed": "not reached: the run failed",
    "cancelled": "not reached: the run was cancelled",
    "started": "not reached so far",
    "succeeded": "not recorded",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """The records that a run left; a part that it never reached is empty or None.

    Attributes:
        manifest: identity, inputs, facts, results and status of the run.
        events: the telemetry, one mapping an event, in the order they were written.
        scorecard: the KPIs, None when the run was not evaluated.
        items: one mapping per evaluated item and condition.
        plan: the execution plan, None when the run failed before it was made.
        config: the composed configuration as YAML text, None when there is none.
        attribution: what quantizing the base costs, None when it was not measured.
    """

    manifest: Manifest
    events: tuple[Event, ...] = ()
    scorecard: Scorecard | None = None
    items: tuple[ItemEvent, ...] = ()
    plan: dict[str, Any] | None = None
    config: str | None = None
    attribution: Attribution | None = None

    @property
    def status(self) -> str:
        """The run's status as a plain word."""
        return str(self.manifest.status)

    def payloads(self, event: str) -> list[dict[str, Any]]:
        """Payloads of every telemetry event of one kind, oldest first."""
        return [record["payload"] for record in self.events if record["event"] == event]

    def why_absent(self, dotted: str) -> str:
        """Say why a field of the manifest or scorecard holds no value.

        Args:
            dotted: the field, as ``results.peak_cuda_bytes`` or ``conditions.base.parse_rate``.

        Returns:
            The recorded reason, or what the run's status says about it.
        """
        for unknown in (self.manifest.unknown, self.scorecard.unknown if self.scorecard else {}):
            if dotted in unknown:
                return unknown[dotted]
        return _NOT_REACHED.get(self.status, "not recorded")


def load(run: RunDir) -> Records:
    """Read a run directory.

    Args:
        run: the directory; only its manifest has to be there.

    Raises:
        MensError: the manifest is missing, or a record is damaged or of a newer version.
    """
    return Records(
        manifest=Manifest.read(run.manifest),
        events=tuple(read_events(run.telemetry)) if run.telemetry.is_file() else (),
        scorecard=Scorecard.read(run.scorecard) if run.scorecard.is_file() else None,
        items=tuple(read_item_events(run.events)) if run.events.is_file() else (),
        plan=_read_plan(run.plan) if run.plan.is_file() else None,
        config=run.config.read_text(encoding="utf-8") if run.config.is_file() else None,
        attribution=Attribution.read(run.attribution) if run.attribution.is_file() else None,
    )


def _read_plan(path: Path) -> dict[str, Any]:
    plan = parse_json(path.read_bytes(), str(path))
    if not isinstance(plan, dict):
        raise DataError(
            "the plan is no object",
            where=str(path),
            found=type(plan).__name__,
            expected="an object",
            remedy="delete the file; the report is rendered without it",
        )
    return plan
