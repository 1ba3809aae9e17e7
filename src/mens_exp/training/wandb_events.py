"""The events of a run as W&B shows them: points of curves, configuration, base results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import wandb

    from mens_exp.artifacts.telemetry import Event

__all__ = ["EventFeed", "set_config"]

_TOKENS = "data/supervised_tokens"


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
        sink.define_metric("step")
        for metric in METRICS.values():
            if metric.name == _TOKENS:  # an axis to choose in any chart
                sink.define_metric(metric.name)
                continue
            reduced = metric.reduction if metric.reduction in {"max", "mean"} else None
            sink.define_metric(metric.name, step_metric="step", summary=reduced)

    def take(self, record: Event) -> None:
        """Show one event; one that W&B has no place for is passed over."""
        payload, at_s = record["payload"], record["ts_ms"] / 1000
        match record["event"]:
            case "step":
                self._tokens = payload.get(_TOKENS, self._tokens)
                numbers = {k: v for k, v in _known(payload).items() if not isinstance(v, str)}
                self._log(numbers, payload["step"], at_s)  # a digest is no point of a curve
            case "scorecard_step":
                numbers = {k: v for k, v in payload.items() if k.startswith("eval/")}
                self._log(numbers, payload["step"], at_s)
            case "validation":
                self._validation(payload, at_s)
            case "run_started" if "config" in payload:
                set_config(self._sink, {**payload["config"], **self._drawn})
            case "plan" | "facts" as name:
                set_config(self._sink, {name: payload})

    def log_last(self, values: Mapping[str, Any]) -> None:
        """Make tables a part of the last row.

        A service that has a row already takes nothing more of it: where it has the last one, the
        tables are there with it, or come in a row of their own.
        """
        at = {} if self._last_s is None else {"_timestamp": self._last_s}
        shown = set(self._sink.summary.keys())  # type: ignore[no-untyped-call]
        are_there = set(values) <= shown
        step = self.last_step if are_there else max(self.last_step, self._sink.starting_step)
        self._sink.log({**values, **at}, step=step)

    def _validation(self, payload: Mapping[str, Any], at_s: float) -> None:
        is_base = payload["condition"] == "base"
        if is_base:
            self._sink.summary["base_val_loss"] = payload["val/loss"]
        if payload["condition"] == "peft_view":
            return  # no point of the curve; the results have it
        # The base model is a point of the tuned curve only where it starts.
        if not is_base or payload["step"] == 0:
            row = {**_known(payload), _TOKENS: self._tokens}
            del row["condition"]
            self._log(row, payload["step"], at_s)

    def _log(self, values: Mapping[str, Any], step: int, at_s: float) -> None:
        self.last_step, self._last_s = step, at_s
        self._sink.log({**values, "_timestamp": at_s}, step=step)


def set_config(sink: wandb.Run, values: Mapping[str, Any]) -> None:
    """Add to the configuration that W&B shows."""
    sink.config.update(values, allow_val_change=True)  # type: ignore[no-untyped-call]


def _known(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in payload.items() if value is not None}
