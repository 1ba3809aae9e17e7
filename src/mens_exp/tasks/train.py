"""task=train: fine-tune an adapter, score base and tuned, and leave the evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from mens_exp.artifacts import atomic
from mens_exp.config.rules.schedule import too_long
from mens_exp.config.rules.suite import too_late
from mens_exp.corpus.source import load_rows
from mens_exp.errors import Problems
from mens_exp.layout.shape import family_for
from mens_exp.layout.starting_adapter import find, read
from mens_exp.plan.checks.adapter import other_base
from mens_exp.plan.preflight import writable_cache
from mens_exp.report import terminal
from mens_exp.tasks.comparison import note_bits_per_byte
from mens_exp.tasks.contracting import certify_rows, certify_steps
from mens_exp.tasks.early_scoring import first_items, prepared_early
from mens_exp.tasks.initialisation import note_peft_view, report_start
from mens_exp.tasks.inputs import (
    describe,
    keep_bad_rows,
    note_origin,
    refuse_changed,
    tokenizer_of,
)
from mens_exp.tasks.measured import keep_measurement, note_plan, planned
from mens_exp.tasks.scoring import score

if TYPE_CHECKING:
    from pathlib import Path

    from lightning import Trainer

    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.source import Rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.layout.starting_adapter import StartingAdapter
    from mens_exp.model.resolve import BaseModel
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.protocol import Tokenizer
    from mens_exp.training.module import TrainingModule

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
    base, tokenizer, rows, data = _inputs(config, run, cache)
    certify_rows(config, run, rows, data, tokenizer, cache)
    start = _starting_adapter(config, run, base)
    from mens_exp.training.build import (
        build_backend,
        build_module,
        build_trainer,
        lightning_quiet,
    )

    with lightning_quiet():
        backend = build_backend(config, base)
        report_start(run, backend, console)
        if start is not None:
            backend.load_adapter(start.tensors)
        module = build_module(config, backend, data)
        early = prepared_early(config, run, backend, rows.heldout, tokenizer)
        scoring = None if early is None else first_items(early, run.manifest)
        trainer = build_trainer(config, run, max_steps=data.max_steps, score=scoring)
        certify_steps(config, run, module, data)
        _validate_before(run, trainer, module, data)
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        assert module.selected is not None, "training validates after its last step"
        step, loss = module.selected
        run.manifest.results.update(adapter_step=step, tuned_val_loss=loss)
        if not backend.peft_view_is_exact:
            with module.as_peft_view():
                run.manifest.results["peft_view_val_loss"] = _validate(trainer, module, data)
            note_peft_view(run)
    score(config, run, module.backend, rows.heldout, tokenizer, prepared=early)
    _results(run, trainer, module, data, plan)


def _inputs(
    config: RunConfig, run: Run, cache: Path
) -> tuple[BaseModel, Tokenizer, Rows, RowsDataModule]:
    """Make base model, tokenizer and encoded rows, and record what they are."""
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.model.resolve import resolve

    base = resolve(config.model, cache)
    tokenizer = tokenizer_of(config.tokenizer, base, run.dir)
    rows = load_rows(config.data, cache)
    keep_bad_rows(run.dir, rows)
    data = RowsDataModule(config, rows, tokenizer, cache)
    bound = f"the optimizer steps of {config.trainer.max_epochs} epochs"
    late = too_late(config, data.max_steps, bound)
    Problems.raise_if([*too_long(config, data.max_steps, bound), *late])
    inputs = describe(base, tokenizer, rows, data)
    refuse_changed(run.manifest.inputs, inputs)  # empty, unless this goes on with a run
    run.manifest.inputs.update(inputs)
    if rows.streamed:
        run.unknown("inputs.data.rows_sha256", "streamed rows; results.streamed is of those read")
    note_origin(config, run.manifest)
    atomic.write_text(run.dir.chat_template, tokenizer.chat_template)
    run.manifest.facts.update(
        seq_len=config.data.seq_len,
        micro_batch_size=config.data.micro_batch_size,
        packing_efficiency_frac=round(data.packing_efficiency_frac, 4),
        documents_per_block=round(data.documents_per_block, 2),
    )
    run.save()
    return base, tokenizer, rows, data


def _starting_adapter(config: RunConfig, run: Run, base: BaseModel) -> StartingAdapter | None:
    """Read the adapter that training starts from, and record what it is."""
    if config.lora.init_from is None:
        return None
    start = read(find(config.lora.init_from), family_for(config.model))
    Problems.raise_if(list(other_base(start, base.weights_sha256, base.name)))
    described = {
        "path": str(start.directory),
        "form": start.form,
        "adapter_sha256": start.sha256,
        "base_weights_sha256": start.base_weights_sha256,
    }
    refuse_changed(run.manifest.inputs.get("init_from", {}), described)
    run.manifest.inputs["init_from"] = described
    if start.base_weights_sha256 is None:
        run.unknown("inputs.init_from.base_weights_sha256", "a PEFT directory does not tell")
    run.save()
    return start


def _validate_before(
    run: Run, trainer: Trainer, module: TrainingModule, data: RowsDataModule
) -> None:
    """Validate the base, and the adapter that training starts from where it is not a new one."""
    results = run.manifest.results
    if "base_val_loss" not in results:
        with module.as_base():
            results["base_val_loss"] = _validate(trainer, module, data)
        run.save()
    if "init_from" in run.manifest.inputs and "initial_val_loss" not in results:
        results["initial_val_loss"] = _validate(trainer, module, data)
        run.save()


def _validate(trainer: Trainer, module: TrainingModule, data: RowsDataModule) -> float:
    trainer.validate(module, data, verbose=False)
    return module.validation["val/loss"]


def _results(
    run: Run,
    trainer: Trainer,
    module: TrainingModule,
    data: RowsDataModule,
    plan: dict[str, Any],
) -> None:
    """Write the figures of the run, measured beside predicted."""
    from mens_exp.training import memory_probe

    results = run.manifest.results
    note_bits_per_byte(module.config.objective, run, data)
    results.update(
        val_loss_change_frac=results["tuned_val_loss"] / results["base_val_loss"] - 1,
        steps=trainer.global_step,
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
