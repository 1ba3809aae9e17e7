"""Values that a search reads of its runs: objectives of finished ones, losses of running ones."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.scorecard import Condition, Scorecard, read_item_events
from mens_exp.errors import MensError
from mens_exp.evals.observations import observations, scores

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.artifacts.run_dir import RunDir

__all__ = ["Curve", "objective_values"]


def objective_values(run: RunDir, names: Sequence[str]) -> tuple[list[float] | None, str | None]:
    """Return the values of KPIs in a run that succeeded, or why one of them is unknown."""
    try:
        manifest = Manifest.read(run.manifest)
        scorecard = Scorecard.read(run.scorecard) if run.scorecard.exists() else None
        lines = read_item_events(run.events) if run.events.exists() else []
    except MensError as error:
        return None, str(error)
    tuned = Condition.TUNED.value
    found = scores(
        observations("", manifest, tuned, scorecard, lines),
        None if scorecard is None else scorecard.items,
    )
    values = []
    for name in names:
        score = found.get(name)
        if score is None or score.mean is None or not math.isfinite(score.mean):
            why = "the run measured none" if score is None or not score.why else score.why
            return None, f"{name}: {why}"
        values.append(score.mean)
    return values, None


class Curve:
    """The validation losses of a run at work, read on from its telemetry."""

    def __init__(self, telemetry: Path) -> None:
        """Begin at the start of a file that need not be there yet."""
        self._path = telemetry
        self._restart()

    def _restart(self) -> None:
        self._place = 0
        self._last_step: int | None = None
        self._is_over = False
        self.points: list[tuple[int, float]] = []

    def read(self) -> bool:
        """Read what is new; tell whether the run still has steps to take."""
        try:
            size = self._path.stat().st_size
            if size < self._place:  # put back to a checkpoint
                self._restart()
            with self._path.open("rb") as file:
                file.seek(self._place)
                new = file.read()
        except OSError:
            return False
        whole = new[: new.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in whole.splitlines():
            if b'"validation"' in line or b'"train_' in line:
                self._take(line)
        return not self._is_over and self._last_step is not None

    def _take(self, line: bytes) -> None:
        event = json.loads(line)
        name, payload = event["event"], event["payload"]
        if name == "train_start":
            self._last_step, self._is_over = payload["max_steps"], False
        elif name == "train_complete":
            self._is_over = True
        elif name == "validation" and payload["condition"] == Condition.TUNED.value:
            step, loss = payload["step"], payload.get("val/loss")
            if step > 0 and loss is not None:
                self.points.append((step, loss))
            self._is_over = self._is_over or step == self._last_step
