"""Which settings change what is learned: every leaf of every schema, once.

The contract's digest covers the settings of the first five parts and nothing else. A setting of a
class that is not ours (a user's own option) is unknown here, and counts as one that changes what is
learned: two runs are then told apart rather than taken for one.
"""

from __future__ import annotations

import dataclasses
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["RECORDING_CALLBACKS", "SETTINGS", "Part", "learned_settings", "part_of"]


class Part(StrEnum):
    """The part of the contract that a setting belongs to."""

    MODEL = "model"
    DATA = "data"
    ADAPTER = "adapter"
    QUANT = "quant"
    EXEC = "exec"
    RECORD = "record"
    """Where, how fast, how often or under what name: nothing that is learned."""


def _all(part: Part, group: str, fields: str) -> dict[str, Part]:
    return {f"{group}{field}": part for field in fields.split()}


# One line for each reason; a test compares the keys with the schemas.
SETTINGS: dict[str, Part] = {
    **_all(Part.EXEC, "", "seed"),
    **_all(Part.RECORD, "", "path resume deployment_target task.name"),
    # The dimensions and the seed are the weights of a random model.
    **_all(
        Part.MODEL,
        "model.",
        "source hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads vocab_size max_position_embeddings init_seed sha256 id",
    ),
    # A bundled file is its hash, wherever it came from.
    **_all(Part.RECORD, "model.", "name distribution version file file_type license"),
    **_all(Part.DATA, "tokenizer.", "name"),
    # The shares decide which rows are left to train on.
    **_all(
        Part.DATA,
        "data.",
        "source path seq_len micro_batch_size packing val_frac heldout_frac",
    ),
    **_all(Part.RECORD, "data.", "val_max_tokens"),
    **_all(Part.QUANT, "quant.", "quant_type double_quant compute_dtype"),
    **_all(Part.ADAPTER, "lora.", "targets r alpha dropout"),
    **_all(Part.RECORD, "lora.", "name"),
    **_all(Part.EXEC, "objective.", "_target_ name"),
    # The same sum over the same tokens, so many at a time.
    **_all(Part.RECORD, "objective.", "chunk_tokens"),
    **_all(Part.ADAPTER, "backend.", "_target_ name"),
    **_all(Part.EXEC, "optim.", "_target_ lr betas eps weight_decay"),
    **_all(Part.EXEC, "schedule.", "kind warmup_steps"),
    **_all(
        Part.EXEC,
        "trainer.",
        "max_steps max_epochs accumulate_grad_batches gradient_clip_val",
    ),
    # The device and its kernels round otherwise, and are provenance.
    **_all(Part.RECORD, "trainer.", "accelerator val_check_interval deterministic"),
    **_all(Part.RECORD, "logger.", "sink mode project entity group name tags"),
    **_all(Part.RECORD, "suite.", "name items max_new_tokens batch_size"),
}

_OURS = "mens_exp.training.callbacks."
# Callbacks that only look, save or stop what cannot go on; any other is part of the contract.
RECORDING_CALLBACKS = frozenset(
    _OURS + name
    for name in (
        "adapter_writer.AdapterWriter",
        "checkpoint.Checkpoint",
        "facts.ManifestFacts",
        "finite_guard.FiniteGuard",
        "memory.MemoryWatch",
        "progress.Progress",
        "telemetry.TelemetryWriter",
        "throughput.Throughput",
    )
)
_OF_GROUP = {
    "model": Part.MODEL,
    "tokenizer": Part.DATA,
    "data": Part.DATA,
    "quant": Part.QUANT,
    "lora": Part.ADAPTER,
    "backend": Part.ADAPTER,
    "logger": Part.RECORD,
    "suite": Part.RECORD,
}


def part_of(path: str) -> Part:
    """Return the part of a setting by its dotted path; a callback's depends on its class."""
    return SETTINGS.get(path) or _OF_GROUP.get(path.partition(".")[0], Part.EXEC)


def learned_settings(config: RunConfig) -> dict[str, Any]:
    """Return every setting that changes what is learned, as plain JSON values by dotted path."""
    found = {
        path: value
        for field in dataclasses.fields(config)
        if field.name != "callbacks"
        for path, value in _leaves(getattr(config, field.name), field.name)
        if part_of(path) is not Part.RECORD
    }
    for name, callback in config.callbacks.items():
        if getattr(callback, "_target_", None) not in RECORDING_CALLBACKS:
            found |= dict(_leaves(callback, f"callbacks.{name}"))
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from _leaves(entry, f"{path}.{name}")
    else:
        yield path, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
