"""Rules for `lora`: the adapter method, its targets, its initialization and its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.backend import BACKEND_SPECS, names_where
from mens_exp.config.lora import ADAPTERS, PromptInit, PromptTuningConfig
from mens_exp.config.optim import MuonConfig, ScheduleFreeConfig
from mens_exp.config.quant import PATTERNS
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.root import RunConfig


_LEAST_DROPOUT = 0.5 / 32768  # masks compare 15 random bits (lora/keyed.py)


def lora_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `lora`."""
    lora = config.lora
    if not lora.spec.on_embedding:
        yield from _target_problems(lora.targets)
    elif isinstance(lora, PromptTuningConfig):
        yield from _prompt_problems(config, lora)
    if 0 < lora.dropout < _LEAST_DROPOUT:
        yield ConfigError(
            "drops nothing, because it is rounded to a multiple of 1/32768",
            where="lora.dropout",
            found=lora.dropout,
            expected="0, or at least 2e-5",
        )
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
        "backend": (
            config.backend.spec.adapts_transformers,
            config.backend.name,
            " or ".join(names_where(lambda one: one.adapts_transformers)),
        ),
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
    known = BACKEND_SPECS.get(config.backend.name)
    if known is not None and known.adapts_model and config.backend.name not in spec.backends:
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
