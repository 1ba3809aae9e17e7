"""The settings that change what a run learns, and those that do not, as plain values.

The contract digests the first; records of earlier releases keep their digests.
"""

from __future__ import annotations

import dataclasses
import functools
from enum import Enum
from typing import TYPE_CHECKING, Any

from mens_exp.config.compose import compose, typed
from mens_exp.config.fields import UNSET, Effect
from mens_exp.config.quant import PATTERNS
from mens_exp.config.schemas import effect_of
from mens_exp.config.trainer import TUNING, Selection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.root import RunConfig

_OURS = "mens_exp.training.callbacks."


# Callbacks that only observe, save or stop a failing run; any other is part of the contract.
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


# Validation affects what is learned if it selects the adapter or ends the run.
_WITH_SELECTION = ("trainer.val_check_interval", "data.val_max_tokens")


# Settings that earlier releases lack, with the values equivalent to their behaviour. A setting with
# that value is omitted, so that stored configurations keep their digests.
_LATER: dict[str, Any] = {
    "module._target_": TUNING,
    "lora.target_r": 8,
    "lora.orthogonality": 0.5,
    "lora.allocate_after_steps": 0,
    "lora.allocate_every_n_steps": 1,
    "lora.settle_steps": 0,
    "eval.keep_failing": False,
    "optim.loraplus_lr_ratio": None,
    "quant.type_pattern": {},
    "quant.block_size_pattern": {},
    "quant.double_quant_pattern": {},
    "quant.levels": [],
    "model.fp8": False,
    "objective.dft": False,
    "objective.hidden_layers": None,
    "objective.hidden_weight": 0.0,
    "objective.label_smoothing": 0.0,
    "objective.loss_type": "grpo",
    "objective.max_completion_tokens": 256,
    "objective.neftune_alpha": 0.0,
    "objective.share_prompt": False,
    "objective.top_k": None,
    "objective.weight_field": None,
    "objective.z_loss": 0.0,
    **dict.fromkeys(
        f"trainer.{name}"
        for name in (
            *("benchmark", "gradient_clip_algorithm", "limit_val_batches", "max_time"),
            *("min_steps", "plugins", "precision", "sync_batchnorm"),
        )
    ),
}


# The last matching pattern wins, but records sort their keys, so any other order is stored as a
# list.
_ORDERED = frozenset(
    {
        *(f"quant.{name}" for name in PATTERNS),
        *("lora.rank_pattern", "lora.alpha_pattern"),
    }
)


def learned_settings(config: RunConfig) -> dict[str, Any]:
    """Return every setting that changes what is learned, as plain JSON values by dotted path."""
    found = {
        path: value
        for field in dataclasses.fields(config)
        if field.name != "callbacks"
        for path, value in _leaves(getattr(config, field.name), field.name)
        if effect_of(path) is Effect.TRAINING and value != _LATER.get(path, UNSET)
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
    """Yield the settings that determine the selected adapter, if a KPI selects it."""
    if config.adapter.select is not Selection.best or config.adapter.metric == "val/loss":
        return
    yield "adapter.metric", config.adapter.metric
    for group in ("suite", "eval", "sandbox"):
        for path, value in _leaves(getattr(config, group), group):
            if value != _LATER.get(path, UNSET):
                yield path, value
    for name, callback in config.callbacks.items():
        if callback._target_ == f"{_OURS}scorecard.Scorecard":  # Hydra's own spelling
            yield from _leaves(callback, f"callbacks.{name}")


def recorded_settings(config: RunConfig) -> dict[str, Any]:
    """Return every setting that affects only actions or records, not what is learned."""
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
    elif isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())):
        for name, entry in value.items():  # several loggers
            yield from _leaves(entry, f"{path}.{name}")
    elif path in _ORDERED and [*value] != sorted(value):
        yield path, [{name: _plain(entry)} for name, entry in value.items()]
    else:
        yield path, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


# Overrides of these cannot change anything that is learned.
_APART = ("task=", "hydra.", "path=", "out=")


def non_default_settings(
    config: RunConfig, overrides: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """Return the learning-relevant settings that differ from the defaults, by dotted path.

    Args:
        config: the run.
        overrides: its overrides, as typed, or None if unknown. If none of them can change a
            setting, the defaults are not composed, which would take a third of a second.

    Returns:
        ``found``, and ``default`` if the setting exists there, for each.
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
