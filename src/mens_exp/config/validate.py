"""Rules over typed values: ranges, fields that must agree, values without effect."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mens_exp.config.data import JsonlData
from mens_exp.config.fields import range_of
from mens_exp.config.model import RandomModel
from mens_exp.errors import ConfigError, MensError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["BLOCK_SIZE", "TASK_READS", "problems_of", "unread_overrides"]

BLOCK_SIZE = 64  # bitsandbytes' default block of one scale; asserted in tests/backends

_EVERYTHING = frozenset(
    [
        "seed",
        "model",
        "tokenizer",
        "quant",
        "lora",
        "objective",
        "backend",
        "data",
        "optim",
        "schedule",
        "trainer",
        "logger",
        "callbacks",
        "suite",
        "experiment",
        "resume",
    ]
)
TASK_READS: dict[str, frozenset[str]] = {
    "train": _EVERYTHING,
    "plan": _EVERYTHING - {"resume"},
    "evaluate": frozenset({"path", "suite", "trainer.accelerator"}),
}


def problems_of(config: RunConfig) -> list[MensError]:
    """List everything wrong with typed values that can be told without looking at files."""
    problems: list[MensError] = [*_range_problems(config, "")]
    if not problems:
        problems += _training_problems(config)
        problems += _data_problems(config)
        problems += _model_problems(config)
        problems += _task_problems(config)
    return problems


def _range_problems(node: Any, prefix: str) -> Iterator[ConfigError]:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _range_problems(value, f"{path}.")
        elif isinstance(value, dict):
            for name, entry in value.items():
                yield from _range_problems(entry, f"{path}.{name}.")
        else:
            bounds = range_of(field)
            if bounds is not None and value is not None and not bounds.accepts(value):
                yield ConfigError(
                    "out of range", where=path, found=value, expected=f"a value {bounds}"
                )


def _training_problems(config: RunConfig) -> Iterator[ConfigError]:
    trainer, optim = config.trainer, config.optim
    if trainer.max_steps <= 0 and trainer.max_epochs <= 0:
        yield ConfigError(
            "nothing bounds the run",
            where="trainer.max_steps",
            found=trainer.max_steps,
            expected="at least 1 step, or max_steps=-1 with max_epochs of at least 1",
        )
    if trainer.max_steps == 0 or trainer.max_epochs == 0:
        name = "max_steps" if trainer.max_steps == 0 else "max_epochs"
        yield ConfigError(
            "zero trains nothing", where=f"trainer.{name}", found=0, expected="-1 or at least 1"
        )
    if 0 < trainer.max_steps <= config.schedule.warmup_steps:
        yield ConfigError(
            "warm-up lasts as long as the run",
            where="schedule.warmup_steps",
            found=config.schedule.warmup_steps,
            expected=f"less than trainer.max_steps ({trainer.max_steps})",
        )
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):  # noqa: PLR2004
        yield ConfigError(
            "two decay rates are needed",
            where="optim.betas",
            found=optim.betas,
            expected="two numbers >= 0 and < 1",
        )
    if trainer.accelerator not in {"auto", "cpu", "gpu"}:
        yield ConfigError(
            "unknown accelerator",
            where="trainer.accelerator",
            found=trainer.accelerator,
            expected="auto, cpu or gpu",
        )


def _data_problems(config: RunConfig) -> Iterator[ConfigError]:
    data = config.data
    if data.val_frac + data.heldout_frac >= 1:
        yield ConfigError(
            "nothing is left to train on",
            where="data.val_frac",
            found=f"{data.val_frac} + heldout_frac {data.heldout_frac}",
            expected="a sum under 1",
        )
    if isinstance(data, JsonlData) and not data.path:
        yield ConfigError("no file named", where="data.path", expected="the path of a JSONL file")
    if not config.lora.targets:
        yield ConfigError(
            "no module gets an adapter",
            where="lora.targets",
            found=[],
            expected="at least one module name, such as q_proj",
        )


def _model_problems(config: RunConfig) -> Iterator[ConfigError]:
    model = config.model
    if not isinstance(model, RandomModel):
        return
    for name in ("hidden_size", "intermediate_size"):
        width = getattr(model, name)
        if width % BLOCK_SIZE:
            yield ConfigError(
                "4-bit blocks would straddle rows, which bitsandbytes gets wrong in silence",
                where=f"model.{name}",
                found=width,
                expected=f"a multiple of {BLOCK_SIZE}",
            )
    if model.hidden_size % (2 * model.num_attention_heads):
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


def _task_problems(config: RunConfig) -> Iterator[ConfigError]:
    if config.task.name == "evaluate" and config.path is None:
        yield ConfigError(
            "no run to evaluate",
            where="path",
            expected="a run directory, or latest",
            remedy="add path=latest",
        )
    if config.task.name == "evaluate" and config.suite.name == "none":
        yield ConfigError(
            "suite=none evaluates nothing",
            where="suite",
            found="none",
            expected="a suite, such as suite=heldout_syntax",
        )


def unread_overrides(task: str, keys: Iterable[str]) -> list[MensError]:
    """List explicit overrides that the chosen task never reads.

    Args:
        task: name of the task.
        keys: override keys as given, without ``+`` or ``~``.
    """
    reads = TASK_READS[task]
    problems: list[MensError] = []
    for key in keys:
        group = key.split(".", 1)[0]
        if group not in {"task", "hydra"} and not {key, group} & reads:
            problems.append(
                ConfigError(
                    f"has no effect with task={task}",
                    where=key,
                    expected=f"task={task} reads {', '.join(sorted(reads))}",
                    remedy=f"drop {key}, or choose another task",
                )
            )
    return problems
