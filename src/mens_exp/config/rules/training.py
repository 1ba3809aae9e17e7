"""Rules for training: trainer, objective, checkpoints, kept adapter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mens_exp.config.backend import has_frozen_base, names_where
from mens_exp.config.data import RowsData
from mens_exp.config.model import teacher_of
from mens_exp.config.objective import OBJECTIVES
from mens_exp.config.objective_spec import PRECOMPUTED
from mens_exp.config.rules.suite import scorecard_of
from mens_exp.config.trainer import (
    BY_CLASS,
    REFUSED_STRATEGIES,
    Promise,
    Refusal,
    Selection,
    Strategy,
)
from mens_exp.errors import ConfigError, NoEffectError, expected_name, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

ACCELERATORS = ("auto", "cpu", "gpu")


def trainer_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `trainer`."""
    trainer = config.trainer
    if trainer.max_steps <= 0 and trainer.max_epochs <= 0:
        yield ConfigError(
            "the run has no end",
            where="trainer.max_steps",
            found=trainer.max_steps,
            expected="at least 1 step, or max_steps=-1 with max_epochs of at least 1",
        )
    elif trainer.max_steps == 0 or trainer.max_epochs == 0:
        name = "max_steps" if trainer.max_steps == 0 else "max_epochs"
        yield ConfigError(
            "must not be 0",
            where=f"trainer.{name}",
            found=0,
            expected="-1 or at least 1",
        )
    if trainer.accelerator not in ACCELERATORS:
        yield ConfigError(
            "unknown accelerator",
            where="trainer.accelerator",
            found=trainer.accelerator,
            expected=expected_name(trainer.accelerator, ACCELERATORS),
        )
    yield from _arguments(config)
    yield from _shared(config)


_CLIPPING = ("norm", "value")
_UNUSED = re.compile(r"ddp_find_unused_parameters_(true|false)")
_PROFILERS = ("simple", "advanced", "pytorch")
_DURATION = re.compile(r"\d+:\d\d:\d\d:\d\d")
# Lightning's names of the formats of quant.compute_dtype.
_PRECISIONS = {"32": "f32", "32-true": "f32", "bf16": "bf16", "bf16-mixed": "bf16"}
_NAMES = {"f32": "32-true", "bf16": "bf16-mixed"}


def _arguments(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of arguments that Lightning would refuse later or less clearly."""
    trainer = config.trainer
    for name, value, known in (
        ("strategy", trainer.strategy, (*Strategy.__members__, "auto")),
        ("profiler", trainer.profiler, _PROFILERS),
        ("gradient_clip_algorithm", trainer.gradient_clip_algorithm, _CLIPPING),
    ):
        if value is None or value in known or (name in BY_CLASS and _names_a_class(value)):
            continue
        refusal = REFUSED_STRATEGIES.get(str(value).partition("_")[0])
        if name == "strategy" and (flag := _UNUSED.fullmatch(str(value))):
            yield ConfigError(
                "is an argument of a class here",
                where="trainer.strategy",
                found=value,
                remedy=f"use trainer=ddp trainer.strategy._target_={BY_CLASS[name]} "
                f"trainer.strategy.find_unused_parameters={flag[1]}",
            )
            continue
        if name == "strategy" and refusal is not None:
            yield refusal.error("trainer.strategy", value)
            continue
        or_class = ", or a mapping with _target_" if name in BY_CLASS else ""
        yield ConfigError(
            f"unknown {name.rpartition('_')[2]}",
            where=f"trainer.{name}",
            found=value,
            expected=expected_name(str(value), known) + or_class,
            remedy=f"use trainer.{name}={nearest(str(value), known) or known[0]}",
        )
    for number, plugin in enumerate(trainer.plugins or []):
        if not _names_a_class(plugin):
            yield ConfigError(
                "does not name a class",
                where=f"trainer.plugins.{number}",
                found=plugin,
                expected="a mapping with _target_",
            )
    yield from _flags(config)
    limit = trainer.limit_val_batches
    is_share = isinstance(limit, float) and 0 < limit <= 1
    is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
    if limit == 0:
        yield Refusal(
            Promise.COMPARISON,
            "base and tuned model are always validated on the same text",
            "use trainer.limit_val_batches=1, or drop it",
        ).error("trainer.limit_val_batches", limit)
    elif limit is not None and not is_share and not is_count:
        yield ConfigError(
            "is not a number of micro-batches",
            where="trainer.limit_val_batches",
            found=limit,
            expected="a whole number of at least 1, or a share above 0 and up to 1.0",
        )
    yield from _limits(config)
    yield from _precision(config)


def _flags(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the flags with a third value that have none of the three."""
    for name, flags, expected in (
        ("deterministic", (None, True, False, "warn"), "true, false, warn, or null"),
        ("compile", (True, False, "auto"), "true, false, or auto"),
    ):
        value = getattr(config.trainer, name)
        if value not in flags or type(value) is int:
            yield ConfigError(
                "is not a valid value", where=f"trainer.{name}", found=value, expected=expected
            )


def _names_a_class(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("_target_"), str)


def _limits(config: RunConfig) -> Iterator[ConfigError]:
    trainer, text = config.trainer, config.trainer.max_time
    if text is not None and (not _DURATION.fullmatch(text) or not text.strip("0:")):
        yield ConfigError(
            "is not a duration", where="trainer.max_time", found=text, expected="DD:HH:MM:SS"
        )
    if trainer.min_steps is not None and 0 < trainer.max_steps < trainer.min_steps:
        yield ConfigError(
            "is more than the run's steps",
            where="trainer.min_steps",
            found=trainer.min_steps,
            expected=f"at most trainer.max_steps ({trainer.max_steps})",
        )


def _precision(config: RunConfig) -> Iterator[ConfigError]:
    """Yield a precision that the graph would not use."""
    told, computes = config.trainer.precision, config.quant.compute_dtype.value
    if told is None or _PRECISIONS.get(told) == computes:
        return
    if told in _PRECISIONS:
        yield Refusal(
            Promise.ASKED,
            f"the graph computes in {computes}, as quant.compute_dtype says",
            f"set quant.compute_dtype={_PRECISIONS[told]}, or drop trainer.precision",
        ).error("trainer.precision", told)
    elif told == "16-mixed":
        yield Refusal(
            Promise.ASKED,
            f"the graph computes in {computes}, and nothing scales a loss in f16",
            f"use trainer.precision={_NAMES[computes]}, the name of quant.compute_dtype={computes}",
        ).error("trainer.precision", told)
    elif told.endswith("-true") or told in {"64", "16"}:
        yield Refusal(
            Promise.ARTIFACT,
            "it converts the adapter, which is trained and written in f32",
            "use quant.compute_dtype=bf16, which computes with bf16 copies",
        ).error("trainer.precision", told)
    else:
        yield ConfigError(
            "is not supported as a precision",
            where="trainer.precision",
            found=told,
            expected="32-true or bf16-mixed, the names of quant.compute_dtype=f32 and bf16",
            remedy=f"use trainer.precision={_NAMES[computes]}, or drop trainer.precision",
        )


def _shared(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of dividing the work among several processes."""
    trainer, several = config.trainer, config.trainer.world_size
    if trainer.is_single_device:
        yield from _single_device(config)
    elif several == 1 and isinstance(trainer.strategy, dict):
        yield NoEffectError(
            "on one process",
            where="trainer.strategy",
            expected="several processes",
            remedy="add trainer.devices=<2 or more>, or drop trainer.strategy",
        )
    elif trainer.sharing is Strategy.one:
        for name in ("devices", "num_nodes"):
            if getattr(trainer, name) > 1:  # others are out of range
                yield ConfigError(
                    "this trainer uses one process",
                    where=f"trainer.{name}",
                    found=getattr(trainer, name),
                    expected="1, or a trainer of several processes",
                    remedy="choose trainer=ddp or trainer=fsdp",
                )
    if trainer.sharing is Strategy.one:
        return
    for name, what in (
        ("accumulate_grad_batches", "micro-batches of a step"),
        ("val_check_interval", "micro-batches between validations"),
    ):
        value = getattr(trainer, name)
        if value is not None and value % several:
            yield ConfigError(
                f"{several} processes cannot share the {what} evenly",
                where=f"trainer.{name}",
                found=value,
                expected=f"a multiple of {several}: trainer.devices × trainer.num_nodes",
            )


def _single_device(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the reasons why Lightning's single-device strategy would not be used."""
    trainer, where = config.trainer, "trainer.strategy"
    if trainer.world_size > 1:
        yield Refusal(
            Promise.ASKED,
            f"{trainer.world_size} processes would each train the whole run",
            "use trainer=ddp, or trainer.devices=1 trainer.num_nodes=1",
        ).error(where, trainer.strategy["_target_"])
    for name in sorted(trainer.strategy.keys() - {"_target_", "device"}):
        yield Refusal(
            Promise.NOTHING_LOST,
            "accelerator, precision and checkpoints are those of the run",
            f"drop {name}, or see trainer.accelerator, quant.compute_dtype and checkpoint",
        ).error(f"{where}.{name}", trainer.strategy[name])
    device = trainer.strategy.get("device")
    uses = {"cpu": ("cpu",), "gpu": ("cuda", "cuda:0", 0)}.get(trainer.accelerator, ())
    if device is not None and device not in uses:
        yield Refusal(
            Promise.ASKED,
            f"the run computes where trainer.accelerator={trainer.accelerator} says",
            "drop device, and choose trainer=cpu or trainer=gpu",
        ).error(f"{where}.device", device)


def objective_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `objective`."""
    settings, spec = config.objective, config.objective.spec
    if OBJECTIVES.known(settings.labels) is None:
        yield ConfigError(
            "unknown labelling rule",
            where="objective.labels",
            found=settings.labels,
            expected=expected_name(settings.labels, OBJECTIVES.built_in),
        )
    if spec.needs_reference and not has_frozen_base(config.backend, config.model.source):
        yield ConfigError(
            f"objective={settings.name} compares with the base at every step, and here its weights "
            "are trained",
            where="backend",
            found=config.backend.name,
            expected="a backend whose base is frozen: qlora, lora or proxy",
        )
    yield from _teacher_problems(config)
    if spec.passes_before(settings) and isinstance(config.data, RowsData) and config.data.streaming:
        name, off = ("top_k", "null") if spec.needs_teacher else (PRECOMPUTED, "false")
        is_chosen = not spec.compares_groups
        yield ConfigError(
            "needs all rows before training, and data.streaming=true reads them as it goes",
            where=f"objective.{name}" if is_chosen else f"objective={settings.name}",
            found="data.streaming=true",
            expected="rows that are read before training",
            remedy="set data.streaming=false"
            + (f", or objective.{name}={off}" if is_chosen else ""),
        )
    room = config.data.seq_len - config.lora.spec.virtual_tokens(config.lora)
    yield from spec.problems(settings, room)


def _teacher_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the reasons why a run cannot learn from a teacher."""
    teacher = teacher_of(config.objective, config.model)
    if teacher is None:
        return
    if not config.backend.spec.is_transformers:
        yield ConfigError(
            f"objective={config.objective.name} needs the graph of a causal model",
            where="backend",
            found=config.backend.name,
            expected=", ".join(names_where(lambda one: one.is_transformers)),
            remedy="choose backend=qlora",
        )
    if teacher is config.model and not config.quant.is_quantized:
        yield ConfigError(
            "null is the base before quantization, which is the student itself here",
            where="objective.teacher",
            found="null with quant=none",
            expected="another model, or a quantized base",
            remedy="name one with objective.teacher=<path or id>, or choose backend=qlora",
        )
    if teacher is config.model and config.quant.spec.keeps_codes:
        yield ConfigError(
            "null means the base before quantization, and this checkpoint was published quantized",
            where="objective.teacher",
            found="null with quant=prequantized",
            expected="another model",
            remedy="name one with objective.teacher=<path or id>",
        )
    if config.trainer.sharing is Strategy.fsdp:
        yield ConfigError(
            "every process holds the whole teacher, which defeats sharding the base",
            where="objective",
            found=f"{config.objective.name} with trainer=fsdp",
            expected="trainer=ddp, or one process",
            remedy="choose trainer=ddp",
        )


_LOSS = "val/loss"
_DURING = "eval/"
_EXECUTED = frozenset({"task_success", "semantic_task_success", "pass_at_1", "pass_at_k"})
_REPAIRS = frozenset({"repair_depth", "repair_stalled"})


def adapter_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the unmet requirements of `adapter.select=best` and early stopping."""
    needing: list[tuple[str, str | None]] = []
    if config.adapter.select is Selection.best:
        needing.append(("adapter.select", "best"))
    if "early_stopping" in config.callbacks:
        needing.append(("callbacks.early_stopping", None))
    if needing:
        yield from _validations(config, needing)
    if config.adapter.metric == _LOSS:
        return
    yield from _kpi(config)


def _kpi(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the reasons why the KPI for the best adapter is never measured, or cannot decide."""
    from mens_exp.artifacts.metrics import METRICS

    name = config.adapter.metric
    known = {
        metric.removeprefix(_DURING): one
        for metric, one in METRICS.items()
        if metric.startswith(_DURING)
    }
    chosen = known.get(name)
    if chosen is None or chosen.direction == "none":
        choices = [_LOSS, *(other for other, one in known.items() if one.direction != "none")]
        yield ConfigError(
            "is not a KPI" if chosen is None else "has no better direction",
            where="adapter.metric",
            found=name,
            expected=expected_name(name, choices),
        )
        return
    node = scorecard_of(config)
    if node is None or node.every_n_steps is None:
        yield ConfigError(
            "is not measured while training runs",
            where="adapter.metric",
            found=name,
            expected="callbacks.scorecard.every_n_steps to be set",
            remedy="add callbacks.scorecard.every_n_steps=<optimizer steps>",
        )
        return
    if lacking := _lacking(config):
        yield ConfigError("is never measured", where="adapter.metric", found=name, expected=lacking)
    interval, each = config.trainer.val_check_interval, config.trainer.accumulate_grad_batches
    if interval is not None and node.every_n_steps * each % interval:
        yield ConfigError(
            "a scorecard would fall between two validations, and its adapter has no loss then",
            where="callbacks.scorecard.every_n_steps",
            found=node.every_n_steps,
            expected=f"optimizer steps of {each} micro-batches that are a multiple of "
            f"trainer.val_check_interval ({interval}), which adapter.metric={name} needs",
        )


def _lacking(config: RunConfig) -> str | None:
    """Describe a KPI's requirement that the configuration does not meet."""
    name, settings = config.adapter.metric, config.eval
    if not config.suite.spec.measures_success and name in _EXECUTED:
        return "a suite that executes answers, such as suite=mini_python"
    if name == "pass_at_k" and settings.samples == 1:
        return "eval.samples above 1"
    if name in _REPAIRS and not settings.max_retries:
        return "eval.max_retries above 0"
    return None


def _validations(config: RunConfig, needing: list[tuple[str, str | None]]) -> Iterator[ConfigError]:
    interval = config.trainer.val_check_interval
    each = config.trainer.accumulate_grad_batches
    remedy = f"add trainer.val_check_interval=<micro-batches, a multiple of {each}>"
    if interval is None:
        for where, found in needing:
            yield ConfigError(
                "needs validations while training runs",
                where=where,
                found=found,
                expected="trainer.val_check_interval to be set",
                remedy=remedy,
            )
    elif interval % each:
        yield ConfigError(
            "a validation would fall inside an optimizer step",
            where="trainer.val_check_interval",
            found=interval,
            expected=f"a multiple of trainer.accumulate_grad_batches ({each}), "
            f"which {' and '.join(where for where, _ in needing)} need",
        )
