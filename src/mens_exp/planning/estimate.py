"""Plan a run: its tokens, steps, time, memory and disk; torch-free, about a second at most.

Tokens are counted from a warm cache, or else estimated. Memory and time are estimated by formula,
and each figure states its basis. A figure that cannot be estimated is null, with the reason.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any

from mens_exp.config.data import StdlibData, SyntheticData
from mens_exp.config.model import HfModel, teacher_of
from mens_exp.config.objective_spec import shares_prompts
from mens_exp.config.schedule import warmup_steps
from mens_exp.corpus import stdlib, synthetic
from mens_exp.corpus.mix import CHARS_PER_TOKEN, estimated_tokens
from mens_exp.corpus.source import cache_key, labelling_of, load_rows
from mens_exp.corpus.split import Side, asked
from mens_exp.errors import MensError, ModelFileError
from mens_exp.layout import hub
from mens_exp.layout.model_cache import ready_directory
from mens_exp.layout.shape import shape_of
from mens_exp.planning import kernels, machine, messages, throughput_model
from mens_exp.planning.activations import proxy_stack
from mens_exp.planning.checks.machine import findings, rate_warnings
from mens_exp.planning.checks.model import codes_warnings, date_in_prompts, expert_warnings
from mens_exp.planning.contract import contract_of
from mens_exp.planning.forecast import (
    device_of_plan,
    disk,
    documents_of,
    forecast,
    shared,
    tokens_per_step,
    trained_tokens,
)
from mens_exp.planning.memory import (
    compares,
    described_modules,
    frozen_linears,
    trained_parameters,
)
from mens_exp.planning.planner import environment_of, execution_plan, readers_of_names
from mens_exp.rows.cache import peek
from mens_exp.rows.documents import share_prompts
from mens_exp.rows.encode import encode
from mens_exp.rows.packing import count_blocks
from mens_exp.rows.schema import REJECTED
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mens_exp.config.model import ModelConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.row_files import Rows
    from mens_exp.layout.families import Family
    from mens_exp.layout.shape import Shape
    from mens_exp.planning.forecast import Disk, Forecast
    from mens_exp.rows.cache import CacheKey, TokenCounts
    from mens_exp.rows.documents import Encoded
    from mens_exp.rows.schema import TrainingPair

# measured: the length-weighted mean of the stdlib rows is 218, 328, 425 and 452 tokens if documents
# are truncated at 256, 512, 1,024 and 2,048.
_STDLIB_TYPICAL, _STDLIB_SCALE = 470, 430
_TEMPLATE_TOKENS = 40  # tokens that a chat template adds to each exchange
# measured: 4,000 generated rows of each kind, in characters of prompt and response. With SmolLM2's
# tokenizer the longest has 476 tokens without the template's, and the token-weighted mean length
# of a row is 1.1 times the plain mean.
_WRITING_CHARS, _REPAIR_CHARS = 515, 845
_GENERATED_LONGEST, _GENERATED_SPREAD = 520, 1.1
_STDLIB_SHARE = 0.33  # measured: characters of rows per byte of source read


def count_tokens(config: RunConfig, cache: Path) -> dict[str, Any]:
    """Count tokens exactly from a warm cache, or else estimate them.

    Estimates use characters, some encoded rows if the tokenizer is available, or file sizes. The
    virtual tokens of an adapter are included.
    """
    data, virtual = config.data, config.lora.spec.virtual_tokens(config.lora)
    is_whole = not asked(data.filter)
    if is_whole and isinstance(data, StdlibData) and not stdlib.is_cached(cache):
        return _of_library(data, virtual)
    if is_whole and isinstance(data, SyntheticData) and not synthetic.is_cached(data, cache):
        return _of_generator(data, virtual)
    rows = load_rows(config.data, cache, keep=True)
    if rows.streamed:
        return _of_stream(config, rows, cache)
    about = {**rows.record(), **_lopsided(config, rows), **_shared(config, rows, cache)}
    exact = _cached_counts(config, rows, cache)
    if exact is not None:
        basis = "counted, from the cache"
        return {"source": rows.source, **about, **exact, "exact": True, "basis": basis}
    scale, basis = _sampled(config, rows, cache)
    train = _document_tokens(rows, Side.TRAIN, config, scale)
    return {
        "source": rows.source,
        **about,
        "train_rows": len(rows.train),
        "train_tokens": round(sum(train)),
        "val_tokens": round(sum(_document_tokens(rows, Side.VAL, config, scale))),
        **_lengths(train),
        "exact": False,
        "basis": basis,
    }


def _of_library(data: StdlibData, virtual: int) -> dict[str, Any]:
    train = 1 - data.val_frac - data.heldout_frac
    own = _STDLIB_TYPICAL * (1 - math.exp(-(data.seq_len - virtual) / _STDLIB_SCALE))
    typical = own + virtual
    characters = stdlib.source_bytes() * _STDLIB_SHARE * typical / own
    return {
        "source": data.source,
        "train_rows": None,
        "train_tokens": round(characters * train / CHARS_PER_TOKEN),
        "val_tokens": round(characters * data.val_frac / CHARS_PER_TOKEN),
        "longest_tokens": data.seq_len,
        "typical_tokens": round(typical),
        "exact": False,
        "basis": "estimated from file sizes; nothing is cached yet",
    }


def _of_generator(data: SyntheticData, virtual: int) -> dict[str, Any]:
    rows = synthetic.counts(data)
    characters = _WRITING_CHARS + data.repair_frac * (_REPAIR_CHARS - _WRITING_CHARS)
    tokens = min(characters / CHARS_PER_TOKEN + _TEMPLATE_TOKENS + virtual, data.seq_len)
    return {
        "source": data.source,
        "train_rows": rows[Side.TRAIN],
        "train_tokens": round(rows[Side.TRAIN] * tokens),
        "val_tokens": round(rows[Side.VAL] * tokens),
        "longest_tokens": min(_GENERATED_LONGEST + virtual, data.seq_len),
        "typical_tokens": round(min(_GENERATED_SPREAD * tokens, data.seq_len)),
        "exact": False,
        "basis": "rows as asked for, tokens estimated; nothing is generated yet",
    }


def _of_stream(config: RunConfig, rows: Rows, cache: Path) -> dict[str, Any]:
    """Estimate from the first rows, scaled by the fraction of the files that they make up."""
    per_estimate, _ = _sampled(config, rows, cache)
    about = rows.record()
    files, read = about["streaming"].get("file_bytes", {}), about["streaming"]["first_rows"]
    scale, basis = 1.0, f"of the first {read['rows']} rows, estimated; the others are not read"
    if files and read["bytes"] and all(name.endswith(".jsonl") for name in files):
        scale = max(sum(files.values()) / read["bytes"], 1.0)
        basis = f"estimated from the first {read['rows']} rows and the sizes of the files"
    train = _document_tokens(rows, Side.TRAIN, config, per_estimate)
    return {
        "source": rows.source,
        **about,
        **_shared(config, rows, cache),
        "train_rows": round(len(rows.train) * scale),
        "heldout_rows": len(rows.heldout),  # not scaled: like validation, from the first rows only
        "train_tokens": round(round(sum(train)) * scale),
        "val_tokens": round(sum(_document_tokens(rows, Side.VAL, config, per_estimate))),
        **_lengths(train),
        "exact": False,
        "basis": basis,
    }


def _cached_counts(config: RunConfig, rows: Rows, cache: Path) -> dict[str, Any] | None:
    directory = ready_directory(config.model, cache)
    if directory is None:
        return None
    try:
        tokenizer = load_tokenizer(config.tokenizer, directory)
    except ModelFileError:
        if isinstance(config.model, HfModel):
            raise
        return None  # the run recreates damaged files of the cache
    key, val_key = (cache_key(config, rows, side, tokenizer) for side in (Side.TRAIN, Side.VAL))
    train, val = peek(cache, key), peek(cache, val_key)
    if train is None or val is None:
        return None
    rows_read = train.documents // key.labelling.rows.together
    blocks: int | None = None if config.data.packing else rows_read
    if config.data.packing and not shares_prompts(config.objective):
        blocks = count_blocks(cache, key, train)
    virtual = key.labelling.virtual_tokens
    tokens = train.tokens + virtual * train.documents
    squares = train.squares + virtual * (train.tokens + tokens)  # of lengths with virtual tokens
    return {
        "train_rows": rows_read,
        "train_blocks": blocks,
        "train_tokens": tokens,
        "val_tokens": val.tokens + virtual * val.documents,
        "longest_tokens": train.longest + virtual,
        "typical_tokens": round(squares / max(tokens, 1)),
        **_contract(config, cache, key, train),
    }


def _contract(config: RunConfig, cache: Path, key: CacheKey, counts: TokenCounts) -> dict[str, Any]:
    """Return the token part of the data contract, if an earlier run has created it."""
    from mens_exp.corpus import contract_rules, data_contract  # unused by a cold plan

    known = data_contract.known_token_part(cache, key, counts)
    if known is None:
        return {}
    refusals = contract_rules.of_tokens(known.tokens, config.data.contract, key.labelling)
    return {
        "contract": {
            "tokens": known.tokens,
            "unknown": known.unknown,
            "refusals": [str(error) for error in refusals],
        }
    }


def _document_tokens(rows: Rows, side: Side, config: RunConfig, scale: float) -> array[float]:
    """Estimate the document lengths of a side; for rows on disk this reads them."""
    pairs, limit = getattr(rows, side.value), config.data.seq_len
    virtual = config.lora.spec.virtual_tokens(config.lora)
    return array("d", (min(estimated_tokens(one) * scale + virtual, limit) for one in pairs))


_SAMPLED_ROWS = 32  # encoded by a plan; takes hundredths of a second (a rough choice)


def _sampled(config: RunConfig, rows: Rows, cache: Path) -> tuple[float, str]:
    """Encode some rows; return tokens per token estimated from characters, and the basis."""
    some = _some(rows)
    documents = _encoded(config, some, cache)
    if documents is None:
        return 1.0, "estimated from the rows' characters; not encoded yet"
    tokens, about = int(documents.lengths.sum()), sum(map(estimated_tokens, some))
    return tokens / about, f"estimated from {len(some)} encoded rows; the others not encoded yet"


def _some(rows: Rows) -> list[TrainingPair]:
    step = max(-(-len(rows.train) // _SAMPLED_ROWS), 1)
    return [rows.train[row] for row in range(0, len(rows.train), step)]


def _encoded(config: RunConfig, some: list[TrainingPair], cache: Path) -> Encoded | None:
    """Encode rows without truncation; None without a tokenizer, or if encoding fails."""
    directory = ready_directory(config.model, cache)
    if directory is None or not some:
        return None
    try:
        tokenizer = load_tokenizer(config.tokenizer, directory)
        endless = dataclasses.replace(labelling_of(config), seq_len=_ENDLESS)
        return encode(some, tokenizer, endless)
    except MensError:  # the run reports it
        return None


def _shared(config: RunConfig, rows: Rows, cache: Path) -> dict[str, float]:
    """Estimate the share of tokens saved because the answers of a pair share one prompt."""
    if not shares_prompts(config.objective):
        return {}
    some = _some(rows)
    documents = _encoded(config, some, cache)
    if documents is not None:
        found = share_prompts(documents)
        return {"shared_frac": round(1 - float(found.room.sum() / found.units.sum()), 4)}
    prompts = sum(len("".join(chain(*pair.exchanges))) - len(pair.response) for pair in some)
    rejected = [str(dict(pair.fields).get(REJECTED, "")) for pair in some]
    answers = sum(map(len, (*rejected, *(pair.response for pair in some))))
    return {"shared_frac": round(prompts / max(2 * prompts + answers, 1), 4)}


_ENDLESS = 2**31  # tokens; no document is truncated


def _lengths(documents: Sequence[float]) -> dict[str, int]:
    """Return the longest document, and the token-weighted mean document length."""
    squares = sum(length**2 for length in documents)
    return {
        "longest_tokens": round(max(documents, default=0.0)),
        "typical_tokens": round(squares / max(sum(documents), 1.0)),
    }


def steps_of(config: RunConfig, blocks: int | None) -> int | None:
    """Return optimizer steps, or None if only max_epochs limits them and blocks are unknown."""
    trainer = config.trainer
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs > 0 and blocks is not None:
        per_step = config.data.micro_batch_size * trainer.accumulate_grad_batches
        limits.append(-(-trainer.max_epochs * blocks // per_step))
    return min(limits, default=None)


def bound_of(config: RunConfig, blocks: int | None) -> str | None:
    """Return the setting that ends the run; None if two are set and blocks are unknown."""
    trainer = config.trainer
    if trainer.max_epochs <= 0 or trainer.max_steps <= 0:
        return "trainer.max_steps" if trainer.max_steps > 0 else "trainer.max_epochs"
    if blocks is None:
        return None
    by_steps = steps_of(config, blocks) == trainer.max_steps
    return "trainer.max_steps" if by_steps else "trainer.max_epochs"


def epochs_of(config: RunConfig, blocks: int | None, steps: int | None) -> float | None:
    """Return the number of passes over the training data in ``steps``; None if unknown."""
    if not blocks or steps is None:
        return None
    per_step = config.data.micro_batch_size * config.trainer.accumulate_grad_batches
    passes = steps * per_step / blocks
    whole = config.trainer.max_epochs
    return round(min(passes, whole) if whole > 0 else passes, 4)


def make_plan(config: RunConfig, cache: Path) -> dict[str, Any]:
    """Plan a run from its configuration and the current contents of the caches."""
    shape = shape_of(config.model)
    data = count_tokens(config, cache)
    effective = config.data.micro_batch_size * config.trainer.accumulate_grad_batches
    per_step = tokens_per_step(config)
    blocks = _blocks(config, data)
    steps = steps_of(config, blocks)
    total = trained_tokens(config, data, steps)
    room = None if steps is None else steps * per_step
    device = device_of_plan(config)
    documents = documents_of(config, data)
    expected = forecast(config, shape, documents, device, cache)
    written = disk(config, shape, cache, steps)
    errors, warnings = findings(config, device, expected.memory, written, cache)
    stack = proxy_stack(config, shape)
    return {
        "format": "mens_exp_plan",
        "version": 1,
        **_meaning(config, shape),
        "layers": shape.num_hidden_layers,
        "parameters": shape.parameters,
        "trainable_parameters": trained_parameters(config, shape),
        "data": data,
        "effective_batch": effective,
        "tokens_per_step": per_step,
        "steps": steps,
        "epochs": epochs_of(config, blocks, steps),
        "bound": bound_of(config, blocks),
        "warmup_steps": None if steps is None else warmup_steps(config.schedule, steps),
        "checkpoints": written.checkpoints_saved,
        "tokens_total": total,
        "time_s": _time(config, expected, device, room, data, per_step)
        | {
            "quantization": throughput_model.quantization_s(shape, device.kind, config.quant.spec),
            "comparison": throughput_model.comparison_s(shape, device.kind)
            if compares(config)
            else None,
            **_reference(config, shape, expected, device, data, total),
        },
        "memory_bytes": _memory(expected, device),
        "processes": shared(config, shape, documents, expected.memory, device),
        "disk_bytes": _disk(written, cache),
        "device": {"kind": device.kind, "name": device.name},
        "kernels": kernels.described(kernels.reasons(config, on_gpu=device.kind == "cuda")),
        "problems": [*map(str, errors), *(data.get("contract") or {}).get("refusals", ())],
        "comparison": messages.COMPARISON,
        "warnings": [
            *(stack.warnings if stack else ()),
            *expert_warnings(config, shape),
            *codes_warnings(config, shape),
            *rate_warnings(config, shape),
            *_heldout_warnings(config, data),
            *_split_warnings(data),
            *warnings,
        ],
        "measured": None,
    }


_LOPSIDED = 0.15  # fraction of the rows by which a split may miss its target (a rough choice)


def _lopsided(config: RunConfig, rows: Rows) -> dict[str, Any]:
    """Return the row counts of a split that leaves far fewer training rows than requested."""
    own_val = getattr(config.data, "val_path", None) is not None or config.data.validates_apart
    left = 1 - config.data.heldout_frac - (0 if own_val else config.data.val_frac)
    others = len(rows.heldout) + (0 if own_val else len(rows.val))
    total = len(rows.train) + others
    if not total or len(rows.train) / total >= left - _LOPSIDED:
        return {}
    return {"lopsided": {"rows": total, "train_rows": len(rows.train), "expected_frac": left}}


def _split_warnings(data: dict[str, Any]) -> Iterator[str]:
    """Yield a warning if a split misses its fractions because few prompts are distinct."""
    if split := data.get("lopsided"):
        yield (
            f"{split['train_rows']} of {split['rows']} rows are trained on, and not "
            f"{split['expected_frac']:.0%}: rows with the same prompt, or of one group, stay on "
            "one side of the split, and few are different. Next: give more prompts, or name the "
            "rows to validate on with data.val_path"
        )


def _heldout_warnings(config: RunConfig, data: dict[str, Any]) -> Iterator[str]:
    """Yield a warning if streaming leaves no held-out rows for the suite."""
    if config.suite.spec.from_rows and data.get("heldout_rows") == 0:
        streamed = data["streaming"]
        yield (
            f"no row is held out of the first {streamed['first_rows']['rows']}, so "
            f"suite={config.suite.name} has nothing to ask, and the run gets no scorecard. "
            f"Next: raise data.heldout_frac or data.shuffle_buffer "
            f"({streamed['shuffle_buffer']}), or choose suite=none"
        )


def _reference(
    config: RunConfig,
    shape: Shape,
    expected: Forecast,
    device: machine.Machine,
    data: dict[str, Any],
    total: int | None,
) -> dict[str, Any]:
    """Return the seconds of the reference passes before training, if there are any.

    A pass covers each validation document and each training document that the run will read.
    """
    passes = config.objective.spec.passes_before(config.objective)
    if not passes:
        return {}
    once = 1 - data.get("shared_frac", 0.0)
    train = once * data["train_tokens"]
    train = train if total is None else min(total, train)
    tokens = round(passes * (train + once * min(config.data.val_max_tokens, data["val_tokens"])))
    pace = expected.pace.of_several(config.trainer.world_size, device.kind)
    teacher = teacher_of(config.objective, config.model)
    if teacher is None:
        linears = frozen_linears(config, shape)
        return {"reference": throughput_model.reference_s(pace, shape, tokens, linears)}
    return {"reference": throughput_model.reference_s(pace, shape_of(teacher), tokens)}


def _meaning(config: RunConfig, shape: Shape) -> dict[str, Any]:
    """Describe the meaning of the command: the options of its groups and its execution plan."""
    made = execution_plan(contract_of(config), environment_of(config)).record()
    quant = config.quant
    named = [f"{one.value} in {name}" for name, one in quant.type_pattern.items()]
    named += [f"blocks of {one} in {name}" for name, one in quant.block_size_pattern.items()]
    named += [
        f"{'double' if one else 'no double'} quantization in {name}"
        for name, one in quant.double_quant_pattern.items()
    ]
    others = ", ".join(named)
    return {
        "model": _name(config.model),
        "download_bytes": _download(config.model),
        "backend": config.backend.name,
        "quant": f"{quant.quant_type.value}"
        f"{f', {len(quant.levels)} levels' if quant.levels else ''}"
        f"{', double quantization' if quant.double_quant else ''}"
        f"{f', blocks of {quant.block}' if quant.block_size else ''}"
        f"{f', {others}' if others else ''}"
        f"{f', without {chr(44).join(quant.skip)}' if quant.skip else ''}"
        f", {quant.compute_dtype.value} compute",
        "lora": _lora(config),
        "lora_modules": described_modules(config, shape),
        "objective": config.objective.name,
        "tokenizer": config.tokenizer.name,
        "chat_template_date": date_in_prompts(config),
        "deployment_target": config.deployment_target.value,
        "layout": _layout(shape.family),
        **made,
    }


def _layout(family: Family) -> dict[str, Any]:
    """Describe whether weight names are verified, and the settings refused if they are not."""
    return {
        "model_type": family.model_type,
        "verified": family.verified,
        "refused": [] if family.verified else list(readers_of_names()),
    }


def _time(
    config: RunConfig,
    expected: Forecast,
    device: machine.Machine,
    room: int | None,
    data: dict[str, Any],
    per_step: int,
) -> dict[str, Any]:
    validated = 2 * min(config.data.val_max_tokens, data["val_tokens"])
    several = expected.pace.of_several(config.trainer.world_size, device.kind)
    made = throughput_model.time(several, expected.per_token, room, validated, per_step)
    return made | {"flop_per_step": per_step * expected.per_token}


def _memory(expected: Forecast, device: machine.Machine) -> dict[str, Any]:
    return expected.memory.record() | {
        "formula": expected.formula,
        "runs": list(expected.runs),
        "free": device.free_bytes,
    }


def _disk(written: Disk, cache: Path) -> dict[str, Any]:
    return written.record() | {"free": machine.space(cache)[1]}


def _lora(config: RunConfig) -> str:
    """Describe the adapter in one line; default values are omitted."""
    if config.backend.name == "full":
        return "none"
    lora = config.lora
    start = [f"starts from {lora.init.value}"] if not lora.init.spec.is_drawn else []
    targets = ["+".join(lora.targets)] if lora.targets else []
    return ", ".join([*targets, *lora.spec.described(lora), *start])


def _blocks(config: RunConfig, data: dict[str, Any]) -> int | None:
    """Count training sequences; if not counted yet, the rows, or the fewest that packing allows."""
    blocks: int | None = data.get("train_blocks")
    if blocks is None and config.data.packing:
        tokens = round((1 - data.get("shared_frac", 0.0)) * data["train_tokens"])
        return int(-(-tokens // config.data.seq_len))
    rows: int | None = data["train_rows"]
    return rows if blocks is None else blocks


def _name(model: ModelConfig) -> str:
    """Name the trained model; for a Hub model, with its commit."""
    if not isinstance(model, HfModel) or hub.local(model.id) is not None:
        return model.name
    if not hub.describe(model).shards:
        return f"{model.id}, by the dimensions that mens_exp ships: the hub did not answer"
    return f"{model.id} at {hub.commit_of(model.id, model.revision)}"


def _download(model: ModelConfig) -> int:
    """Count the bytes of weights that must first be downloaded from the Hub."""
    if not isinstance(model, HfModel) or not hub.describe(model).shards:
        return 0
    return hub.bytes_to_download(model)
