"""Rules over typed values: ranges, fields that must agree, values without effect."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.nearest import expected_name
from mens_exp.config.data import JsonlData
from mens_exp.config.fields import range_of
from mens_exp.config.model import RandomModel
from mens_exp.config.objective import LABELLINGS
from mens_exp.errors import ConfigError, MensError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["BLOCK_SIZE", "TASK_READS", "problems_of", "range_problems", "unread_overrides"]

ACCELERATORS = ("auto", "cpu", "gpu")
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
    problems: list[MensError] = [*range_problems(config)]
    problems += _trainer_problems(config)
    problems += _optim_problems(config)
    problems += _data_problems(config)
    problems += _learning_problems(config)
    if not any(range_problems(config.model, "model.")):  # its rules divide by its values
        problems += _model_problems(config)
    problems += _task_problems(config)
    return problems


def range_problems(node: Any, prefix: str = "") -> Iterator[ConfigError]:
    """Yield every value of a typed configuration that lies outside its declared interval.

    Args:
        node: the root, or one group.
        prefix: dotted path of the node, with a final dot, for the messages.
    """
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from range_problems(value, f"{path}.")
        elif isinstance(value, dict):
            for name, entry in value.items():
                yield from range_problems(entry, f"{path}.{name}.")
        else:
            bounds = range_of(field)
            if bounds is not None and value is not None and not bounds.accepts(value):
                kind = "a value" if math.isfinite(value) else "a finite value"
                yield ConfigError(
                    "out of range", where=path, found=value, expected=f"{kind} {bounds}"
                )


def _trainer_problems(config: RunConfig) -> Iterator[ConfigError]:
    trainer = config.trainer
    if trainer.max_steps <= 0 and trainer.max_epochs <= 0:
        yield ConfigError(
            "nothing bounds the run",
            where="trainer.max_steps",
            found=trainer.max_steps,
            expected="at least 1 step, or max_steps=-1 with max_epochs of at least 1",
        )
    elif trainer.max_steps == 0 or trainer.max_epochs == 0:
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
    if trainer.accelerator not in ACCELERATORS:
        yield ConfigError(
            "unknown accelerator",
            where="trainer.accelerator",
            found=trainer.accelerator,
            expected=expected_name(trainer.accelerator, ACCELERATORS),
        )


def _optim_problems(config: RunConfig) -> Iterator[ConfigError]:
    optim = config.optim
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):  # noqa: PLR2004
        yield ConfigError(
            "two decay rates are needed",
            where="optim.betas",
            found=optim.betas,
            expected="two numbers >= 0 and < 1",
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


def _learning_problems(config: RunConfig) -> Iterator[ConfigError]:
    targets = config.lora.targets
    if not targets:
        yield ConfigError(
            "no module gets an adapter",
            where="lora.targets",
            found=[],
            expected="at least one module name, such as q_proj",
        )
    if len(set(targets)) < len(targets):
        yield ConfigError(
            "a module is named twice",
            where="lora.targets",
            found=", ".join(targets),
            expected="each module once",
        )
    if config.objective.name not in LABELLINGS:
        yield ConfigError(
            "unknown labelling rule",
            where="objective.name",
            found=config.objective.name,
            expected=expected_name(config.objective.name, LABELLINGS),
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
        whole_group = key == group and any(read.startswith(f"{group}.") for read in reads)
        if group not in {"task", "hydra"} and not whole_group and not {key, group} & reads:
            problems.append(
                ConfigError(
                    f"has no effect with task={task}",
                    where=key,
                    expected=f"task={task} reads {', '.join(sorted(reads))}",
                    remedy=f"drop {key}, or choose another task",
                )
            )
    return problems
