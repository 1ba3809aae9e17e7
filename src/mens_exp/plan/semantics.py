"""Which settings change what is learned: every leaf of every schema, once.

The contract's digest covers the settings of the first five parts and nothing else. A setting of a
class that is not ours (a user's own option) is unknown here, and counts as one that changes what is
learned: two runs are then told apart rather than taken for one.
"""

from __future__ import annotations

import dataclasses
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

from mens_exp.config.adapter import Selection

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
    **_all(
        Part.RECORD,
        "",
        "path prompt repo format out base meta base_shard verify replay resume deployment_target "
        "task.name",
    ),
    **_all(Part.RECORD, "checkpoint.", "every_n_steps keep"),
    **_all(Part.EXEC, "adapter.", "select"),
    **_all(Part.RECORD, "adapter.", "file"),
    **_all(Part.RECORD, "merge.", "mode dtype base untie any_base"),
    **_all(Part.RECORD, "chat.", "max_new_tokens temperature"),
    **_all(Part.RECORD, "push.", "private message"),
    **_all(Part.RECORD, "attribute.", "tokens position_bounds extra_bits targets_frac"),
    **_all(Part.RECORD, "inspect.", "replay_steps"),
    **_all(Part.RECORD, "parity.", "tokens text accept"),
    **_all(
        Part.RECORD,
        "parity.budget.",
        "mean_kl max_kl top1_agreement nll_difference hidden_error weight_error",
    ),
    **_all(Part.RECORD, "export.", "checkpoints allow_absolute_paths base_quant double_quant"),
    **_all(Part.RECORD, "gguf.", "dtype"),
    **_all(Part.RECORD, "serve.", "host port"),
    **_all(Part.RECORD, "ollama.", "form"),
    # The dimensions and the seed are the weights of a random model.
    **_all(
        Part.MODEL,
        "model.",
        "source hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads vocab_size max_position_embeddings init_seed family head_dim "
        "sliding_window tie_word_embeddings dtype sha256 id revision",
    ),
    # A bundled file is its hash, wherever it came from.
    **_all(Part.RECORD, "model.", "name distribution version file file_type license"),
    # A permission, and activations kept or computed again: the same numbers either way.
    **_all(Part.RECORD, "model.", "trust_remote_code gradient_checkpointing"),
    **_all(Part.DATA, "tokenizer.", "name chat_template allow_control_text"),
    # The shares decide which rows are left to train on.
    **_all(
        Part.DATA,
        "data.",
        "source path seq_len micro_batch_size packing val_frac heldout_frac truncation val_path "
        "format group_column id revision subset split val_split "
        "rows repair_frac generator_seed on_bad_row sources stop budget_tokens mix_seed "
        "streaming shuffle_buffer",
    ),
    **_all(
        Part.DATA,
        "data.columns.",
        "prompt input response messages conversations system rating category language group",
    ),
    **_all(
        Part.DATA,
        "data.filter.",
        "min_rating category exclude_category min_chars max_chars language",
    ),
    # It refuses a run, or changes nothing.
    **_all(Part.RECORD, "data.", "max_bad_frac"),
    **_all(Part.RECORD, "data.", "val_max_tokens show"),
    **_all(Part.QUANT, "quant.", "quant_type double_quant compute_dtype block_size skip"),
    # The codes are the same in a container of another type.
    **_all(Part.RECORD, "quant.", "storage_dtype"),
    **_all(
        Part.ADAPTER,
        "lora.",
        "targets r alpha dropout variant rank_pattern alpha_pattern init loftq_iters init_from",
    ),
    **_all(Part.RECORD, "lora.", "name"),
    **_all(Part.EXEC, "objective.", "_target_ name labels turns k"),
    # The same sum over the same tokens, so many at a time.
    **_all(Part.RECORD, "objective.", "chunk_tokens"),
    **_all(
        Part.ADAPTER,
        "backend.",
        "_target_ name composition max_layers lm_head_only require_full_stack train_base",
    ),
    **_all(Part.EXEC, "optim.", "_target_ lr betas eps weight_decay"),
    **_all(Part.RECORD, "optim.", "name"),
    **_all(Part.EXEC, "schedule.", "kind warmup_steps warmup_frac"),
    **_all(
        Part.EXEC,
        "trainer.",
        "max_steps max_epochs accumulate_grad_batches gradient_clip_val",
    ),
    # The device and its kernels round otherwise, and are provenance.
    **_all(Part.RECORD, "trainer.", "accelerator val_check_interval deterministic"),
    **_all(Part.RECORD, "logger.", "sink mode project entity group name tags flush_every_n_steps"),
    **_all(Part.RECORD, "suite.", "name items max_new_tokens batch_size"),
}

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
        "telemetry.TelemetryWriter",
        "throughput.Throughput",
    )
)
# Validation decides what is learned where it chooses the adapter or ends the run.
_WITH_SELECTION = ("trainer.val_check_interval", "data.val_max_tokens")
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
    active = {
        path: value
        for name, callback in config.callbacks.items()
        if callback._target_ not in RECORDING_CALLBACKS  # Hydra's own spelling
        for path, value in _leaves(callback, f"callbacks.{name}")
    }
    if active or config.adapter.select is Selection.best:
        interval, most = config.trainer.val_check_interval, config.data.val_max_tokens
        found |= dict(zip(_WITH_SELECTION, (interval, most), strict=True))
    return found | active


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
