"""The meaning of settings: every leaf of every schema once, and whether it changes learning.

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

__all__ = [
    "RECORDING_CALLBACKS",
    "SETTINGS",
    "Part",
    "learned_settings",
    "part_of",
    "recorded_settings",
]


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
        "path factors ledger open prompt repo format out base meta base_shard verify replay resume "
        "deployment_target task.name",
    ),
    **_all(Part.RECORD, "checkpoint.", "every_n_steps keep"),
    **_all(Part.EXEC, "adapter.", "select"),
    **_all(Part.RECORD, "adapter.", "file"),
    # It decides what is learned where the best adapter is chosen by it: `_of_kpi`.
    **_all(Part.RECORD, "adapter.", "metric"),
    **_all(Part.RECORD, "merge.", "mode dtype base untie any_base"),
    **_all(Part.RECORD, "chat.", "max_new_tokens temperature"),
    **_all(Part.RECORD, "push.", "private message"),
    **_all(Part.RECORD, "sync.", "project entity timeout_s"),
    **_all(Part.RECORD, "attribute.", "tokens position_bounds extra_bits targets_frac"),
    **_all(Part.RECORD, "inspect.", "replay_steps"),
    **_all(Part.RECORD, "promote.", "parity suite_digest seeds arms factor kpi direction margin"),
    **_all(Part.RECORD, "promote.", "alpha test condition target sequential"),
    **_all(
        Part.RECORD,
        "policy.",
        "name challenger incumbent min_cycles margin share_margin relative_margin floors "
        "ceilings parity backend spread arm tokens_per_s regression",
    ),
    **_all(
        Part.RECORD,
        "compare.",
        "primary reference condition alpha power test target sequential",
    ),
    **_all(Part.RECORD, "sweep.", "invalid retries resume changes"),
    **_all(Part.RECORD, "parity.", "tokens text accept"),
    # A corpus is made before a run, which knows its rows by their hash.
    **_all(Part.RECORD, "corpus.", "steps input output"),
    **_all(Part.RECORD, "corpus.extract.", "languages commit project"),
    **_all(Part.RECORD, "corpus.validate.", "on_bad_row compile"),
    **_all(Part.RECORD, "corpus.canonical.", "on_bad_row"),
    **_all(Part.RECORD, "corpus.generate.", "rows repair_frac seed"),
    **_all(
        Part.RECORD,
        "corpus.decontaminate.",
        "against ngram_words min_share_frac synthetic_items",
    ),
    **_all(Part.RECORD, "corpus.mix.", "by weights stop budget_tokens seed"),
    **_all(Part.RECORD, "corpus.split.", "by val_frac heldout_frac"),
    **_all(Part.RECORD, "corpus.curriculum.", "order"),
    **_all(
        Part.RECORD,
        "corpus.dedupe.",
        "by threshold shingle_tokens permutations processes",
    ),
    **_all(Part.RECORD, "corpus.report.", "token_rows duplicates processes"),
    **_all(
        Part.RECORD,
        "parity.budget.",
        "mean_kl max_kl top1_agreement nll_difference hidden_error weight_error",
    ),
    **_all(Part.RECORD, "export.", "checkpoints allow_absolute_paths base_quant double_quant"),
    **_all(Part.RECORD, "gguf.", "dtype"),
    **_all(Part.RECORD, "serve.", "host port token_env"),
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
    # It is the default of optim.lr, which counts.
    **_all(Part.RECORD, "model.", "default_lr"),
    # A permission, and activations kept or computed again: the same numbers either way.
    **_all(Part.RECORD, "model.", "trust_remote_code gradient_checkpointing"),
    **_all(Part.DATA, "tokenizer.", "name chat_template date allow_control_text"),
    # A permission.
    **_all(Part.RECORD, "tokenizer.", "allow_unrelated_rows"),
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
        "prompt input response messages conversations tools system rating category language group "
        "difficulty",
    ),
    **_all(
        Part.DATA,
        "data.filter.",
        "min_rating category exclude_category min_chars max_chars language",
    ),
    # They refuse a run, or change nothing.
    **_all(Part.RECORD, "data.", "max_bad_frac"),
    **_all(
        Part.RECORD,
        "data.contract.",
        "min_supervised_frac max_truncation_loss_frac max_nothing_frac allow_untrained_end "
        "max_overlap_frac max_repeated_answer_frac probe",
    ),
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
    # A step holds the same micro-batches however many processes take it.
    **_all(Part.RECORD, "trainer.", "strategy devices num_nodes device_gib class_gib"),
    **_all(
        Part.RECORD,
        "logger.",
        "sink mode project entity group name tags wait_s flush_every_n_steps",
    ),
    **_all(
        Part.RECORD,
        "suite.",
        "name items max_new_tokens batch_size repair_frac generator_seed path check function "
        "tasks num_fewshot chat_template metric clippy",
    ),
    # How answers are made and judged, once all is learned.
    **_all(
        Part.RECORD,
        "eval.",
        "engine base_url model api_key_env temperature top_p samples max_retries seed "
        "keep_passing keep_per_prompt",
    ),
    **_all(
        Part.RECORD,
        "sandbox.",
        "name memory_mib cpu_s wall_s output_kib file_mib workers processes",
    ),
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
        "scorecard.Scorecard",
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
    "sandbox": Part.RECORD,
    "policy": Part.RECORD,
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
        if part_of(path) is Part.RECORD
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
