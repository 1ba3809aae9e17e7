"""Rules for the trained graph: backend, model dimensions and quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.quantizer_record import LEVELS_EXPECTED, are_levels
from mens_exp.config.backend import BACKEND_SPECS, ProxyConfig
from mens_exp.config.fields import shown
from mens_exp.config.model import Checkpointing, ModelFamily, RandomModel
from mens_exp.config.quant import (
    PATTERNS,
    ComputeDtype,
    levels_are_read,
    names_for,
    names_made_again,
)
from mens_exp.errors import ConfigError, expected_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.quant import QuantConfig
    from mens_exp.config.root import RunConfig

PROXY_STACK = "proxy_stack"  # the proxy's only target


def backend_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `backend`, alone and in combination with other groups."""
    if isinstance(config.backend, ProxyConfig):
        yield from _proxy(config, config.backend)
    if config.tokenizer.name == "vox":
        yield from _vox(config)
    if config.backend.spec.needs_f32 and config.quant.compute_dtype is not ComputeDtype.f32:
        yield ConfigError(
            "the research lane computes in f32",
            where="quant.compute_dtype",
            found=config.quant.compute_dtype.value,
            expected="f32",
            remedy="choose backend=lora for bf16",
        )


def _vox(config: RunConfig) -> Iterator[ConfigError]:
    if not config.tokenizer.allow_control_text:
        yield ConfigError(
            "the vox tokenizer cannot tell the markers in a row from those of the template",
            where="tokenizer.allow_control_text",
            found=False,
            expected="true, or tokenizer=hf",
        )
    known = BACKEND_SPECS.get(config.backend.name)
    is_refused = known is not None and "vox" not in known.tokenizers  # by the planner's gate 2
    judged = _encodes_for_it(config) and not is_refused
    if judged and _is_pretrained(config) and not config.tokenizer.allow_unrelated_rows:
        yield ConfigError(
            "the ids 0 to 130 of the vox tokenizer select unrelated rows of this model's embedding",
            where="tokenizer",
            found=f"vox, for {config.model.name}",
            expected="hf, the model's own tokenizer, or a model with random weights",
            remedy="choose tokenizer=hf, or add tokenizer.allow_unrelated_rows=true to train on "
            "them anyway",
        )


def _is_pretrained(config: RunConfig) -> bool:
    return config.model.source != "random"


def _encodes_for_it(config: RunConfig) -> bool:
    """Return whether the task feeds token ids to the command's own model."""
    return config.task.name in {"train", "plan"} or config.path == "base"


def _proxy(config: RunConfig, backend: ProxyConfig) -> Iterator[ConfigError]:
    if backend.require_full_stack and (backend.lm_head_only or backend.max_layers == 0):
        yield ConfigError(
            "the head alone is not a full stack",
            where="backend.require_full_stack",
            found=True,
            expected="false, or middle projections",
        )
    yield from _only_plain_lora(config)


def _only_plain_lora(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the settings that the proxy's LoRA does not support."""
    lora = config.lora
    usual: dict[str, tuple[bool, Any]] = {
        "targets": (lora.targets == [PROXY_STACK], [PROXY_STACK]),
        "variant": (config.backend.name in lora.spec.backends, "lora"),
        "init": (lora.init.spec.is_drawn, "default"),
        "rank_pattern": (not lora.rank_pattern, {}),
        "alpha_pattern": (not lora.alpha_pattern, {}),
    }
    for name, (holds, expected) in usual.items():
        if not holds:
            found = getattr(lora, name)
            yield ConfigError(
                "the proxy stack has plain LoRA on every projection",
                where=f"lora.{name}",
                found=getattr(found, "value", found),
                expected=shown(expected),
                remedy="choose lora=proxy_stack, or backend=qlora",
            )


_STRADDLES = "blocks of weights that share a scale would straddle rows"


def model_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `model`, assuming that its dimensions are within their ranges."""
    model = config.model
    if Checkpointing.read(model.gradient_checkpointing) is None:
        yield ConfigError(
            "unknown setting",
            where="model.gradient_checkpointing",
            found=model.gradient_checkpointing,
            expected=expected_name(model.gradient_checkpointing, Checkpointing.__members__),
        )
    if isinstance(model, RandomModel):
        if config.quant.spec.in_blocks:
            yield from _widths(model, config.quant.spec.usual_block)
        yield from _heads(model)
        yield from _shared_heads(model)


def _widths(model: RandomModel, block: int) -> Iterator[ConfigError]:
    for name in ("hidden_size", "intermediate_size"):
        width = getattr(model, name)
        if width % block:
            yield ConfigError(
                _STRADDLES,
                where=f"model.{name}",
                found=width,
                expected=f"a multiple of {block}",
            )
    if model.head_dim is not None and (model.head_dim * model.num_attention_heads) % block:
        yield ConfigError(
            _STRADDLES,
            where="model.head_dim",
            found=f"{model.num_attention_heads} heads of {model.head_dim}",
            expected=f"heads that are a multiple of {block} wide together",
        )


def _heads(model: RandomModel) -> Iterator[ConfigError]:
    stated = model.head_dim is not None
    if stated and model.head_dim % 2:  # type: ignore[operator]  # not None, as stated says
        yield ConfigError(
            "heads must have an even width", where="model.head_dim", found=model.head_dim
        )
    if (
        model.hidden_size % model.num_attention_heads
        if stated
        else model.hidden_size % (2 * model.num_attention_heads)
    ):
        yield ConfigError(
            "heads must have an even, whole width",
            where="model.num_attention_heads",
            found=f"{model.num_attention_heads} heads for a width of {model.hidden_size}",
            expected="hidden_size divisible by twice the heads",
        )
    if model.num_attention_heads % model.num_key_value_heads:
        yield ConfigError(
            "query heads must divide evenly over key and value heads",
            where="model.num_key_value_heads",
            found=f"{model.num_key_value_heads} for {model.num_attention_heads} query heads",
            expected="a divisor of num_attention_heads",
        )


def _shared_heads(model: RandomModel) -> Iterator[ConfigError]:
    if model.family is ModelFamily.gpt2 and model.num_key_value_heads != model.num_attention_heads:
        yield ConfigError(
            "gpt2 has a key and value head for every query head",
            where="model.num_key_value_heads",
            found=model.num_key_value_heads,
            expected=f"{model.num_attention_heads}, as num_attention_heads",
        )


# The base of each built-in backend; a user's own backend may use either.
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)  # of bitsandbytes; 32 is for other devices


def quant_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `quant`, alone and with the chosen backend."""
    quant, name = config.quant, config.backend.name
    trains = config.task.name != "attribute"  # attribute builds no backend, and has a separate rule
    known = BACKEND_SPECS.get(name)
    if trains and known is not None and quant.is_quantized != known.quantized:
        yield ConfigError(
            f"backend={name} has {'no' if quant.is_quantized else 'a'} quantized base",
            where="quant.quant_type",
            found=quant.quant_type.value,
            expected="none" if quant.is_quantized else _bases(name),
            remedy="choose quant=none"
            if quant.is_quantized
            else "choose backend=lora, or quant=nf4",
        )
    if quant.block_size is not None and quant.block_size not in _BLOCKS:
        yield ConfigError(
            "is not a supported block size",
            where="quant.block_size",
            found=quant.block_size,
            expected=f"one of {', '.join(map(str, _BLOCKS))}",
        )
    for pattern, block in quant.block_size_pattern.items():
        if block not in _BLOCKS:
            yield ConfigError(
                "is not a supported block size",
                where=f"quant.block_size_pattern.{pattern}",
                found=block,
                expected=f"one of {', '.join(map(str, _BLOCKS))}",
            )
    if len(set(quant.skip)) < len(quant.skip):
        yield ConfigError(
            "a module is named twice",
            where="quant.skip",
            found=", ".join(quant.skip),
            expected="each module once",
        )
    yield from _levels(config)
    yield from _type_pattern(quant)
    if quant.is_quantized and name == "proxy":
        yield from _unused_by_the_proxy(quant)


def _levels(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problem of levels that make no codebook."""
    levels = config.quant.levels
    if levels_are_read(config) and not are_levels(levels):
        yield ConfigError(
            "must be the levels of the codebook",
            where="quant.levels",
            found=levels,
            expected=LEVELS_EXPECTED,
            remedy="add quant.levels=[…], such as quant.levels=[-1,-0.4,0,0.4,1]",
        )


def _type_pattern(quant: QuantConfig) -> Iterator[ConfigError]:
    """Yield per-module quantizers that cannot be mixed."""
    for name, one in quant.type_pattern.items():
        if not one.spec.is_made_again:
            yield ConfigError(
                "cannot be mixed with another quantizer",
                where=f"quant.type_pattern.{name}",
                found=one.value,
                expected=f"one of {', '.join(names_made_again())}",
                remedy="write quant.skip=[…] for modules that stay in the compute format"
                if not one.spec.is_quantized
                else None,
            )


def _bases(backend: str) -> str:
    *others, last = names_for(backend)
    return f"{', '.join(others)} or {last}"


def _unused_by_the_proxy(quant: QuantConfig) -> Iterator[ConfigError]:
    """Yield settings unused by the stack, which is quantized once and read from a compute copy."""
    if "proxy" not in quant.spec.backends:
        yield ConfigError(
            "the proxy stack is defined over 4-bit projections",
            where="quant.quant_type",
            found=quant.quant_type.value,
            expected=_bases("proxy"),
            remedy="choose quant=nf4, or backend=qlora",
        )
    for setting in ("skip", *PATTERNS):
        if patterns := getattr(quant, setting):
            yield ConfigError(
                "the proxy stack quantizes all of its projections in the same way",
                where=f"quant.{setting}",
                found=", ".join(patterns),
                expected="nothing",
            )
