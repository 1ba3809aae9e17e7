"""Read inputs, build the model, certify the data, and fit: the work of every training process.

The data-contract certificate is measured, recorded and judged before step 1. Initialisations other
than plain LoRA, and the exactness of PEFT views, are recorded.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.data_contract import DataContract, StoredReference
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.provenance import code_digest
from mens_exp.artifacts.telemetry import read_document_losses, write_document_losses
from mens_exp.config.lora import PromptTuningConfig
from mens_exp.config.objective import RewardScale
from mens_exp.config.quant import QUANTIZERS
from mens_exp.config.rules.lora import allocated_steps_problems
from mens_exp.config.rules.optim import warmup_problems
from mens_exp.config.rules.suite import late_scorecard_problems
from mens_exp.corpus import contract_rules
from mens_exp.corpus.data_contract import heldout_part, overlap_part, rows_part, token_part
from mens_exp.corpus.source import cache_key, labelling_of, load_rows
from mens_exp.corpus.split import Side
from mens_exp.errors import DataError, Problems, Refusals, TrainingError
from mens_exp.evals.suite import frozen_suite
from mens_exp.export.gguf import is_chatml
from mens_exp.layout.shape import family_for
from mens_exp.layout.starting_adapter import find, read
from mens_exp.planning.checks.adapter import other_base
from mens_exp.planning.memory import is_in_parts
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import terminal
from mens_exp.report.document import Tone
from mens_exp.rows.rewards import groups_of
from mens_exp.tasks.inputs import (
    describe,
    keep_bad_rows,
    note_origin,
    read_teacher,
    refuse_changed,
    tokenizer_of,
)
from mens_exp.tasks.scoring import first_items, prepared_early

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from lightning import Trainer

    from mens_exp.artifacts.data_contract import OverlapPart
    from mens_exp.artifacts.telemetry import DocumentLoss
    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.config.suite import SuiteConfig
    from mens_exp.corpus.row_files import Rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.errors import MensError
    from mens_exp.layout.starting_adapter import StartingAdapter
    from mens_exp.model.sources import BaseModel
    from mens_exp.planning.machine import Rank
    from mens_exp.tasks.run import Run
    from mens_exp.tasks.scoring import Prepared
    from mens_exp.tokenizer.load import Tokenizer
    from mens_exp.training.contract_probe import Reference
    from mens_exp.training.module import TrainingModule

_REFERENCE = "reference"  # directory of the cache, for comparisons with transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The inputs of a run."""

    base: BaseModel
    tokenizer: Tokenizer
    rows: Rows
    data: RowsDataModule
    teacher: BaseModel | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """The results of training; ``early`` has the scores made during training, if any."""

    trainer: Trainer
    module: TrainingModule
    early: Prepared | None


def read_inputs(config: RunConfig, run: Run, cache: Path) -> Inputs:
    """Prepare base model, tokenizer and encoded rows, and record them."""
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.model.sources import resolve

    base = resolve(config.model, cache)
    tokenizer = tokenizer_of(config.tokenizer, base, run.dir)
    rows = load_rows(config.data, cache)
    keep_bad_rows(run.dir, rows)
    data = RowsDataModule(config, rows, tokenizer, cache)
    if config.objective.spec.compares_groups:  # refuses incomplete groups before training
        for documents in (data.train_documents, data.val_documents):
            groups_of(documents, RewardScale.none)
    bound = f"the optimizer steps of {config.trainer.max_epochs} epochs"
    late = late_scorecard_problems(config, data.max_steps, bound)
    short = allocated_steps_problems(config.lora, data.max_steps, bound)
    Problems.raise_if([*warmup_problems(config, data.max_steps, bound), *short, *late])
    teacher = read_teacher(config, base, cache)
    inputs = describe(base, tokenizer, rows, data, teacher)
    refuse_changed(run.manifest.inputs, inputs)  # empty, unless a run is resumed
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
    return Inputs(base=base, tokenizer=tokenizer, rows=rows, data=data, teacher=teacher)


def fit(
    config: RunConfig, run: Run, inputs: Inputs, rank: Rank, *, checkpoint: Path | None = None
) -> Fitted:
    """Validate the base, train, and validate the result.

    All processes of a run execute this together. The first one also probes the first batches
    beforehand and scores during training, while the others wait.

    Args:
        config: the whole configuration.
        run: the open run.
        inputs: the inputs of the run.
        rank: the rank of this process; the process group is already initialised.
        checkpoint: training state to resume from.
    """
    start = _starting_adapter(config, run, inputs.base)
    from mens_exp.training.build import (
        build_backend,
        build_module,
        build_trainer,
        lightning_quiet,
    )
    from mens_exp.training.compiling import compile_layers
    from mens_exp.training.distributed import is_sharded
    from mens_exp.training.precompute import teacher_for

    data = inputs.data
    for stream in (data.train_dataloader(), data.val_dataloader()):
        stream.share(rank.rank, rank.world_size)
    compared: Reference | None = None

    def compare(whole: Backend) -> None:
        nonlocal compared
        module = build_module(config, whole, data)
        compared = compared_whole(config, run, inputs.base, module, data)

    teacher = teacher_for(config, run, inputs.teacher, data, rank)
    _say_stage("loading the base model", rank)
    with lightning_quiet():
        backend = build_backend(
            config,
            inputs.base,
            rank,
            while_whole=compare if rank.is_first else None,
        )
        if start is not None:
            backend.load_adapter(start.tensors)
        run.manifest.facts.update(start_from_rows(config, backend, data, checkpoint))
        report_start(run, backend)
        module = build_module(config, backend, data, teacher=teacher, rank=rank)
        early = scoring = None
        if rank.is_first:
            early = prepared_early(config, run, backend, inputs.rows.heldout, inputs.tokenizer)
            scoring = None if early is None else first_items(early, run.manifest)
        trainer = build_trainer(config, run, max_steps=data.max_steps, score=scoring, rank=rank)
        if rank.is_first or is_sharded(config, rank):  # a sharded base needs all processes
            certify_steps(config, run, inputs.base, module, data, rank, compared)
        compute_reference(config, run, inputs.base, module, data, rank)
        _validate_before(run, trainer, module, data, rank)
        compile_layers(config, run, backend, data)
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        if module.selected is None:  # otherwise training validates after its last step
            raise TrainingError(
                "training stopped before its first step",
                where="callbacks",
                found="a callback that asked for it, or trainer.max_time",
                expected="at least one optimizer step",
                remedy="give it more time, or drop the callback",
            )
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
    module.teacher = None  # scoring needs its memory
    _note_processes(run, rank)
    return Fitted(trainer=trainer, module=module, early=early)


def start_from_rows(
    config: RunConfig, backend: Backend, data: RowsDataModule, checkpoint: Path | None = None
) -> dict[str, Any]:
    """Set a new adapter's values that depend on rows or tokenizer; return facts for the record."""
    lora, init = config.lora, config.lora.init.spec
    if isinstance(lora, PromptTuningConfig) and lora.prompt_tuning_init_text:
        from mens_exp.lora.prompt_tuning import start_from_text

        return start_from_text(backend, data.tokenizer, lora.prompt_tuning_init_text)
    if checkpoint is not None or not init.from_rows:
        return {}
    if init.from_gradients:
        from mens_exp.training.data_driven_init import start_from_gradients

        return start_from_gradients(config, backend, data.train_dataloader())
    from mens_exp.training.data_driven_init import start_from_inputs

    return start_from_inputs(backend, data.train_dataloader())


def compute_reference(
    config: RunConfig,
    run: Run,
    base: BaseModel,
    module: TrainingModule,
    data: RowsDataModule,
    rank: Rank,
) -> None:
    """Compute log-likelihoods before training, if the run or its objective asks for it."""
    spec = config.objective.spec
    if spec.compares_groups:
        from mens_exp.training.precompute import known_answers

        module.known_answers = known_answers(run, module, data, rank)
    elif spec.needs_reference and spec.passes_before(config.objective):
        from mens_exp.training.precompute import known_reference

        module.known_reference = known_reference(config, run, base, module, data, rank)


def _note_processes(run: Run, rank: Rank) -> None:
    """Record the peak memory of each process, in rank order."""
    if rank.is_alone:
        return
    from mens_exp.artifacts import host
    from mens_exp.training.distributed import all_gather

    for name in ("peak_rss_bytes", "peak_cuda_bytes"):
        peaks = all_gather(getattr(host, name)(), rank)
        if any(peak is not None for peak in peaks):
            run.manifest.results[f"{name}_of_processes"] = peaks


def _starting_adapter(config: RunConfig, run: Run, base: BaseModel) -> StartingAdapter | None:
    """Read the adapter that training starts from, and record it."""
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
        run.unknown("inputs.init_from.base_weights_sha256", "a PEFT directory does not record it")
    run.save()
    return start


def _validate_before(
    run: Run, trainer: Trainer, module: TrainingModule, data: RowsDataModule, rank: Rank
) -> None:
    """Validate the base, and the initial adapter unless it is new."""
    results = run.manifest.results
    if "base_val_loss" not in results:
        _say_stage("validating the base model", rank)
        with module.as_base():
            loss = _validate(trainer, module, data)
        module.refuse_unfinite(loss)
        if rank.is_first:
            _note_documents(run, "base", data, module.validated)
        results["base_val_loss"] = loss  # last: its presence prevents a second validation
        run.save()
    if "init_from" in run.manifest.inputs and "initial_val_loss" not in results:
        results["initial_val_loss"] = _validate(trainer, module, data)
        run.save()


def _say_stage(what: str, rank: Rank) -> None:
    """Print the stage that begins, for a user who waits for the first step."""
    if rank.is_first:
        terminal.say(f"{what} …", Tone.QUIET, on=terminal.console(stderr=True))


def _note_documents(
    run: Run, condition: str, data: RowsDataModule, losses: torch.Tensor | None
) -> None:
    """Write the loss of each document ([documents, 2], as in the module) to validation.jsonl.

    A resumed run keeps its earlier entries for the base. If there are no losses, entries of an
    earlier attempt under the same condition are removed, because they belong to another validation.
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


def certify_rows(
    config: RunConfig, run: Run, rows: Rows, data: RowsDataModule, tokenizer: Tokenizer, cache: Path
) -> None:
    """Record the encoded rows' figures and refuse those over a limit; a passed run skips this.

    Raises:
        GateError: a limit is exceeded.
        Refusals: several limits are exceeded.
    """
    known = run.manifest.data_contract
    if known is not None and not known["violations"]:
        return
    key = cache_key(config, rows, Side.TRAIN, tokenizer)
    documents, limits, labelling = data.train_documents, config.data.contract, labelling_of(config)
    kept = token_part(
        rows.train, documents, tokenizer, cache=cache, key=key, counts=data.train_counts
    )
    contract = DataContract(
        tokens=kept.tokens,
        rows=rows_part(rows, documents, tokenizer, labelling),
        overlap=[part for part in (heldout_part(rows), suite_part(config.suite, rows)) if part],
        probe=None,
        limits=dataclasses.asdict(limits),
        unknown={**kept.unknown, "probe": "not reached: it runs just before step 1"},
    )
    if not contract.overlap:
        contract.unknown["overlap"] = "no row is held out, and no suite has its own items"
    parts, notes = contract.overlap, [*contract_rules.notes_of_tokens(contract.tokens, labelling)]
    if parts and len(rows.heldout) and not config.suite.spec.from_rows:  # nothing scores them
        of_heldout, *parts = parts
        notes += contract_rules.notes_of_overlap(of_heldout, limits)
    run.manifest.notes += [note for note in notes if note not in run.manifest.notes]
    found = [
        *contract_rules.of_tokens(contract.tokens, limits, labelling),
        *contract_rules.of_rows(contract.rows, limits),
        *(one for part in parts for one in contract_rules.of_overlap(part, limits)),
    ]
    _record(run, contract, found)


def certify_steps(
    config: RunConfig,
    run: Run,
    base: BaseModel,
    module: TrainingModule,
    data: RowsDataModule,
    rank: Rank,
    compared: Reference | None = None,
) -> None:
    """Probe the model with the first batches, once per run, and refuse errors over tolerance.

    Args:
        config: the whole configuration.
        run: the open run.
        base: its base model.
        module: the module to be trained.
        data: the rows.
        rank: the rank of this process.
        compared: the result of `compared_whole`, for a base that is sharded now.

    Raises:
        GateError: a probe failed.
        Refusals: several probes failed.
    """
    node = run.manifest.data_contract
    assert node is not None, "the rows come first"
    contract = DataContract(**node)
    # Left by killed processes; their own runs do not write the same file again when resumed.
    atomic.remove_stale(writable_cache() / _REFERENCE)
    if contract.probe is not None:
        return
    if not config.data.contract.probe:
        contract.unknown["probe"] = "switched off by data.contract.probe=false"
        _record(run, contract, [])
        return
    from mens_exp.training.contract_probe import probe

    _say_stage("checking the first batches", rank)
    kept = _reference_path(config, run, base, module)
    known = _known_reference(kept)
    contract.probe = probe(config, module, data, compared if known is None else (known.part, None))
    del contract.unknown["probe"]
    _record(run, contract, list(contract_rules.of_probe(contract.probe)))
    found = contract.probe["reference"]
    if known is None and found is not None:  # within the tolerances, or _record would have raised
        why_not = StoredReference(part={**found, "from_cache": True}).keep(kept)
        run.manifest.notes += [] if why_not is None else [why_not]


def compared_whole(
    config: RunConfig, run: Run, base: BaseModel, module: TrainingModule, data: RowsDataModule
) -> Reference | None:
    """Compare the model with transformers' before its base is sharded.

    Args:
        config: the whole configuration.
        run: the open run.
        base: its base model.
        module: the module to be trained, with its complete base.
        data: the rows.

    Returns:
        None if the result is already known, or nothing is to be probed.
    """
    node = run.manifest.data_contract
    assert node is not None, "the rows come first"
    if DataContract(**node).probe is not None or not config.data.contract.probe:
        return None
    from mens_exp.training.contract_probe import compare

    kept = _reference_path(config, run, base, module)
    return compare(module, data) if _known_reference(kept) is None else None


def _reference_path(config: RunConfig, run: Run, base: BaseModel, module: TrainingModule) -> Path:
    """Return the cache path of the transformers comparison for runs of the same model and code.

    Weights do not define the model: config.json, and code next to it, determine its architecture.
    """
    graph = sorted([*base.directory.glob("*.py"), base.directory / "config.json"])
    # A base to be sharded or offloaded is complete only in host memory.
    is_moved = is_in_parts(config) or config.model.offload
    device = "cpu" if is_moved else next(module.parameters()).device.type
    key = {
        "base": run.manifest.inputs["base_weights_sha256"],
        "graph": {file.name: sha256_file(file) for file in graph},
        "checkpointing": config.model.gradient_checkpointing,
        "kernels": module.backend.facts().get("kernels"),
        "backend": config.backend._target_,  # Hydra's own spelling
        "quant": repr(config.quant),
        "lora": repr(config.lora),
        "packing": config.data.packing,
        "device": device,
        "packages": run.manifest.provenance["packages"],
        "code": _code(),
    }
    return writable_cache() / _REFERENCE / f"{digest(key)}.json"


_code = functools.cache(code_digest)  # of the code that this process has loaded


def _known_reference(path: Path) -> StoredReference | None:
    try:
        return StoredReference.read(path)
    except (DataError, Problems):
        return None


def suite_part(
    suite: SuiteConfig, rows: Rows, *, calls_functions: bool = False
) -> OverlapPart | None:
    """Compare training rows with the items of a suite.

    Args:
        suite: the suite; the result is None if it has no items itself.
        rows: rows of the run.
        calls_functions: whether Python functions named in task files may run in this process.
    """
    if not suite.spec.has_items:
        return None
    items = frozen_suite(suite, calls_functions=calls_functions).items
    texts = ((item.id, f"{item.prompt}\n{item.reference}") for item in items)
    return overlap_part(rows.train, texts, f"suite={suite.name}")


def _record(run: Run, contract: DataContract, found: Sequence[MensError]) -> None:
    contract.violations += map(str, found)
    run.manifest.data_contract = contract.as_json()
    run.save()
    Refusals.raise_if(found)


def report_start(run: Run, backend: Backend) -> None:
    """Print and record the quantization error before and after initialisation, per layer."""
    errors = backend.quantization_errors()
    if not errors:
        return
    before, after = (mean(error[side] for error in errors.values()) for side in (0, 1))
    layers = {name: {"before": b, "after": a} for name, (b, a) in errors.items()}
    run.telemetry.emit("initialisation", {"before": before, "after": after, "layers": layers})
    kind = backend.facts()["lora_init"]
    terminal.say(
        f"{kind}: quantization error {before:.4f} before, {after:.4f} after "
        f"(relative, mean of {len(errors)} modules; each in {run.dir.telemetry.name})",
        on=terminal.console(stderr=True),
    )


def note_peft_view(run: Run) -> None:
    """Note the PEFT directory's validation loss on the plainly quantized base in the manifest."""
    results, spec = run.manifest.results, QUANTIZERS.known(run.manifest.facts.get("quant", "none"))
    why = spec.differs_elsewhere if spec is not None else None
    why = why or "the base of this run was changed by its initialisation"
    losses = (results["peft_view_val_loss"], results["tuned_val_loss"])
    note = (
        f"{why}: adapter/peft on the plainly quantized base has a validation loss of "
        f"{losses[0]:.4f}, the trained model of {losses[1]:.4f}"
    )
    if note not in run.manifest.notes:  # a resumed run measures again
        run.manifest.notes.append(note)


def note_view_differences(
    config: RunConfig, run: Run, module: TrainingModule, data: RowsDataModule
) -> None:
    """Record the difference of the PEFT directory from the trained model, and of rounding alone."""
    if not module.backend.has_peft_view:
        return
    if not config.data.contract.probe:
        run.unknown("results.peft_view_difference", "data.contract.probe=false")
        return
    from mens_exp.training.peft_view import view_differences

    found, why_not = view_differences(module, data)
    run.manifest.results.update(found)
    if why_not is not None:
        missing = "peft_view_difference_f32" if found else "peft_view_difference"
        run.unknown(f"results.{missing}", why_not)
