"""The work of every process of a training run, alone or with others: read, build, fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.artifacts import atomic
from mens_exp.artifacts.validation_losses import read_document_losses, write_document_losses
from mens_exp.config.rules.schedule import too_long
from mens_exp.config.rules.suite import too_late
from mens_exp.corpus.source import load_rows
from mens_exp.errors import Problems
from mens_exp.export.ollama import is_chatml
from mens_exp.layout.shape import family_for
from mens_exp.layout.starting_adapter import find, read
from mens_exp.plan.checks.adapter import other_base
from mens_exp.tasks.contracting import certify_steps, compared_whole
from mens_exp.tasks.early_scoring import first_items, prepared_early
from mens_exp.tasks.initialisation import note_peft_view, note_view_differences, report_start
from mens_exp.tasks.inputs import (
    describe,
    keep_bad_rows,
    note_origin,
    refuse_changed,
    tokenizer_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from lightning import Trainer

    from mens_exp.artifacts.validation_losses import DocumentLoss
    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.source import Rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.layout.starting_adapter import StartingAdapter
    from mens_exp.model.resolve import BaseModel
    from mens_exp.plan.ranks import Rank
    from mens_exp.tasks.run import Run
    from mens_exp.tasks.scoring import Prepared
    from mens_exp.tokenizer.protocol import Tokenizer
    from mens_exp.training.contract_probe import Reference
    from mens_exp.training.module import TrainingModule

__all__ = ["Fitted", "Inputs", "fit", "read_inputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The inputs of a run."""

    base: BaseModel
    tokenizer: Tokenizer
    rows: Rows
    data: RowsDataModule


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """The results of training; ``early`` has the scores from in between, if there were any."""

    trainer: Trainer
    module: TrainingModule
    early: Prepared | None


def read_inputs(config: RunConfig, run: Run, cache: Path) -> Inputs:
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
        tokenizer=config.tokenizer.name,
        seq_len=config.data.seq_len,
        micro_batch_size=config.data.micro_batch_size,
        packing_efficiency_frac=round(data.packing_efficiency_frac, 4),
        documents_per_block=round(data.documents_per_block, 2),
    )
    if data.epochs is not None:
        run.manifest.facts["epochs"] = data.epochs
    if config.backend.name == "burn":
        from mens_exp.backends.burn import objective_note

        note = objective_note(config.objective, is_chatml=is_chatml(tokenizer))
        run.manifest.facts["training_objective_note"] = note
    run.save()
    return Inputs(base=base, tokenizer=tokenizer, rows=rows, data=data)


def fit(
    config: RunConfig, run: Run, inputs: Inputs, rank: Rank, *, checkpoint: Path | None = None
) -> Fitted:
    """Validate the base, train, and validate what training ends with.

    All processes of a run go through this side by side; the first one also tries the first batches
    beforehand and scores in between, while the others wait for it.

    Args:
        config: the whole configuration.
        run: the open run.
        inputs: what was read.
        rank: which of the run's processes this is; they have joined already.
        checkpoint: training state to go on from.
    """
    start = _starting_adapter(config, run, inputs.base)
    from mens_exp.training.build import (
        build_backend,
        build_module,
        build_trainer,
        lightning_quiet,
    )
    from mens_exp.training.sharding import is_sharded

    data = inputs.data
    for stream in (data.train_dataloader(), data.val_dataloader()):
        stream.share(rank.rank, rank.world_size)
    compared: Reference | None = None

    def compare(whole: Backend) -> None:
        nonlocal compared
        module = build_module(config, whole, data)
        compared = compared_whole(config, run, inputs.base, module, data)

    with lightning_quiet():
        backend = build_backend(
            config,
            inputs.base,
            rank,
            while_whole=compare if rank.is_first else None,
        )
        report_start(run, backend, Console(stderr=True))
        if start is not None:
            backend.load_adapter(start.tensors)
        module = build_module(config, backend, data)
        early = scoring = None
        if rank.is_first:
            early = prepared_early(config, run, backend, inputs.rows.heldout, inputs.tokenizer)
            scoring = None if early is None else first_items(early, run.manifest)
        trainer = build_trainer(config, run, max_steps=data.max_steps, score=scoring, rank=rank)
        if rank.is_first or is_sharded(config, rank):  # no part of a base computes alone
            certify_steps(config, run, inputs.base, module, data, compared)
        _validate_before(run, trainer, module, data, rank)
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        assert module.selected is not None, "training validates after its last step"
        step, loss = module.selected
        run.manifest.results.update(adapter_step=step, tuned_val_loss=loss)
        if rank.is_first:
            _note_documents(run, "tuned", data, module.selected_validated)
        if not backend.peft_view_is_exact:
            with module.as_peft_view():
                run.manifest.results["peft_view_val_loss"] = _validate(trainer, module, data)
            note_peft_view(run)
        if rank.is_first:
            note_view_differences(config, run, module, data)
    _note_processes(run, rank)
    return Fitted(trainer=trainer, module=module, early=early)


def _note_processes(run: Run, rank: Rank) -> None:
    """Record the peak memory of each of several processes, in their order."""
    if rank.is_alone:
        return
    from mens_exp.training import memory_probe
    from mens_exp.training.process_group import told_by_all

    for name in ("peak_rss_bytes", "peak_cuda_bytes"):
        peaks = told_by_all(getattr(memory_probe, name)(), rank)
        if any(peak is not None for peak in peaks):
            run.manifest.results[f"{name}_of_processes"] = peaks


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
    run: Run, trainer: Trainer, module: TrainingModule, data: RowsDataModule, rank: Rank
) -> None:
    """Validate the base, and the adapter that training starts from where it is not a new one."""
    results = run.manifest.results
    if "base_val_loss" not in results:
        with module.as_base():
            loss = _validate(trainer, module, data)
        if rank.is_first:
            _note_documents(run, "base", data, module.validated)
        results["base_val_loss"] = loss  # after the documents: who has it does not validate again
        run.save()
    if "init_from" in run.manifest.inputs and "initial_val_loss" not in results:
        results["initial_val_loss"] = _validate(trainer, module, data)
        run.save()


def _note_documents(
    run: Run, condition: str, data: RowsDataModule, losses: torch.Tensor | None
) -> None:
    """Write the loss of each document, [documents, 2] as the module has them, to validation.jsonl.

    A resumed run keeps what its earlier attempt wrote of the base. Without losses, what an earlier
    attempt wrote under the same condition goes: it is of another validation.
    """
    path = run.dir.validation
    earlier = read_document_losses(path) if path.is_file() else []
    if losses is None and not earlier:
        return
    validated = [] if losses is None else losses[:, 1].nonzero()[:, 0].tolist()
    sums = [] if losses is None else losses[validated].tolist()
    made: list[DocumentLoss] = [
        {"item_id": name, "condition": condition, "loss": float(loss), "tokens": int(tokens)}
        for name, (loss, tokens) in zip(data.val_document_ids(validated), sums, strict=True)
    ]
    write_document_losses(path, [one for one in earlier if one["condition"] != condition] + made)


def _validate(trainer: Trainer, module: TrainingModule, data: RowsDataModule) -> float:
    trainer.validate(module, data, verbose=False)
    return module.validation["val/loss"]
