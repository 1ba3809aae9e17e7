"""The files and limits of the base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.fields import range_problems
from mens_exp.config.model import BundledModel, HfModel, RandomModel, WeightsDtype
from mens_exp.config.rules.model import BLOCK_SIZE
from mens_exp.errors import ModelFileError, NoEffectError, SetupError
from mens_exp.layout import hub
from mens_exp.layout.bundled import locate
from mens_exp.layout.cached import ready
from mens_exp.layout.shape import Shape, check_weights, shape_of
from mens_exp.layout.targets import linear_modules, skipped
from mens_exp.plan import file_messages
from mens_exp.plan.machine import space
from mens_exp.rows.cache import cache_root
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.config.quant import QuantConfig
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
        most = shape.max_position_embeddings
        yield file_messages.sequence_past_positions(config.data.seq_len, most, model.name)
    plans = config.task.name == "plan"  # which has the disk among its problems
    if isinstance(model, RandomModel) and not plans and ready(model, cache_root()) is None:
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
        yield from _widths(config.quant, directory.path, shape)
        yield from _vocabulary(config, directory.path, shape)
        if not isinstance(config.backend, ProxyConfig):  # which reads the attention's outputs only
            check_weights(directory)


def _without_effect(model: HfModel) -> Iterator[MensError]:
    if model.revision is not None and hub.local(model.id) is not None:
        yield NoEffectError(
            "on a directory",
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
        found = str(method or ", ".join(sorted(formats)))
        yield file_messages.quantized_already(str(directory.path), found, _FLOATS)


def _room(model: RandomModel, shape: Shape) -> Iterator[MensError]:
    """Refuse random weights that the cache's disk cannot hold."""
    width = {WeightsDtype.f32: 4, WeightsDtype.bf16: 2}[model.dtype]
    needed = (shape.linear_parameters + shape.embedding_parameters) * width
    _, free = space(cache_root())
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
        yield NoEffectError(
            "because the model brings no code of its own",
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


def _widths(quant: QuantConfig, directory: Path, shape: Shape) -> Iterator[MensError]:
    """Refuse widths that the usual blocks do not divide; other blocks are the quantizer's check."""
    if not quant.is_four_bit or quant.block_size is not None:
        return
    left = {one.path for one in skipped(quant.skip, shape)}
    layers = (one for one in linear_modules(shape) if one.layer is not None)
    quantized = {one.kind for one in layers if one.path not in left}
    for one in shape.family.projections:
        _, width = shape.size_of(one)
        if width % BLOCK_SIZE and one.logical in quantized and one.slot is None:
            where, expected = f"{directory}: {one.path}", f"a multiple of {BLOCK_SIZE}"
            yield file_messages.blocks_straddle(where, f"width {width}", expected)


def _vocabulary(config: RunConfig, directory: Path, shape: Shape) -> Iterator[MensError]:
    """Refuse a tokenizer whose ids reach past the embedding table."""
    last = load_tokenizer(config.tokenizer, directory).last_id
    if last >= shape.vocab_size:
        where = str(directory / "tokenizer.json")
        yield file_messages.ids_without_embedding(where, last, shape.vocab_size)
