"""From a typed configuration to Lightning's objects, in dependency order."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import warnings
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import get_class, instantiate
from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint

from mens_exp.config.adapter import Selection
from mens_exp.config.callbacks import ScorecardConfig
from mens_exp.config.logger import NoLogger, WandbLogger
from mens_exp.config.objective import (
    AssistantObjective,
    CrossEntropyConfig,
    LastKObjective,
    ObjectiveConfig,
)
from mens_exp.errors import SetupError
from mens_exp.plan.ranks import ALONE
from mens_exp.training.atomic_checkpoint import AtomicCheckpointIO
from mens_exp.training.loggers import lightning_logger
from mens_exp.training.module import TrainingModule
from mens_exp.training.own_signals import keep_signals
from mens_exp.training.process_group import strategy_of
from mens_exp.training.sharding import is_sharded, sharded
from mens_exp.training.started_processes import StartedProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning import Callback

    from mens_exp.backends.protocol import Backend
    from mens_exp.config.callbacks import CallbackConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.evals.during import Measured
    from mens_exp.model.resolve import BaseModel
    from mens_exp.objective.causal import Objective
    from mens_exp.plan.ranks import Rank
    from mens_exp.training.record import RunRecord

# What one process does for all: it shows, and writes what all have.
_OF_THE_FIRST = frozenset(
    f"mens_exp.training.callbacks.{name}"
    for name in ("adapter_writer.AdapterWriter", "progress.Progress")
)

__all__ = ["build_backend", "build_module", "build_trainer", "device_of", "lightning_quiet"]


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
        from mens_exp.training.callbacks.logger_feed import LoggerFeed

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
