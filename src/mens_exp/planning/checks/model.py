"""Checks of the base model: files, limits, weight headers, quantization, chat template.

The embedding and the heads are checked from the headers alone, and the backend from the shape.
"""

from __future__ import annotations

import json
import operator
from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.fields import range_problems
from mens_exp.config.model import (
    BundledModel,
    HfModel,
    RandomModel,
    WeightsDtype,
    teacher_of,
)
from mens_exp.config.objective import OBJECTIVES
from mens_exp.config.quant import ComputeDtype, unquantized
from mens_exp.corpus.source import labelling_of
from mens_exp.errors import ConfigError, ModelFileError, NoEffectError, SetupError
from mens_exp.layout import hub
from mens_exp.layout.model_cache import locate_bundled, ready_directory
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.prequantized import CODES
from mens_exp.layout.shape import Shape, check_weights, shape_of, stored_in, stored_layers
from mens_exp.layout.targets import quantized_modules
from mens_exp.planning import messages
from mens_exp.planning.activations import modules_of, proxy_stack
from mens_exp.planning.machine import space
from mens_exp.planning.memory import bits_per_weight, dense_experts
from mens_exp.planning.messages import blocks_straddle
from mens_exp.rows.cache import cache_root
from mens_exp.tokenizer.implementations import chat_template_of
from mens_exp.tokenizer.load import check_date, load_tokenizer
from mens_exp.tokenizer.templates import CHATML, is_dated, read_template

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.config.quant import QuantConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError
    from mens_exp.layout.checkpoint_files import ModelDirectory
    from mens_exp.layout.modules import LinearModule
    from mens_exp.layout.prequantized import StoredLayers

_FLOATS = frozenset({"BF16", "F16", "F32"})


def _reads_rows(config: RunConfig) -> bool:
    """Return whether the task encodes rows, so that data.seq_len has an effect."""
    task = config.task.name
    return task in {"train", "plan", "attribute"} or (
        task == "evaluate" and config.suite.spec.from_rows
    )


def check_model(config: RunConfig) -> Iterator[MensError]:
    """Yield the problems of the base model's files and limits."""
    model = config.model
    if isinstance(model, BundledModel):
        locate_bundled(model)
    if any(range_problems(model)):
        return  # already reported, and nothing can be computed from such dimensions
    shape = shape_of(model)
    most = shape.max_position_embeddings
    if config.data.seq_len > most and _reads_rows(config):
        yield messages.sequence_past_positions(config.data.seq_len, most, model.name)
    plans = config.task.name == "plan"  # a plan lists the disk among its problems
    if (
        isinstance(model, RandomModel)
        and not plans
        and ready_directory(model, cache_root()) is None
    ):
        yield from _room(model, shape)
    if not isinstance(model, HfModel) and config.quant.spec.keeps_codes:
        yield ConfigError(
            "quant=prequantized needs a quantized checkpoint",
            where="quant",
            found=f"{model.name}, which is not quantized",
            expected="a directory, or a model on the Hub",
            remedy="add model=hf model.id=<path or id>; or choose quant=nf4",
        )
    if isinstance(model, HfModel):
        directory = hub.describe(model)
        if not directory.shards:  # only its dimensions are known, which is enough for a plan
            if config.task.name != "plan":
                hub.pinned(model)  # raises the reason why it is unavailable
            return
        yield from _without_effect(model)
        of_codes = list(_quantized(directory, config.quant, shape))
        yield from of_codes
        yield from _remote_code(model, directory.config)
        yield from _widths(config.quant, directory.path, shape)
        yield from _vocabulary(config, directory.path, shape)
        if not of_codes and not isinstance(config.backend, ProxyConfig):
            check_weights(directory)  # the proxy reads only the attention's outputs


def _without_effect(
    model: HfModel, where: str = "model.revision", named_by: str = "model.id"
) -> Iterator[MensError]:
    if model.revision is not None and hub.local(model.id) is not None:
        yield NoEffectError(
            "on a directory",
            where=where,
            found=model.revision,
            expected=f"null, because {named_by} is the directory {model.id}",
        )


def _quantized(
    directory: ModelDirectory, quant: QuantConfig, shape: Shape | None = None
) -> Iterator[MensError]:
    """Refuse quantized weights that would be rounded twice or misread, and missing ones.

    Args:
        directory: the model.
        quant: the requested quantization.
        shape: dimensions of the model, including the layers that are stored as codes.
    """
    named = directory.config.get("quantization_config")
    weights = (info for name, info in directory.tensors.items() if name.endswith("weight"))
    formats = {info.dtype for info in weights} - _FLOATS
    if quant.spec.keeps_codes:
        yield from _codes(directory, shape)
    elif named is not None or formats:
        method = named.get("quant_method") if isinstance(named, dict) else named
        found = str(method or ", ".join(sorted(formats)))
        is_read = stored_in(directory) is not None
        yield messages.quantized_already(str(directory.path), found, _FLOATS, is_read=is_read)


def _codes(directory: ModelDirectory, shape: Shape | None) -> Iterator[MensError]:
    """Yield reasons why the codes of a checkpoint cannot be kept."""
    try:
        found = stored_layers(directory)
    except ModelFileError as error:
        yield error
        return
    if found is None:
        yield _no_codes(directory)
    elif shape is not None and found.names is not None:
        yield from _unusable(directory, shape, found)


def _no_codes(directory: ModelDirectory) -> MensError:
    where = str(directory.path)
    if any(name.endswith(".qweight") for name in directory.tensors):
        return ModelFileError(
            "config.json does not name the quantization of the weights",
            where=f"{where}: config.json",
            found="tensors whose names end in .qweight, and no quantization_config",
            expected="quantization_config, as transformers reads it",
            remedy="download the repository, and put what its quantize_config.json (GPTQ) or "
            "quant_config.json (AWQ) has into config.json as quantization_config, with "
            "quant_method; then give the directory as model.id",
        )
    return ConfigError(
        "quant=prequantized needs a quantized checkpoint",
        where="quant",
        found=f"{where}, whose config.json has no quantization_config",
        expected="a checkpoint in GPTQ, AWQ, FP8, bitsandbytes or compressed-tensors",
        remedy="choose a quantizer, such as quant=nf4",
    )


def _unusable(
    directory: ModelDirectory, shape: Shape, found: StoredLayers
) -> Iterator[ModelFileError]:
    """Yield reasons why individual layers of codes cannot be kept."""
    where, coded = str(directory.path), found.names or frozenset()
    weights = {name: info for name, info in directory.tensors.items() if name.endswith(".weight")}
    alone = {name for name, info in weights.items() if info.dtype not in {*_FLOATS, CODES}}
    if alone:
        name = min(alone)
        marker = f"{name.removesuffix('.weight')}.{found.format.marker}"
        yield ModelFileError(
            "a quantized weight has no scales",
            where=f"{where}: {name}",
            found=f"{weights[name].dtype}, and no {marker}",
            remedy="download the model again; or take the model that these weights were made from",
        )
    inside = [one for one in linear_modules(shape) if one.layer is not None and one.stack is None]
    known = {f"{path}.weight" for one in inside for path in (one.path, _short(one.path))}
    if coded - known:
        yield ModelFileError(
            "quantized modules other than linear layers of the decoder are not supported",
            where=where,
            found=min(coded - known),
            expected="linear layers of the decoder; neither the head nor experts of a mixture",
            remedy="take the model that these weights were made from",
        )


def _short(path: str) -> str:
    return path.partition(".")[2]


def _room(model: RandomModel, shape: Shape) -> Iterator[MensError]:
    """Refuse random weights that do not fit on the cache's disk."""
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
    """Refuse an unneeded permission for remote code, and code that is not pinned to a commit."""
    if not model.trust_remote_code:
        return
    code = (config.get("auto_map") or {}).get("AutoModelForCausalLM")
    if code is None:
        yield NoEffectError(
            "because the model has no custom code",
            where="model.trust_remote_code",
            found=True,
            expected="false",
        )
    elif "--" in str(code):
        yield ModelFileError(
            "the model's code is in another repository, which is not pinned to a revision",
            where=f"model.id={model.id}: auto_map",
            found=str(code),
            expected="code in the repository of the weights",
            remedy="download both into a directory and give that as model.id",
        )


def _widths(quant: QuantConfig, directory: Path, shape: Shape) -> Iterator[MensError]:
    """Refuse widths not divisible by the default block; `check_quantization` checks others."""
    if quant.block_size is not None or quant.block_size_pattern:
        return
    stored = quantized_modules(quant, shape) if quant.is_quantized else {}
    kinds = set()
    for one in linear_modules(shape):
        if one.path in stored and one.kind not in kinds and _straddles(one, stored[one.path]):
            kinds.add(one.kind)
            path = one.path.removeprefix(f"{shape.family.layers}.{one.layer}.")
            where, expected = f"{directory}: {path}", f"a multiple of {stored[one.path].block}"
            yield messages.blocks_straddle(where, f"width {one.width}", expected)


def _straddles(one: LinearModule, stored: QuantConfig) -> bool:
    return stored.spec.in_blocks and one.width % stored.block != 0


def _vocabulary(config: RunConfig, directory: Path, shape: Shape) -> Iterator[MensError]:
    """Refuse a tokenizer with ids beyond the embedding table, or without the required tokens."""
    tokenizer, labelling = load_tokenizer(config.tokenizer, directory), labelling_of(config)
    if OBJECTIVES.known(labelling.objective) is not None:  # otherwise it is refused elsewhere
        labelling.rows.check_tokenizer(tokenizer, labelling)
    last = tokenizer.last_id
    if last >= shape.vocab_size:
        where = str(directory / "tokenizer.json")
        yield messages.ids_without_embedding(where, last, shape.vocab_size)


def check_teacher(config: RunConfig) -> Iterator[MensError]:
    """Yield reasons why the teacher's token distributions do not fit the student."""
    teacher = teacher_of(config.objective, config.model)
    if teacher is None:
        return
    top_k, vocab_size = getattr(config.objective, "top_k", None), shape_of(config.model).vocab_size
    if top_k is not None and top_k >= vocab_size:
        yield ConfigError(
            "covers the whole vocabulary",
            where="objective.top_k",
            found=top_k,
            expected=f"less than the {vocab_size:,} logits of {config.model.name}",
            remedy="choose a smaller one, or objective.top_k=null",
        )
    yield from _unmatched(config.objective, shape_of(config.model), shape_of(teacher))
    if teacher is config.model:
        return
    assert isinstance(teacher, HfModel), "another one is a directory or of the hub"
    directory = hub.describe(teacher)
    if not directory.shards and config.task.name != "plan":
        hub.pinned(teacher)  # raises the reason why it is unavailable
    yield from _without_effect(teacher, "objective.teacher_revision", "objective.teacher")
    yield from _quantized(directory, unquantized())
    theirs, ours = shape_of(teacher), shape_of(config.model)
    if theirs.vocab_size != ours.vocab_size:
        yield ConfigError(
            "the teacher has another vocabulary",
            where="objective.teacher",
            found=f"{teacher.id}: {theirs.vocab_size:,} logits",
            expected=f"{ours.vocab_size:,}, as {config.model.name}",
            remedy="choose a teacher of the same family of models",
        )
    if config.data.seq_len > theirs.max_position_embeddings:
        most = theirs.max_position_embeddings
        yield messages.sequence_past_positions(config.data.seq_len, most, teacher.id)
    student = ready_directory(config.model, cache_root())
    if student is not None and directory.shards:
        yield from other_tokenizer(student, directory.path)
        check_weights(directory)


def _unmatched(settings: Any, ours: Shape, theirs: Shape) -> Iterator[ConfigError]:
    """Yield the reasons why hidden states of student and teacher cannot be compared."""
    if not getattr(settings, "hidden_weight", 0):
        return
    many, layers = ours.num_hidden_layers, settings.hidden_layers
    if theirs.hidden_size != ours.hidden_size:
        yield ConfigError(
            "hidden states of another width cannot be compared",
            where="objective.hidden_weight",
            found=f"the teacher's of {theirs.hidden_size:,}, the student's of {ours.hidden_size:,}",
            expected="models of the same width",
            remedy="set objective.hidden_weight=0, or choose another teacher",
        )
    if theirs.num_hidden_layers % many:
        yield ConfigError(
            "the student's layers have no counterparts in the teacher",
            where="objective.hidden_weight",
            found=f"{theirs.num_hidden_layers} layers of the teacher, {many} of the student",
            expected="as many layers as the student, or a multiple",
            remedy="set objective.hidden_weight=0, or choose another teacher",
        )
    if layers is not None and (not layers or layers != sorted({*layers} & {*range(1, many + 1)})):
        yield ConfigError(
            "are not different layers of the student, in their order",
            where="objective.hidden_layers",
            found=layers,
            expected=f"rising numbers from 1 to {many}",
            remedy="correct them, or set objective.hidden_layers=null for all",
        )


# Parts of a tokenizer.json that determine the token ids of a text.
_DECIDE_IDS = ("model", "added_tokens", "normalizer", "pre_tokenizer")


def other_tokenizer(student: Path, teacher: Path) -> Iterator[ConfigError]:
    """Yield an error if the tokenizers of two directories give different token ids.

    Args:
        student: directory of the model to train.
        teacher: directory of the model to learn from.
    """
    ours, theirs = (
        json.loads((one / "tokenizer.json").read_text("utf-8")) for one in (student, teacher)
    )
    for tokens in (ours, theirs):
        added = tokens.get("added_tokens") or []
        tokens["added_tokens"] = {one["id"]: one["content"] for one in added}
    for name in _DECIDE_IDS:
        if ours.get(name) != theirs.get(name):
            yield ConfigError(
                "the teacher has another tokenizer",
                where="objective.teacher",
                found=f"{teacher / 'tokenizer.json'}: another {name}",
                expected=f"that of {student / 'tokenizer.json'}",
                remedy="choose a teacher with the tokenizer of the student",
            )
            return


def check_weight_headers(config: RunConfig) -> Iterator[MensError]:
    """Yield the problems of the embedding and the heads of a directory's or Hub model."""
    if isinstance(config.model, HfModel):
        directory = hub.describe(config.model)
        if directory.shards:  # otherwise only its dimensions are known
            yield from weight_problems(directory, shape_of(config.model))


def weight_problems(directory: ModelDirectory, shape: Shape) -> Iterator[MensError]:
    """Yield contradictions with config.json; shapes are read from the headers alone."""
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    if groups < 1 or heads % groups:
        where = f"{directory.path / 'config.json'}: num_key_value_heads"
        yield messages.heads_do_not_divide(where, heads, groups)
    embedding = shape.family.embedding
    tried = [f"{embedding}.weight", f"{embedding.partition('.')[2]}.weight"]
    key = next((key for key in tried if key in directory.tensors), None)
    if key is None:
        yield messages.embedding_absent(str(directory.path), tried)
        return
    found, expected = directory.tensors[key].shape, (shape.vocab_size, shape.hidden_size)
    if found != expected:
        yield messages.embedding_of_wrong_shape(f"{directory.path}: {key}", found, expected)


def check_quantization(config: RunConfig) -> Iterator[MensError]:
    """Yield layers not divisible into blocks; quantizing them silently gives wrong sums."""
    quant = config.quant
    if not quant.is_quantized or any(range_problems(config.model)):
        return  # nothing to divide, or already reported
    shape = shape_of(config.model)
    stored = quantized_modules(quant, shape)
    if config.task.name == "attribute" and not stored:
        yield ConfigError(
            "leaves nothing quantized to attribute",
            where="quant.skip",
            found=", ".join(quant.skip),
            expected="at least one linear module that is quantized",
        )
    if stored and config.attribute.quant_types:
        yield from _mixture(config, shape)
    yield from _mean_rank(config, shape)
    if quant.block_size is None and not quant.block_size_pattern:
        return  # _widths checks the default block size
    wide: dict[int, dict[str, int]] = {}  # by block
    for one in linear_modules(shape):
        if one.path in stored and _straddles(one, stored[one.path]):
            wide.setdefault(stored[one.path].block, {})[one.kind] = one.width
    for block, kinds in wide.items():
        listed = ", ".join(f"{kind} ({width})" for kind, width in kinds.items())
        where = "quant.block_size" if block == quant.block else "quant.block_size_pattern"
        yield blocks_straddle(where, f"{block} for {listed}", "a divisor of every width")


def _mean_rank(config: RunConfig, shape: Shape) -> Iterator[ConfigError]:
    """Yield a mean rank that a module is too small for."""
    stored = quantized_modules(config.quant, shape)
    sides = [min(one.out, one.width) for one in linear_modules(shape) if one.path in stored]
    if config.attribute.rank is not None and config.attribute.rank > min(sides, default=0):
        yield ConfigError(
            "is more than the smallest module has",
            where="attribute.rank",
            found=config.attribute.rank,
            expected=f"at most {min(sides, default=0)}, its smaller side",
        )


def _mixture(config: RunConfig, shape: Shape) -> Iterator[ConfigError]:
    """Yield quantizers whose blocks do not fit a module, and a budget that cannot be met."""
    quants = [config.quant.of(one) for one in config.attribute.quant_types]
    stored = quantized_modules(config.quant, shape)
    inside = [one for one in linear_modules(shape) if one.path in stored]
    for quant in quants:
        wide = {one.kind: one.width for one in inside if _straddles(one, quant)}
        if wide:
            listed = ", ".join(f"{kind} ({width})" for kind, width in wide.items())
            yield ConfigError(
                "blocks would straddle the rows of layers",
                where="attribute.quant_types",
                found=f"{quant.quant_type.value}: {quant.block} for {listed}",
                expected="quantizers whose block divides every width",
                remedy="leave those layers out with quant.skip, or drop the quantizer",
            )
    weights = [one.out * one.width for one in inside]
    fewest = [
        min(bits_per_weight(quant, 1 / one.width) for quant in (stored[one.path], *quants))
        for one in inside
    ]
    lowest = sum(map(operator.mul, weights, fewest)) / sum(weights)
    if config.attribute.bits is not None and config.attribute.bits < lowest:
        yield ConfigError(
            "no mixture of these quantizers takes so few bits",
            where="attribute.bits",
            found=config.attribute.bits,
            expected=f"at least {lowest:.3f}, or a quantizer of fewer bits",
        )


def codes_warnings(config: RunConfig, shape: Shape) -> Iterator[str]:
    """Yield a warning for a base that was published with activation quantization."""
    stored = shape.stored
    if config.quant.spec.keeps_codes and stored is not None and stored.format.quantizes_inputs:
        yield (
            f"the base was published with activation quantization ({stored.format.method}). Here "
            "only its weights are quantized, so its answers may differ where it is served. "
            "Next: score the model in the program that will serve it"
        )


def expert_warnings(config: RunConfig, shape: Shape) -> Iterator[str]:
    """Yield warnings for mixture experts that `quant` does not apply to, and the consequences.

    transformers stores experts as three-dimensional tensors, and bitsandbytes quantizes only linear
    modules.
    """
    if not config.backend.spec.is_causal or not shape.expert_parameters:
        return
    dtype = config.quant.compute_dtype
    dense = dense_experts(config, shape)
    if dense:
        size = dense * (2 if dtype is ComputeDtype.bf16 else 4)
        yield (
            f"the experts are not quantized: {dense:,} of {shape.parameters:,} parameters stay in "
            f"{dtype.value} ({size / 1e9:.2f} GB). bitsandbytes quantizes linear layers, and "
            "transformers holds experts as tensors of three dimensions. "
            "Next: see that the device has the memory of this plan"
        )
    adapted = any(one.stack is not None for one in modules_of(config, shape))
    if adapted and config.backend.spec.has_adapter and dtype is ComputeDtype.bf16:
        yield (
            "PEFT adds the adapter to the weights of experts in their own format, bf16, where a "
            "change of less than about 1/512 of a weight is lost in each pass. "
            "Next: set quant.compute_dtype=f32 for an exact sum, at twice the memory of the experts"
        )


def check_chat_template(config: RunConfig) -> Iterator[MensError]:
    """Yield the problems of the chat template, as far as it can be read at this point."""
    check_date(config.tokenizer, known_template(config))
    yield from ()


def date_in_prompts(config: RunConfig) -> str | None:
    """Return the date passed to the chat template; None if it uses none or is not available."""
    template = known_template(config)
    return config.tokenizer.date if template is not None and is_dated(template) else None


def known_template(config: RunConfig) -> str | None:
    """Read the effective chat template; None while the model is yet to be created or downloaded."""
    if config.tokenizer.chat_template is not None:
        return read_template(config.tokenizer.chat_template)
    if config.tokenizer.name == "vox" or isinstance(config.model, RandomModel):
        return CHATML
    directory = ready_directory(config.model, cache_root())
    return None if directory is None else chat_template_of(directory, config.tokenizer)[0]


def check_backend(config: RunConfig) -> Iterator[MensError]:
    """Yield the problems that prevent the backend from being built on the base model."""
    if any(range_problems(config.model)) or any(range_problems(config.backend)):
        return  # already reported
    proxy_stack(config, shape_of(config.model))  # raises its own errors
    yield from ()
