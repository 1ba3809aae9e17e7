"""task=train: fine-tune an adapter, score base and tuned, and leave the evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from mens_exp.artifacts import atomic
from mens_exp.plan.preflight import writable_cache
from mens_exp.report import terminal
from mens_exp.tasks.comparison import note_bits_per_byte
from mens_exp.tasks.contracting import certify_rows
from mens_exp.tasks.fitting import fit, read_inputs
from mens_exp.tasks.leading import several
from mens_exp.tasks.measured import keep_measurement, note_plan, planned
from mens_exp.tasks.scoring import score

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.plan.ranks import Rank
    from mens_exp.tasks.fitting import Fitted, Inputs
    from mens_exp.tasks.run import Run

__all__ = ["train"]


def train(config: RunConfig, run: Run, *, checkpoint: Path | None = None) -> None:
    """Run the recipe from plan to scorecard.

    Args:
        config: the whole configuration.
        run: the open run.
        checkpoint: training state to go on from.

    Raises:
        MensError: something of the request cannot be done; the run closes as failed.
    """
    console = Console(stderr=True)
    cache = writable_cache()
    plan = planned(config, run.manifest, cache)
    atomic.write_json(run.dir.plan, plan)
    run.telemetry.emit("plan", plan)
    note_plan(run.manifest, plan)
    console.print(terminal.plan_table(plan))

    from mens_exp.training import memory_probe

    memory_probe.reset_peak()
    inputs = read_inputs(config, run, cache)
    rows, tokenizer = inputs.rows, inputs.tokenizer
    certify_rows(config, run, rows, inputs.data, tokenizer, cache)
    with several(config, run, checkpoint) as rank:
        trained = fit(config, run, inputs, rank, checkpoint=checkpoint)
    backend = _to_be_scored(config, inputs, trained, rank)
    score(config, run, backend, rows.heldout, tokenizer, prepared=trained.early)
    _results(run, trained, inputs.data, plan)


def _to_be_scored(config: RunConfig, inputs: Inputs, trained: Fitted, rank: Rank) -> Backend:
    """Return the trained graph with a base that is whole in this process."""
    from mens_exp.training.build import build_backend, lightning_quiet
    from mens_exp.training.sharding import is_sharded

    module = trained.module
    if config.suite.name != "none" and is_sharded(config, rank):
        _, tensors = module.backend.adapter(config)
        del module.backend  # the parts, before there is a whole
        with lightning_quiet():
            module.backend = build_backend(config, inputs.base)
        module.backend.load_adapter(tensors)
    return module.backend


def _results(run: Run, trained: Fitted, data: RowsDataModule, plan: dict[str, Any]) -> None:
    """Write the figures of the run, measured beside predicted."""
    from mens_exp.training import memory_probe

    results, trainer, module = run.manifest.results, trained.trainer, trained.module
    note_bits_per_byte(module.config.objective, run, data)
    results.update(
        val_loss_change_frac=results["tuned_val_loss"] / results["base_val_loss"] - 1,
        steps=trainer.global_step,
        micro_batches=(trainer.fit_loop.total_batch_idx + 1) * trainer.world_size,
        tokens=module.tokens,
        supervised_tokens=module.supervised_tokens,
        peak_rss_bytes=_higher(results.get("peak_rss_bytes"), memory_probe.peak_rss_bytes()),
        peak_cuda_bytes=_higher(results.get("peak_cuda_bytes"), memory_probe.peak_cuda_bytes()),
    )
    if consumed := data.consumed():
        results["streamed"] = consumed
    checkpoint = run.dir.last_checkpoint()
    results["checkpoint"] = (
        checkpoint.relative_to(run.dir.path).as_posix() if checkpoint is not None else None
    )
    for name, reason in (
        ("peak_rss_bytes", "this system does not tell"),
        ("peak_cuda_bytes", "no GPU was used"),
        ("checkpoint", "no checkpoint callback was configured"),
    ):
        if results[name] is None:
            run.unknown(f"results.{name}", reason)
    measured = {"time_s": results.get("train_s"), "peak_bytes": results["peak_rss_bytes"]}
    atomic.write_json(run.dir.plan, {**plan, "measured": measured})
    keep_measurement(run.manifest, plan, writable_cache())


def _higher(earlier: int | None, now: int | None) -> int | None:
    """Return the higher of two peaks, of which either may be unknown."""
    return max((peak for peak in (earlier, now) if peak is not None), default=None)
