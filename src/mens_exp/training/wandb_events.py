"""The events of a run as W&B shows them: points of curves, configuration, base results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.metrics import METRICS
from mens_exp.artifacts.scorecard import Condition
from mens_exp.evals.kpi_table import KPIS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import wandb

    from mens_exp.artifacts.telemetry import Event

__all__ = ["EventFeed", "set_config", "shown_as"]

_TOKENS = "data/supervised_tokens"
_OF_SCORECARD = "eval/"


class EventFeed:
    """Hands events to an open W&B run, in their order, each under the time it happened."""

    def __init__(self, sink: wandb.Run, drawn: Mapping[str, Any] | None = None) -> None:
        """Tell the run by which axes its metrics are drawn.

        Args:
            sink: the run.
            drawn: by an agent; no configuration takes its place, or the search would miss it.
        """
        self._sink = sink
        self._drawn = drawn or {}
        self._tokens = 0  # supervised tokens at the latest step, the second axis
        self.last_step = 0
        self._last_s: float | None = None
        self._is_open = False  # the last row, as far as it was taken
        sink.define_metric("step")
        for metric in METRICS.values():
            if metric.name == _TOKENS:  # an axis to choose in any chart
                sink.define_metric(metric.name)
                continue
            reduced = metric.reduction if metric.reduction in {"max", "mean"} else None
            sink.define_metric(shown_as(metric.name), step_metric="step", summary=reduced)

    def take(self, record: Event) -> None:
        """Show one event; one that W&B has no place for is passed over."""
        payload, at_s = record["payload"], record["ts_ms"] / 1000
        match record["event"]:
            case "step":
                self._tokens = payload.get(_TOKENS, self._tokens)
                numbers = {k: v for k, v in _known(payload).items() if not isinstance(v, str)}
                self._log(numbers, payload["step"], at_s)  # a digest is no point of a curve
            case "scorecard_step":
                names = [name for name in payload if name.startswith(_OF_SCORECARD)]
                numbers = {shown_as(name): payload[name] for name in names}
                self._log(numbers, payload["step"], at_s)
            case "validation":
                self._validation(payload, at_s)
            case "run_started" if "config" in payload:
                set_config(self._sink, {**payload["config"], **self._drawn})
            case "plan" | "facts" as name:
                set_config(self._sink, {name: payload})

    def log_last(self, values: Mapping[str, Any]) -> None:
        """Make tables a part of the last row, and end it: a summary that follows has the last word.

        A curve and a result share a name; a row that is still open would be written after the
        result. A service that has a row already takes nothing more of it: where it has the last
        one, the tables are there with it, or come in a row of their own.
        """
        if not values and not self._is_open:
            return
        at = {} if self._last_s is None else {"_timestamp": self._last_s}
        shown = set(self._sink.summary.keys())  # type: ignore[no-untyped-call]
        are_there = set(values) <= shown
        step = self.last_step if are_there else max(self.last_step, self._sink.starting_step)
        self._sink.log({**values, **at}, step=step, commit=True)

    def _validation(self, payload: Mapping[str, Any], at_s: float) -> None:
        is_base = payload["condition"] == "base"
        if is_base:
            self._sink.summary[f"{Condition.BASE}/val_loss"] = payload["val/loss"]
        if payload["condition"] == "peft_view":
            return  # no point of the curve; the results have it
        # The base model is a point of the tuned curve only where it starts.
        if not is_base or payload["step"] == 0:
            row = {shown_as(name): value for name, value in _known(payload).items()}
            del row["condition"]
            row[_TOKENS] = self._tokens
            self._log(row, payload["step"], at_s)

    def _log(self, values: Mapping[str, Any], step: int, at_s: float) -> None:
        self.last_step, self._last_s, self._is_open = step, at_s, False
        self._sink.log({**values, "_timestamp": at_s}, step=step)
        self._is_open = True


def shown_as(metric: str) -> str:
    """Return the name that W&B has for a metric: ``tuned/<kpi>`` for a KPI of the tuned model.

    The curve of a KPI has the name of its final value in the summary, so that a search by W&B,
    its early stopping and its tables speak of the same thing.
    """
    area, _, name = metric.partition("/")
    kpi = {"eval": name, "val": f"val_{name}"}.get(area)
    return f"{Condition.TUNED}/{kpi}" if kpi in KPIS else metric


def set_config(sink: wandb.Run, values: Mapping[str, Any]) -> None:
    """Add to the configuration that W&B shows."""
    sink.config.update(values, allow_val_change=True)  # type: ignore[no-untyped-call]


def _known(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in payload.items() if value is not None}
