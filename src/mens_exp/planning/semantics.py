"""Meaning of settings: every leaf of every schema once, and whether it changes learning.

The contract's digest covers the settings of the first five parts and nothing else. A setting of a
class that is not ours (a user's own option) is unknown here, and counts as one that changes what is
learned: two runs are then kept apart rather than taken for one.
"""

from __future__ import annotations

import dataclasses
import functools
from enum import Enum
from typing import TYPE_CHECKING, Any

from mens_exp.config.compose import compose, typed
from mens_exp.config.fields import Effect
from mens_exp.config.loader import effect_of
from mens_exp.config.trainer import Selection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.root import RunConfig

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


# What an override of these leaves as it was: everything that is learned.
_APART = ("task=", "hydra.", "path=", "out=")


def non_default_settings(
    config: RunConfig, overrides: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """Return the settings that change what is learned and are not our defaults, by dotted path.

    Args:
        config: the run.
        overrides: what made it, as typed, or None where that is not known. Without any that could
            change a setting the defaults are not composed, which takes a third of a second.

    Returns:
        ``found``, and ``default`` where the setting exists there, for each.
    """
    if overrides is not None and all(text.lstrip("+").startswith(_APART) for text in overrides):
        return {}
    usual = _usual()
    return {
        path: ({"default": usual[path]} if path in usual else {}) | {"found": found}
        for path, found in sorted(learned_settings(config).items())
        if path not in usual or usual[path] != found
    }


@functools.cache
def _usual() -> dict[str, Any]:
    return learned_settings(typed(compose([[]])[0].values))
