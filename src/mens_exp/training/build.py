"""Build the Lightning objects of a run from its typed configuration, in dependency order.

The module also contains the parts that have no configuration node: atomic checkpoints, Lightning's
loggers and the callback that feeds them, and a fit of only the first steps.
"""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
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
from mens_exp.artifacts.metrics import declare
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
from mens_exp.layout.shape import shape_of
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
    from mens_exp.objective.causal import Objective, TokenLoss
    from mens_exp.planning.machine import Rank
    from mens_exp.training.module import RunRecord

    Look = Callable[[int, dict[str, Any], dict[int, dict[str, Any]]], bool]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file, syncs and renames; the first process reads for all.

    The digest of the written file is recorded, and checked before anything is restored.
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
        """Read a checkpoint; other machines do not need access to the file."""
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
    """Build the configured Lightning logger, or return None if it is not one of Lightning's.

    Each attempt of a run writes to its own subdirectory, because Lightning's CSV logger would
    overwrite the files of the previous attempt.
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
    """Passes the settings, and the metrics of every step, to the trainer's loggers."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Log ``settings``, the whole configuration, as hyperparameters."""
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
    """Flatten to dotted paths; loggers accept plain values, so other values become strings."""
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


# Only the first process uses these: they display progress or write what all processes share.
_OF_THE_FIRST = frozenset(
    f"mens_exp.training.callbacks.{name}"
    for name in ("adapter_writer.AdapterWriter", "progress.Progress")
)


def device_of(accelerator: str, local_rank: int = 0) -> torch.device:
    """Choose the device; each of several processes on a machine has its own GPU.

    Raises:
        SetupError: a GPU was requested but none is available.
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
    """Load the base model and add the adapter, on the device of a process.

    Args:
        config: the whole configuration.
        base: the base model.
        rank: the rank of this process.
        while_whole: called with the model before its base is sharded, if it is sharded.
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
    """Combine backend and objective into the module, in training mode."""
    declare(config.objective.spec.metrics)
    module = TrainingModule(config, backend, _objective(config), total_steps=data.max_steps)
    module.validation_documents = len(data.val_documents)
    if config.objective.spec.is_likelihood:
        module.validated_bytes, _ = data.validated_bytes
    module.train()  # from_pretrained sets evaluation mode, and Lightning keeps it
    return module


def _objective(config: RunConfig) -> Objective | TokenLoss:
    """Build the objective from its own settings; the other settings select its tokens."""
    node = config.objective
    on_gpu = device_of(config.trainer.accelerator).type == "cuda"
    settings = node.spec.arguments(node, shape_of(config.model).vocab_size, on_gpu=on_gpu)
    made: Objective | TokenLoss = _made(node._target_, settings, name=node.name)
    return made


def _made(target: str, settings: dict[str, Any], **offered: Any) -> Any:
    """Instantiate a class with its settings, plus those offered arguments that it accepts."""
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
        score: scores the given number of suite items; without it, training makes no scorecard.
        rank: the rank of this process; the process group is already initialised.
    """
    trainer = config.trainer
    device = device_of(trainer.accelerator)
    on_cpu = device.type == "cpu"
    deterministic = on_cpu if trainer.deterministic is None else trainer.deterministic
    callbacks = _callbacks(config, run, score, rank)
    made = Trainer(
        accelerator="cpu" if on_cpu else "gpu",
        # Each process uses one GPU, but Lightning must know all GPUs of the machine.
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
    """Return micro-batches between validations; one step more than the run has disables them."""
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
        callbacks.insert(0, best)  # it must run before the adapter is written
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
    """Suppress Lightning's notices on the terminal; our own record covers each of them."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Modules in evaluation mode belong to the frozen base; torch's notice is caused by
            # Lightning.
            warnings.filterwarnings("ignore", message="Found .* module.s. in eval mode")
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
            # Shown if Slurm is installed; but we or torchrun start the processes of a run.
            warnings.filterwarnings("ignore", message="The `srun` command is available")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


class _FirstSteps(Callback):
    """Reports every finished step, and stops training when the observer asks for it."""

    def __init__(self, look: Look) -> None:
        self.look = look

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass the step's metrics and the resulting optimizer state to the observer."""
        del outputs, batch, batch_idx
        if pl_module.at_step_boundary:
            figures = {**pl_module.step_metrics, **pl_module.step_digests}
            state = trainer.optimizers[0].state_dict()["state"]
            trainer.should_stop = not self.look(trainer.global_step, figures, state)


def fit_first_steps(
    trainer: Trainer, module: TrainingModule, data: RowsDataModule, look: Look
) -> None:
    """Train without validation, on the whole run's schedule, until the observer stops it.

    Args:
        trainer: the trainer, built for the whole run.
        module: the module, built for the whole run.
        data: its rows.
        look: called after each optimizer step with the step number, the metrics under their
            telemetry names, and the optimizer state by parameter index and name; returns whether to
            continue.
    """
    trainer.limit_val_batches = 0
    trainer.callbacks.append(_FirstSteps(look))  # type: ignore[attr-defined]  # Lightning adds it
    trainer.fit(module, data)
