"""Files that a run writes and their sizes, by formula from the shapes alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.config.model import HfModel, RandomModel, WeightsDtype
from mens_exp.layout import hub
from mens_exp.layout.cached import ready
from mens_exp.plan.memory import optimizer_bytes
from mens_exp.plan.trained import trained_parameters

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape

__all__ = ["Disk", "disk"]

_F32, _BF16 = 4, 2
_RECORDS = 20_000_000  # telemetry, report and offline mirror of a run: 5 MB in the main job


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """Bytes that a run writes.

    Attributes:
        adapter: the adapter in our schema, f32.
        peft: the same for PEFT.
        checkpoint: one training state: adapter and optimizer.
        checkpoints_kept: states on disk at one time, one more being written.
        checkpoints_saved: states written over the whole run, None where steps are unknown.
        base: a copy of the base that has to be made or downloaded into the cache.
        merged: a merged model in bf16, which only an export writes.
    """

    adapter: int
    peft: int
    checkpoint: int
    checkpoints_kept: int
    checkpoints_saved: int | None
    base: int
    merged: int

    @property
    def in_run(self) -> int:
        """Bytes in the run directory at the worst moment."""
        return (
            self.adapter + self.peft + self.checkpoint * (self.checkpoints_kept + 1) + _RECORDS
            if self.checkpoints_kept
            else self.adapter + self.peft + _RECORDS
        )

    def record(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {**asdict(self), "in_run": self.in_run}


def disk(config: RunConfig, shape: Shape, cache: Path, steps: int | None) -> Disk:
    """Size what a run writes."""
    parameters = trained_parameters(config, shape)
    moments, _ = optimizer_bytes(config.optim._target_, parameters)  # Hydra's own spelling
    whole = shape.linear_parameters + shape.embedding_parameters
    saves = "checkpoint" in config.callbacks
    keep = config.checkpoint.keep if saves else 0
    saved = None if steps is None else -(-steps // config.checkpoint.every_n_steps) * saves
    return Disk(
        adapter=parameters * _F32,
        peft=parameters * _F32,
        checkpoint=parameters * _F32 + moments,
        checkpoints_kept=keep if saved is None else min(keep, saved),
        checkpoints_saved=saved,
        base=_base(config, whole, cache),
        merged=whole * _BF16,
    )


def _base(config: RunConfig, weights: int, cache: Path) -> int:
    """Return bytes of the base that are not here yet."""
    model = config.model
    if isinstance(model, HfModel):
        is_known = bool(hub.describe(model).shards)  # else its dimensions alone are
        return hub.bytes_to_download(model) if is_known else weights * _BF16
    if ready(model, cache):
        return 0
    in_f32 = isinstance(model, RandomModel) and model.dtype is WeightsDtype.f32
    return weights * (_F32 if in_f32 else _BF16)
