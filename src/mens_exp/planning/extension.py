"""Extended runs: runs resumed with a larger trainer.max_steps.

Their first steps followed the schedule of a shorter run. Unless these steps are the same in the
longer run, the extended run learns something different, and its contract records the extension.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mens_exp.config.plugins import target_at
from mens_exp.config.schedule import OwnSchedule, ScheduleConfig
from mens_exp.config.trainer import TUNING, Selection
from mens_exp.planning.contract import Extension
from mens_exp.planning.learned_settings import RECORDING_CALLBACKS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.config.root import RunConfig

RATES = "the learning rates of earlier steps"
_PART = "extensions"  # of the contract's exec
# The note in manifests of earlier releases; it states the rate of the first step afterwards.
_NOTE = re.compile(r"trainer\.max_steps went from (\d+) to \d+: .*so the rate of step (\d+) is ")


@dataclass(kw_only=True, slots=True)
class ByAttempts(ScheduleConfig):
    """The schedule of an extended run; each attempt used its own total number of steps."""

    schedule: ScheduleConfig
    extensions: Sequence[Extension]

    def multiple(self, step: int, total_steps: int) -> float:
        """Return the rate of a step as a fraction of the peak; ``total_steps`` is the last total.

        An earlier total may exceed it only if max_epochs ends the run; that bound was the same.
        """
        totals = (one.total for one in self.extensions if step < one.step)
        return self.schedule.multiple(step, min(next(totals, total_steps), total_steps))


def continued(
    earlier: Sequence[Extension], before: int, after: int, step: int
) -> tuple[Extension, ...]:
    """Return the extensions of a run after it is resumed.

    Args:
        earlier: its extensions so far.
        before: its max_steps so far.
        after: its max_steps from now on.
        step: the step that it is resumed from; later steps are repeated.
    """
    starts = [0, *(one.step for one in earlier)]
    totals = [*(one.total for one in earlier), before]
    kept = [part for part in zip(starts, totals, strict=True) if part[0] < step]
    if kept and kept[-1][1] != after:
        kept.append((step, after))
    return tuple(Extension(step=start, total=total) for (_, total), (start, _) in pairwise(kept))


def differences(config: RunConfig, extensions: Sequence[Extension]) -> list[str]:
    """List the differences between an extended and an uninterrupted run; empty if none.

    A user-defined module receives the number of steps and is assumed to depend on it.

    Args:
        config: the whole configuration, with the last max_steps.
        extensions: extensions of the run.
    """
    return list(_differences(config, extensions)) if extensions else []


def _differences(config: RunConfig, extensions: Sequence[Extension]) -> Iterator[str]:
    schedule, total = config.schedule, config.trainer.max_steps
    if isinstance(schedule, ScheduleConfig):
        laid = ByAttempts(kind=schedule.kind, schedule=schedule, extensions=extensions)
        first = range(extensions[-1].step)
        if any(laid.multiple(i, total) != schedule.multiple(i, total) for i in first):
            yield RATES
    elif takes_total(schedule):
        yield "the schedule's total_steps"
    if config.lora.spec.allocates:
        yield "the allocation of ranks"
    if config.module._target_ != TUNING:  # Hydra's own spelling
        yield "the module's total_steps"
    if any(_is_validated_more(config, one) for one in extensions):
        yield "validations"


def takes_total(schedule: Any) -> bool:
    """Return whether a user-defined schedule takes the number of steps as an argument."""
    if not isinstance(schedule, OwnSchedule):
        return False
    cls = target_at("schedule", schedule._target_)  # Hydra's own spelling
    return "total_steps" in inspect.signature(cls).parameters


def _is_validated_more(config: RunConfig, one: Extension) -> bool:
    """Return whether the shorter run ended with a validation that affects what is learned.

    The validation or scorecard after the last step may select the adapter or end the run.
    """
    trainer, adapter = config.trainer, config.adapter
    selects = adapter.select is Selection.best
    others = {node._target_ for node in config.callbacks.values()} - RECORDING_CALLBACKS
    if one.step < one.total or not (selects or others):
        return False
    every = trainer.val_check_interval  # in micro-batches
    is_due = every is not None and one.step * trainer.accumulate_grad_batches % every == 0
    return not is_due or (selects and adapter.metric != "val/loss")


def extensions_of(manifest: Manifest) -> tuple[Extension, ...]:
    """Return the extensions of a recorded run; older records have them only in their notes."""
    part = (manifest.contract or {}).get("exec") or {}
    if _PART in part:
        return tuple(Extension(**one) for one in part[_PART] or ())
    found = (_NOTE.match(note) for note in manifest.notes)
    made = [Extension(step=int(one[2]) - 1, total=int(one[1])) for one in found if one]
    return tuple(one for one in made if one.step > 0)


def with_extensions(contract: Mapping[str, Any], found: Sequence[Extension]) -> dict[str, Any]:
    """Return a recorded contract with the run's extensions added, which older records lack."""
    if not found:
        return dict(contract)
    part = {**(contract.get("exec") or {}), _PART: [asdict(one) for one in found]}
    return {**contract, "exec": part}


def extension_words(contract: Mapping[str, Any]) -> list[str]:
    """Return a description of each extension in a contract's record."""
    part = contract.get("exec") or {}
    found = part.get(_PART) or []
    totals = [*(one["total"] for one in found), part.get("max_steps")]
    return [
        f"extended from {before} to {after} steps after step {one['step']}"
        for one, (before, after) in zip(found, pairwise(totals), strict=True)
    ]
