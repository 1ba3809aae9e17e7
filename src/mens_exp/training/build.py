"""Build Lightning's objects from a typed configuration, in dependency order.

Here are also their parts that no configuration names: checkpoints that are either whole or absent,
Lightning's loggers with the callback that feeds them, and a fit of the first steps alone.
"""

# Lightning hands a hook whatever module it trains; the one that build.py gives it is ours.
# mypy: disable-error-code="override"

from __future__ import annotations

import dataclasses
import inspect
import io
import logging
import warnings
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import get_class, instantiate
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import (
    record_checkpoint_digest,
    refuse_damaged_checkpoint,
    sha256_bytes,
)
from mens_exp.config.objective import (
    AssistantObjective,
    CrossEntropyConfig,
    LastKObjective,
    ObjectiveConfig,
)
from mens_exp.config.trainer import (
    CsvLogger,
    LoggerConfig,
    NoLogger,
    ScorecardConfig,
    Selection,
    TensorboardLogger,
    WandbLogger,
)
from mens_exp.errors import SetupError
from mens_exp.planning.machine import ALONE
from mens_exp.training.distributed import (
    StartedProcesses,
    is_sharded,
    keep_signals,
    sharded,
    strategy_of,
)
from mens_exp.training.module import TrainingModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning.pytorch.loggers import Logger

    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.config.trainer import CallbackConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.evals.attempts import Measured
    from mens_exp.model.sources import BaseModel
    from mens_exp.objective.causal import Objective
    from mens_exp.planning.machine import Rank
    from mens_exp.training.module import RunRecord

    Look = Callable[[int, dict[str, Any], dict[int, dict[str, Any]]], bool]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the place, syncs, and renames; the first of several processes reads for all.

    The digest of what was written is recorded, and checked before anything is restored.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint."""
        assert storage_options is None, "local files take no storage options"
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = buffer.getvalue()
        record_checkpoint_digest(target, sha256_bytes(content))
        atomic.write_bytes(target, content)

    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint; other machines need not see the file."""
        if not torch.distributed.is_initialized():
            refuse_damaged_checkpoint(Path(path))
            return super().load_checkpoint(path, *arguments, **options)
        box: list[Any] = [None]
        if torch.distributed.get_rank() == 0:
            refuse_damaged_checkpoint(Path(path))
            box = [super().load_checkpoint(path, *arguments, **options)]
        torch.distributed.broadcast_object_list(box, src=0)
        read: dict[str, Any] = box[0]
        return read


def lightning_logger(config: LoggerConfig, run: RunRecord) -> Logger | None:
    """Make the logger that the configuration names, or None where it is none of Lightning's.

    Each attempt of a run writes below its own name: Lightning's CSV logger would overwrite what
    the attempt before has left.
    """
    attempt = f"attempt_{max(1, len(run.manifest.attempts))}"
    if isinstance(config, CsvLogger):
        from lightning.pytorch.loggers import CSVLogger

        return CSVLogger(
            run.dir.path,
            name=run.dir.csv.name,
            version=attempt,
            flush_logs_every_n_steps=config.flush_every_n_steps,
        )
    if isinstance(config, TensorboardLogger):
        from lightning.pytorch.loggers import TensorBoardLogger

        return TensorBoardLogger(
            run.dir.path, name=run.dir.tensorboard.name, version=attempt, default_hp_metric=False
        )
    return None


class LoggerFeed(Callback):
    """Hands the settings and the metrics of every step to the trainer's loggers."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Feed ``settings``, the whole configuration, as hyperparameters."""
        self.settings = dict(_flat_settings(settings))

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Log the hyperparameters by dotted path."""
        del pl_module
        for logger in trainer.loggers:
            logger.log_hyperparams(self.settings)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics of a finished step."""
        del outputs, batch, batch_idx
        if pl_module.at_step_boundary:
            step, scores = pl_module.scored
            values = pl_module.step_metrics | (scores if step == trainer.global_step else {})
            for logger in trainer.loggers:
                logger.log_metrics(dict(values), step=trainer.global_step)


def _flat_settings(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten to dotted paths; loggers take plain values, so the rest is spelled out."""
    entries: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            entries += _flat_settings(value, f"{prefix}{name}.")
        else:
            plain = value is None or isinstance(value, bool | int | float | str)
            entries.append(
                (f"{prefix}{name}", value if plain else str(getattr(value, "value", value)))
            )
    return entries


# What one process does for all: it shows, and writes what all have.
_OF_THE_FIRST = frozenset(
    f"mens_exp.training.callbacks.{name}"
    for name in ("adapter_writer.AdapterWriter", "progress.Progress")
)


def device_of(accelerator: str, local_rank: int = 0) -> torch.device:
    """Choose the device; of several processes on a machine, each has a GPU of its own.

    Raises:
        SetupError: a GPU was asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if accelerator == "gpu" and not has_gpu:
        raise SetupError(
            "no CUDA device is usable",
            where="trainer",
            found=f"torch {torch.__version__}",
            expected="a GPU, its driver, and a CUDA build of torch",
            remedy="use trainer=auto or trainer=cpu, or see README, CUDA machines",
        )
    on_gpu = has_gpu and accelerator != "cpu"
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")


def build_backend(
    config: RunConfig,
    base: BaseModel,
    rank: Rank = ALONE,
    *,
    while_whole: Callable[[Backend], None] | None = None,
) -> Backend:
    """Load the base model and put the adapter on it, on the device of a process.

    Args:
        config: the whole configuration.
        base: the base model.
        rank: which of the run's processes this is.
        while_whole: called with the graph before its base is taken apart, where it is.
    """
    cls: Any = get_class(config.backend._target_)  # Hydra's own spelling
    device = device_of(config.trainer.accelerator, rank.local_rank)
    made: Any

    def whole(at: torch.device) -> Any:
        found = cls(config, base, device, loaded_on=at)
        if while_whole is not None:
            while_whole(found)
        return found

    if is_sharded(config, rank):
        made = sharded(config, rank, device, whole)
    else:
        made = cls(config, base, device)
    base.refuse_changed()
    backend: Backend = made
    return backend


def build_module(config: RunConfig, backend: Backend, data: RowsDataModule) -> TrainingModule:
    """Put backend and objective together, in training mode."""
    module = TrainingModule(config, backend, _objective(config), total_steps=data.max_steps)
    module.validation_documents = len(data.val_documents)
    if isinstance(config.objective, CrossEntropyConfig):
        module.validated_bytes, _ = data.validated_bytes
    module.train()  # from_pretrained leaves evaluation mode on, and Lightning keeps what it finds
    return module


def _objective(config: RunConfig) -> Objective:
    """Make the objective of its own settings; the others say which tokens it is given."""
    node = config.objective
    labelling = isinstance(node, AssistantObjective | LastKObjective)
    kind = type(node) if labelling else ObjectiveConfig
    ours = {field.name for field in fields(kind)} - {"chunk_tokens"}  # what chooses the tokens
    settings = {f.name: getattr(node, f.name) for f in fields(node) if f.name not in ours}
    made: Objective = _made(node._target_, settings, name=node.name)
    return made


def _made(target: str, settings: dict[str, Any], **offered: Any) -> Any:
    """Make an object of its settings, and of what is offered as far as its class takes it."""
    taken = inspect.signature(get_class(target)).parameters
    extra = {name: value for name, value in offered.items() if name in taken}
    return instantiate({"_target_": target, **settings}, _convert_="all", **extra)


def build_trainer(
    config: RunConfig,
    run: RunRecord,
    *,
    max_steps: int,
    score: Callable[[int], Measured] | None = None,
    rank: Rank = ALONE,
) -> Trainer:
    """Build the Lightning Trainer with the callbacks that the configuration names.

    Args:
        config: the whole configuration.
        run: the open run.
        max_steps: optimizer steps of the run.
        score: scores so many items of the suite; without it no scorecard is made in training.
        rank: which of the run's processes this is; they have joined already.
    """
    trainer = config.trainer
    device = device_of(trainer.accelerator)
    on_cpu = device.type == "cpu"
    deterministic = on_cpu if trainer.deterministic is None else trainer.deterministic
    callbacks = _callbacks(config, run, score, rank)
    made = Trainer(
        accelerator="cpu" if on_cpu else "gpu",
        # Each process has one GPU, and Lightning is to know all of a machine's.
        devices=rank.local_world_size,
        num_nodes=rank.world_size // rank.local_world_size,
        strategy=strategy_of(config, rank),
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=trainer.accumulate_grad_batches // rank.world_size,
        gradient_clip_val=trainer.gradient_clip_val or None,
        val_check_interval=_validation_interval(config, max_steps) // rank.world_size,
        check_val_every_n_epoch=None,
        deterministic=deterministic,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO(), StartedProcesses(rank)],
        logger=(lightning_logger(config.logger, run) if rank.is_first else None) or False,
        log_every_n_steps=1,
        enable_checkpointing=any(isinstance(one, Checkpoint) for one in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=run.dir.path,
    )
    keep_signals(made)
    return made


def _validation_interval(config: RunConfig, max_steps: int) -> int:
    """Return micro-batches between validations; one more step than there are means none."""
    interval = config.trainer.val_check_interval
    return interval or (max_steps + 1) * config.trainer.accumulate_grad_batches


def _callbacks(
    config: RunConfig, run: RunRecord, score: Callable[[int], Measured] | None, rank: Rank
) -> list[Callback]:
    callbacks = [
        _callback(node, run, score)
        for node in config.callbacks.values()
        if (score is not None or not isinstance(node, ScorecardConfig))
        and (rank.is_first or node._target_ not in _OF_THE_FIRST)  # Hydra's own spelling
    ]
    if config.adapter.select is Selection.best:
        from mens_exp.training.callbacks.best_adapter import BestAdapter

        metric = config.adapter.metric
        best = BestAdapter(run, metric if metric == "val/loss" else f"eval/{metric}")
        callbacks.insert(0, best)  # what writes the adapter must come after it
    if not rank.is_first:
        return callbacks
    if isinstance(config.logger, WandbLogger):
        from mens_exp.training.callbacks.wandb_mirror import WandbMirror

        callbacks.append(WandbMirror(logger=config.logger, run=run))
    elif not isinstance(config.logger, NoLogger):
        callbacks.append(LoggerFeed(settings=dataclasses.asdict(config)))
    return callbacks


def _callback(
    node: CallbackConfig, run: RunRecord, score: Callable[[int], Measured] | None
) -> Callback:
    settings = {f.name: getattr(node, f.name) for f in fields(node) if f.name != "_target_"}
    offered = {"score": score} if isinstance(node, ScorecardConfig) else {}
    made: Callback = _made(node._target_, settings, run=run, **offered)
    return made


@contextmanager
def lightning_quiet() -> Iterator[None]:
    """Keep Lightning's notices off the terminal; each is answered by our own record."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Modules in evaluation mode are the frozen base's; torch's notice is Lightning's own.
            warnings.filterwarnings("ignore", message="Found .* module.s. in eval mode")
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
            # Where Slurm is installed; processes of a run are started by us or by torchrun.
            warnings.filterwarnings("ignore", message="The `srun` command is available")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


class _FirstSteps(Callback):
    """Shows every finished step, and ends training as soon as there is nothing more to see."""

    def __init__(self, look: Look) -> None:
        self.look = look

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the figures of the step, and the optimizer's state after it."""
        del outputs, batch, batch_idx
        if pl_module.at_step_boundary:
            figures = {**pl_module.step_metrics, **pl_module.step_digests}
            state = trainer.optimizers[0].state_dict()["state"]
            trainer.should_stop = not self.look(trainer.global_step, figures, state)


def fit_first_steps(
    trainer: Trainer, module: TrainingModule, data: RowsDataModule, look: Look
) -> None:
    """Train without validating, under the whole run's schedule, until told to stop.

    Args:
        trainer: built for the whole run.
        module: likewise.
        data: its rows.
        look: called after each optimizer step with its number, its figures by their names in
            telemetry, and the optimizer's state by number of the parameter and name; returns
            whether to go on.
    """
    trainer.limit_val_batches = 0
    trainer.callbacks.append(_FirstSteps(look))  # type: ignore[attr-defined]  # Lightning adds it
    trainer.fit(module, data)
