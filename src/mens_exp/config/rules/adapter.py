"""Rules for the choice of the resulting adapter, and for stopping early without a better one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.nearest import expected_name
from mens_exp.config.adapter import Selection
from mens_exp.config.rules.suite import scorecard_of
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]

_LOSS = "val/loss"
_DURING = "eval/"
_EXECUTED = frozenset({"task_success", "semantic_task_success", "pass_at_1", "pass_at_k"})
_REPAIRS = frozenset({"repair_depth", "repair_stalled"})


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what `adapter.select=best` and early stopping lack."""
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
    """Yield why the KPI that the best adapter is chosen by is never measured, or cannot choose."""
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
            "is no KPI" if chosen is None else "neither way of it is better",
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
    """Say what a KPI needs that the configuration does not have."""
    name, settings = config.adapter.metric, config.eval
    if config.suite.name == "heldout_syntax" and name in _EXECUTED:
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
