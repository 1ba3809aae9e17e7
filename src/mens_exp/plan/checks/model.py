"""The files and limits of the base model."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.model import BundledModel, HfModel, RandomModel, WeightsDtype
from mens_exp.config.rules.model import BLOCK_SIZE
from mens_exp.config.validate import range_problems
from mens_exp.errors import ConfigError, ModelFileError, SetupError
from mens_exp.layout import hub
from mens_exp.layout.bundled import locate
from mens_exp.layout.cached import ready
from mens_exp.layout.shape import Shape, check_weights, shape_of
from mens_exp.rows.cache import cache_root
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError
    from mens_exp.layout.directory import ModelDirectory

__all__ = ["check"]

_FLOATS = frozenset({"BF16", "F16", "F32"})


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what is wrong with the files and limits of the base model."""
    model = config.model
    if isinstance(model, BundledModel):
        locate(model)
    if any(range_problems(model)):
        return  # told already, and nothing can be computed from such dimensions
    shape = shape_of(model)
    if config.data.seq_len > shape.max_position_embeddings:
        yield ConfigError(
            "longer than the model's positions reach",
            where="data.seq_len",
            found=config.data.seq_len,
            expected=f"at most {shape.max_position_embeddings} for {model.name}",
        )
    if isinstance(model, RandomModel) and ready(model, cache_root()) is None:
        yield from _room(model, shape)
    if isinstance(model, HfModel):
        directory = hub.describe(model)
        if not directory.shards:  # its dimensions alone are known, which is enough for a plan
            if config.task.name != "plan":
                hub.pinned(model)  # says what keeps it away
            return
        yield from _without_effect(model)
        yield from _quantized(directory)
        yield from _remote_code(model, directory.config)
        if config.quant.is_four_bit:
            yield from _widths(directory.path, shape)
        yield from _vocabulary(config, directory.path, shape)
        if not isinstance(config.backend, ProxyConfig):  # which reads the attention's outputs only
            check_weights(directory)


def _without_effect(model: HfModel) -> Iterator[MensError]:
    if model.revision is not None and hub.local(model.id) is not None:
        yield ConfigError(
            "has no effect on a directory",
            where="model.revision",
            found=model.revision,
            expected=f"null, because model.id is the directory {model.id}",
        )


def _quantized(directory: ModelDirectory) -> Iterator[MensError]:
    """Refuse weights that somebody has quantized: they would be rounded twice, or misread."""
    method = (directory.config.get("quantization_config") or {}).get("quant_method")
    weights = (info for name, info in directory.tensors.items() if name.endswith("weight"))
    formats = {info.dtype for info in weights} - _FLOATS
    if method is not None or formats:
        yield ModelFileError(
            "the weights are quantized already",
            where=str(directory.path),
            found=str(method or ", ".join(sorted(formats))),
            expected=f"weights in {', '.join(sorted(_FLOATS))}",
            remedy="take the model that these weights were made from",
        )


def _room(model: RandomModel, shape: Shape) -> Iterator[MensError]:
    """Refuse random weights that the cache's disk cannot hold."""
    width = {WeightsDtype.f32: 4, WeightsDtype.bf16: 2}[model.dtype]
    needed = (shape.linear_parameters + shape.embedding_parameters) * width
    free = shutil.disk_usage(cache_root()).free
    if needed > free:
        yield SetupError(
            "the disk has no room for the random weights",
            where="MENS_EXP_CACHE",
            found=f"{free:,} bytes free in {cache_root()}",
            expected=f"{needed:,} bytes",
            remedy="free space, set MENS_EXP_CACHE to another disk, or set model.dtype=bf16",
        )


def _remote_code(model: HfModel, config: dict[str, Any]) -> Iterator[MensError]:
    """Refuse a permission that is not needed, and code that no commit pins."""
    if not model.trust_remote_code:
        return
    code = (config.get("auto_map") or {}).get("AutoModelForCausalLM")
    if code is None:
        yield ConfigError(
            "has no effect: the model brings no code of its own",
            where="model.trust_remote_code",
            found=True,
            expected="false",
        )
    elif "--" in str(code):
        yield ModelFileError(
            "the model's code is in another repository, which no revision pins",
            where=f"model.id={model.id}: auto_map",
            found=str(code),
            expected="code beside the weights",
            remedy="download both into a directory and give that as model.id",
        )


def _widths(directory: Path, shape: Shape) -> Iterator[MensError]:
    """Refuse widths that 4-bit blocks do not divide, which bitsandbytes gets wrong in silence."""
    for name, (_, width) in shape.projections().items():
        if width % BLOCK_SIZE:
            yield ModelFileError(
                "4-bit blocks would straddle the rows of a projection",
                where=f"{directory}: {name}",
                found=f"width {width}",
                expected=f"a multiple of {BLOCK_SIZE}",
            )


def _vocabulary(config: RunConfig, directory: Path, shape: Shape) -> Iterator[MensError]:
    """Refuse a tokenizer whose ids reach past the embedding table."""
    last = load_tokenizer(config.tokenizer, directory).last_id
    if last >= shape.vocab_size:
        yield ModelFileError(
            "the tokenizer has ids that the model has no embedding for",
            where=str(directory / "tokenizer.json"),
            found=f"id {last}",
            expected=f"less than vocab_size ({shape.vocab_size})",
        )
