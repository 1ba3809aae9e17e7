"""Rules over typed values: ranges, fields that must agree, values without effect."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.config.fields import range_of
from mens_exp.config.rules import (
    adapter,
    backend,
    checkpoint,
    compare,
    corpus,
    data,
    lora,
    merge,
    model,
    objective,
    optim,
    promote,
    quant,
    sandbox,
    schedule,
    sharded,
    suite,
    task,
    trainer,
)
from mens_exp.errors import ConfigError, MensError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mens_exp.config.root import RunConfig

__all__ = [
    "TASK_READS",
    "ineffective_overrides",
    "problems_of",
    "range_problems",
    "unread_overrides",
]

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
        "checkpoint",
        "adapter",
        "logger",
        "callbacks",
        "suite",
        "eval",
        "sandbox",
        "preset",
        "experiment",
        "resume",
        "deployment_target",
    ]
)
TASK_READS: dict[str, frozenset[str]] = {
    "train": _EVERYTHING,
    "plan": _EVERYTHING - {"resume"},
    "evaluate": frozenset(
        {"path", "suite", "eval", "sandbox", "logger", "trainer.accelerator", "ledger"}
    ),
    "chat": frozenset({"path", "prompt", "chat", "seed", "trainer.accelerator"}),
    "push": frozenset({"path", "repo", "push"}),
    "sync": frozenset({"path", "sync"}),
    "export": frozenset(
        {
            *("path", "format", "export", "out", "model", "base", "merge", "gguf", "ollama"),
            *("parity", "data", "tokenizer", "trainer.accelerator"),
        }
    ),
    "merge": frozenset(
        {
            *("path", "adapter.file", "meta", "base_shard", "base", "out", "merge", "parity"),
            *("data", "tokenizer", "trainer.accelerator"),
        }
    ),
    "attribute": frozenset(
        {
            "attribute",
            "model",
            "tokenizer",
            "data",
            "objective",
            "trainer.accelerator",
            *(f"quant.{name}" for name in ("quant_type", "double_quant", "block_size", "skip")),
            "quant.compute_dtype",
        }
    ),
    "serve": frozenset({"path", "serve"}),
    "inspect": frozenset({"path", "verify", "replay", "inspect", "trainer.accelerator"}),
    "compare": frozenset({"path", "factors", "out", "compare", "ledger", "logger"}),
    "promote": frozenset({"path", "policy", "ledger", "open", "replay", "promote"}),
    "doctor": frozenset(),
    "corpus": frozenset(
        {
            *("corpus", "sandbox", "model", "tokenizer", "objective", "backend"),
            *("data.seq_len", "data.truncation"),
        }
    ),
}
_READ_OF_THE_BASE = frozenset({"model", "tokenizer", "quant", "lora", "backend"})


def problems_of(config: RunConfig) -> list[MensError]:
    """List everything wrong with typed values that can be told without looking at files."""
    problems: list[MensError] = [*range_problems(config)]
    groups = (trainer, schedule, optim, checkpoint, adapter, data, lora, objective, backend, quant)
    for rules in (*groups, sharded):
        problems += rules.problems(config)
    if not any(range_problems(config.model, "model.")):  # its rules divide by its values
        problems += model.problems(config)
    problems += task.problems(config)
    problems += merge.problems(config)
    problems += corpus.problems(config)
    problems += suite.problems(config)
    problems += compare.problems(config)
    problems += promote.problems(config)
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
                if dataclasses.is_dataclass(entry):  # a mapping of plain values has no ranges
                    yield from range_problems(entry, f"{path}.{name}.")
        else:
            bounds = range_of(field)
            if bounds is not None and value is not None and not bounds.accepts(value):
                kind = "a value" if math.isfinite(value) else "a finite value"
                yield ConfigError(
                    "out of range", where=path, found=value, expected=f"{kind} {bounds}"
                )


def unread_overrides(name: str, keys: Iterable[str], *, path: str | None = None) -> list[MensError]:
    """List explicit overrides that the chosen task never reads.

    Args:
        name: the task's name.
        keys: override keys as given, without ``+`` or ``~``.
        path: the run that the task reads; for ``base`` the command's own model counts.
    """
    reads = TASK_READS[name] | _read_beside(name, path)
    problems: list[MensError] = []
    for key in keys:
        group = key.split(".", 1)[0].split("/", 1)[0]  # hydra/launcher is Hydra's, as hydra.run
        whole_group = key == group and any(read.startswith(f"{group}.") for read in reads)
        if group not in {"task", "hydra", "sweep"} and not whole_group and not {key, group} & reads:
            problems.append(
                ConfigError(
                    f"has no effect with task={name}",
                    where=key,
                    expected=f"task={name} reads {', '.join(sorted(reads))}",
                    remedy=f"drop {key}, or choose another task",
                )
            )
    return problems


def _read_beside(name: str, path: str | None) -> frozenset[str]:
    """Return what a task reads of the command where `path` names no run with its own."""
    if path == "base":
        return _READ_OF_THE_BASE | (frozenset({"data"}) if name == "evaluate" else frozenset())
    if name != "evaluate" or path is None or path == "latest":
        return frozenset()
    place = Path(path).expanduser()
    is_adapter = place.exists() and not (place / "manifest.json").is_file()
    return (_READ_OF_THE_BASE - {"lora"}) | {"data"} if is_adapter else frozenset()


def ineffective_overrides(config: RunConfig, keys: Iterable[str]) -> list[MensError]:
    """List explicit overrides that other values of the configuration leave without effect.

    Args:
        config: the whole configuration.
        keys: override keys as given.
    """
    return [
        *data.unread(config, keys),
        *backend.unread(config, keys),
        *sandbox.unread(config, keys),
        *task.unread(config, keys),
        *corpus.unread(config, keys),
        *suite.unread(config, keys),
        *promote.unread(config, keys),
    ]
