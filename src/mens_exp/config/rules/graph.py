"""Rules for the trained graph: backend, model dimensions, quantization and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.quantizer_record import LEVELS_EXPECTED, are_levels
from mens_exp.config.backend import BACKEND_SPECS, FullConfig, ProxyConfig
from mens_exp.config.fields import shown
from mens_exp.config.lora import ADAPTERS, PromptInit, PromptTuningConfig
from mens_exp.config.model import Checkpointing, ModelFamily, RandomModel
from mens_exp.config.optim import MuonConfig, ScheduleFreeConfig
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

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.quant import QuantConfig
    from mens_exp.config.root import RunConfig

PROXY_STACK = "proxy_stack"  # the proxy's only target
_OWN_IDS_ONLY = frozenset({"qlora", "lora", "full", "proxy"})  # the planner's gate 2 refuses vox


def backend_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `backend`, alone and in combination with other groups."""
    if isinstance(config.backend, ProxyConfig):
        yield from _proxy(config, config.backend)
    if config.tokenizer.name == "vox":
        yield from _vox(config)
    if config.backend.name == "burn" and config.quant.compute_dtype is not ComputeDtype.f32:
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
    judged = _encodes_for_it(config) and config.backend.name not in _OWN_IDS_ONLY
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
_QUANTIZED = {"qlora": True, "proxy": True, "lora": False, "full": False, "burn": False}
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)  # of bitsandbytes; 32 is for other devices


def quant_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `quant`, alone and with the chosen backend."""
    quant, name = config.quant, config.backend.name
    trains = config.task.name != "attribute"  # attribute builds no backend, and has a separate rule
    if trains and quant.is_quantized != _QUANTIZED.get(name, quant.is_quantized):
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


def lora_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `lora`."""
    lora = config.lora
    if not lora.spec.on_embedding:
        yield from _target_problems(lora.targets)
    elif isinstance(lora, PromptTuningConfig):
        yield from _prompt_problems(config, lora)
    yield from _pattern_problems(lora)
    yield from _method_problems(config)
    quant = config.quant
    others = (getattr(quant, name) for name in ("skip", *PATTERNS))
    quantized_all = quant.spec.starts_adapters and not any(others)
    if lora.init.spec.exchanges_weights and not quantized_all:
        yield ConfigError(
            "starts from weights that bitsandbytes stores in 4 bits or from their quantization "
            "error, but some weights are stored differently",
            where="lora.init",
            found=lora.init.value,
            expected="lora.init=default, or quant=nf4 with an empty quant.skip and no patterns",
        )
    if lora.init.spec.from_rows:
        yield from _inputs_problems(config)
    if lora.init_from is not None and not lora.init.spec.is_drawn:
        yield ConfigError(
            "an adapter has only one starting point",
            where="lora.init",
            found=f"{lora.init.value} and lora.init_from={lora.init_from}",
            expected="lora.init=default, or lora.init_from=null",
            remedy="drop one of the two",
        )


def _inputs_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the settings that prevent an initialization from rows."""
    objective = config.objective.spec
    has_loss = not config.lora.init.spec.from_gradients or (
        objective.is_likelihood and not objective.needs_teacher
    )
    wanted = {
        "backend": (config.backend.name in {"qlora", "lora"}, config.backend.name, "qlora or lora"),
        "trainer.devices": (config.trainer.world_size == 1, config.trainer.world_size, "1 process"),
        "objective": (
            has_loss and not objective.compares_groups,
            config.objective.name,
            "an objective over the supervised tokens of its rows",
        ),
    }
    for where, (holds, found, expected) in wanted.items():
        if not holds:
            yield ConfigError(
                f"lora.init={config.lora.init.value} passes the run's rows through the base in one "
                "process before training",
                where=where,
                found=found,
                expected=expected,
                remedy="set lora.init=default",
            )


def _method_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield settings, initializations and backends that the adapter method does not support."""
    lora, spec = config.lora, config.lora.spec
    if not spec.fits(lora):
        yield ConfigError(
            f"{spec.name} has further settings, which this option does not define",
            where="lora.variant",
            found=f"{spec.name} with lora={lora.name}",
            expected=f"an option with the schema of {spec.name}",
            remedy=f"choose it by its option, lora={spec.option}",
        )
    if spec.allocates:
        yield from _allocation_problems(config)
    if lora.init.value not in spec.inits:
        yield ConfigError(
            f"{spec.name} does not support this initialization",
            where="lora.init",
            found=lora.init.value,
            expected=" or ".join(sorted(spec.inits)),
        )
    own = config.backend.name in BACKEND_SPECS and not isinstance(
        config.backend, FullConfig | ProxyConfig
    )
    if own and config.backend.name not in spec.backends:
        yield ConfigError(
            f"backend={config.backend.name} has no adapters of this method",
            where="lora.variant",
            found=spec.name,
            expected=" or ".join(
                name
                for name, one in ADAPTERS.built_in.items()
                if config.backend.name in one.backends
            ),
            remedy=f"choose backend={' or '.join(spec.backends)}",
        )


def _target_problems(targets: list[str]) -> Iterator[ConfigError]:
    if not targets:
        yield ConfigError(
            "no module gets an adapter",
            where="lora.targets",
            found=[],
            expected="at least one group or module name, such as attention or q_proj",
        )
    if len(set(targets)) < len(targets):
        yield ConfigError(
            "a module is named twice",
            where="lora.targets",
            found=", ".join(targets),
            expected="each module once",
        )


def _prompt_problems(config: RunConfig, lora: PromptTuningConfig) -> Iterator[ConfigError]:
    """Yield settings of this group and of others that prompt tuning does not support."""
    name = lora.spec.name
    if lora.targets:
        yield ConfigError(
            f"{name} adapts no module: its vectors come before the embeddings of a document",
            where="lora.targets",
            found=", ".join(lora.targets),
            expected="[]",
            remedy="leave out lora.targets, or choose lora=all_linear to adapt modules",
        )
    yield from _start_problems(lora)
    if config.objective.neftune_alpha:
        yield ConfigError(
            "noise on the embeddings would also fall on the virtual tokens, unlike in PEFT",
            where="objective.neftune_alpha",
            found=config.objective.neftune_alpha,
            expected=f"0 with lora={lora.spec.option}",
            remedy="leave out objective.neftune_alpha",
        )
    if config.objective.spec.compares_groups and lora.init_from is None:
        yield ConfigError(
            "learns from answers of the model that training starts from, and new virtual tokens "
            "change that model",
            where=f"objective={config.objective.name}",
            found=f"lora={lora.spec.option} without lora.init_from",
            expected="the run whose adapter gave the answers, as lora.init_from",
            remedy="train the virtual tokens with objective=assistant first, or choose "
            "lora=all_linear, which starts as the base",
        )
    if isinstance(config.optim, MuonConfig):
        yield ConfigError(
            "Muon is meant for the matrices of hidden layers, and virtual tokens are embeddings",
            where="optim",
            found=f"{config.optim.name} with lora.variant={name}",
            expected="an optimizer that updates each value separately",
            remedy="choose optim=adamw",
        )


def _start_problems(lora: PromptTuningConfig) -> Iterator[ConfigError]:
    """Yield an initialization from a text that is missing, or from an adapter too."""
    if lora.prompt_tuning_init is not PromptInit.text:
        return
    if not (lora.prompt_tuning_init_text or "").strip():
        yield ConfigError(
            "is required for lora.prompt_tuning_init=text",
            where="lora.prompt_tuning_init_text",
            found=lora.prompt_tuning_init_text,
            expected="a text, such as 'Complete the Python function.'",
        )
    if lora.init_from is not None:
        yield ConfigError(
            "an adapter has only one starting point",
            where="lora.prompt_tuning_init",
            found=f"text and lora.init_from={lora.init_from}",
            expected="another initialization, or lora.init_from=null",
            remedy="drop one of the two",
        )


def _allocation_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield settings that prevent rank allocation during training."""
    lora, steps = config.lora, config.trainer.max_steps
    if lora.target_r >= lora.r:
        yield ConfigError(
            f"{lora.spec.name} only reduces ranks",
            where="lora.target_r",
            found=f"{lora.target_r} with lora.r={lora.r}",
            expected="less than lora.r",
            remedy="lower lora.target_r, or raise lora.r",
        )
    if steps is not None:
        yield from allocated_steps_problems(lora, steps, "trainer.max_steps")
    if isinstance(config.optim, ScheduleFreeConfig):
        yield ConfigError(
            "ranks are allocated by the weights of a step, but this optimizer returns an average",
            where="optim",
            found=config.optim.name,
            expected="another optimizer",
            remedy="choose optim=adamw",
        )


def allocated_steps_problems(
    lora: LoraConfig, total_steps: int, bound: str
) -> Iterator[ConfigError]:
    """Yield a problem if the run is too short for the rank allocation of the method.

    Args:
        lora: the `lora` group.
        total_steps: optimizer steps of the run.
        bound: the setting that determines this length, for the message.
    """
    if lora.spec.allocates and lora.allocate_after_steps + lora.settle_steps >= total_steps:
        yield ConfigError(
            "no steps are left to allocate ranks in",
            where="lora.allocate_after_steps",
            found=f"{lora.allocate_after_steps}, and lora.settle_steps={lora.settle_steps}",
            expected=f"together fewer than {bound} ({total_steps})",
            remedy="lower one of them, or train longer",
        )


def _pattern_problems(lora: LoraConfig) -> Iterator[ConfigError]:
    for name, usual in (("rank_pattern", lora.r), ("alpha_pattern", lora.alpha)):
        for target, value in getattr(lora, name).items():
            where = f"lora.{name}"
            if value < 1:
                yield ConfigError(
                    "out of range",
                    where=where,
                    found=f"{target}: {value}",
                    expected="a value >= 1",
                )
            elif value == usual and len(getattr(lora, name)) == 1:
                yield ConfigError(
                    "changes nothing: it is the value of every module",
                    where=where,
                    found=f"{target}: {value}",
                    expected=f"another value than {usual}, or no pattern",
                )
