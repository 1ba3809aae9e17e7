"""Settings of a run that change what is learned, and those that do not.

Each setting's declaration says which it is (`changes`). The contract's digest covers the first and
nothing else. A callback's settings depend on its class, and a few settings on others.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Any

from mens_exp.config.adapter import Selection
from mens_exp.config.fields import Effect
from mens_exp.config.store import effect_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["RECORDING_CALLBACKS", "learned_settings", "recorded_settings"]


_OURS = "mens_exp.training.callbacks."
# Callbacks that only look, save or stop what cannot go on; any other is part of the contract.
RECORDING_CALLBACKS = frozenset(
    _OURS + name
    for name in (
        "adapter_writer.AdapterWriter",
        "checkpoint.Checkpoint",
        "digests.Digests",
        "facts.ManifestFacts",
        "finite_guard.FiniteGuard",
        "memory.MemoryWatch",
        "progress.Progress",
        "scorecard.Scorecard",
        "telemetry.TelemetryWriter",
        "throughput.Throughput",
    )
)
# Validation decides what is learned where it chooses the adapter or ends the run.
_WITH_SELECTION = ("trainer.val_check_interval", "data.val_max_tokens")


def learned_settings(config: RunConfig) -> dict[str, Any]:
    """Return every setting that changes what is learned, as plain JSON values by dotted path."""
    found = {
        path: value
        for field in dataclasses.fields(config)
        if field.name != "callbacks"
        for path, value in _leaves(getattr(config, field.name), field.name)
        if effect_of(path) is Effect.TRAINING
    }
    active = {
        path: value
        for name, callback in config.callbacks.items()
        if callback._target_ not in RECORDING_CALLBACKS  # Hydra's own spelling
        for path, value in _leaves(callback, f"callbacks.{name}")
    }
    if active or config.adapter.select is Selection.best:
        interval, most = config.trainer.val_check_interval, config.data.val_max_tokens
        found |= dict(zip(_WITH_SELECTION, (interval, most), strict=True))
    return found | active | dict(_of_kpi(config))


def _of_kpi(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield what the adapter's choice depends on where a KPI makes it."""
    if config.adapter.select is not Selection.best or config.adapter.metric == "val/loss":
        return
    yield "adapter.metric", config.adapter.metric
    for group in ("suite", "eval", "sandbox"):
        yield from _leaves(getattr(config, group), group)
    for name, callback in config.callbacks.items():
        if callback._target_ == f"{_OURS}scorecard.Scorecard":  # Hydra's own spelling
            yield from _leaves(callback, f"callbacks.{name}")


def recorded_settings(config: RunConfig) -> dict[str, Any]:
    """Return every setting that changes nothing learned, but what is done or left beside it."""
    found = {
        path: value
        for field in dataclasses.fields(config)
        if field.name != "callbacks"
        for path, value in _leaves(getattr(config, field.name), field.name)
        if effect_of(path) is Effect.NOTHING
    }
    named = config.callbacks.items()
    return found | {p: v for name, one in named for p, v in _leaves(one, f"callbacks.{name}")}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
