"""Build the Lightning objects of a run from its typed configuration, in dependency order.

The module also contains the parts that have no configuration node: atomic checkpoints and a fit of
only the first steps.
"""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

import io
import logging
import warnings
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import get_class, instantiate
from lightning import Callback
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, Timer
from lightning.pytorch.plugins import Precision, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from mens_exp.artifacts import atomic, host
from mens_exp.artifacts.digest import (
    record_checkpoint_digest,
    refuse_damaged_checkpoint,
    sha256_bytes,
)
from mens_exp.artifacts.metrics import declare
from mens_exp.backends.frozen_base import Teacher
from mens_exp.config.quant import ComputeDtype
from mens_exp.config.schedule import LrRangeConfig
from mens_exp.config.trainer import ScorecardConfig, Selection
from mens_exp.errors import RequestError, SetupError
from mens_exp.layout.shape import shape_of
from mens_exp.objective.distillation import KnownTeachers
from mens_exp.planning.machine import ALONE
from mens_exp.quant.binding import binding_of
from mens_exp.training.adalora import RankAllocation
from mens_exp.training.distributed import (
    StartedProcesses,
    is_sharded,
    keep_signals,
    sharded,
    strategy_of,
)
from mens_exp.training.hosted_module import hosting
from mens_exp.training.loggers import (
    LoggerFeed,
    RunTrainer,
    build_loggers,
    first_record,
    offered_to,
)
from mens_exp.training.module import TrainingModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lightning import Trainer
    from lightning.pytorch.profilers import Profiler

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


_OURS = "mens_exp.training.callbacks."
_WRITER = f"{_OURS}telemetry.TelemetryWriter"
# Only the first process uses these: they display progress or write what all processes share.
_OF_THE_FIRST = frozenset(
    f"{_OURS}{name}" for name in ("adapter_writer.AdapterWriter", "progress.Progress")
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
        while_whole: called with the model before its base is sharded or offloaded, if it is.
    """
    cls: Any = get_class(config.backend._target_)  # Hydra's own spelling
    host.collect_as_usual()
    device = device_of(config.trainer.accelerator, rank.local_rank)
    made: Any

    def whole(at: torch.device) -> Any:
        found = cls(config, base, device, loaded_on=at)
        if while_whole is not None:
            while_whole(found)
        return found

    if is_sharded(config, rank):
        made = sharded(config, rank, device, whole)
    elif config.model.offload and device.type == "cuda":
        with binding_of(config.quant.spec).quantizing_on(device):
            made = whole(torch.device("cpu"))
        made.offload(device)
    else:
        made = cls(config, base, device)
    base.refuse_changed()
    backend: Backend = made
    return backend


def build_module(
    config: RunConfig,
    backend: Backend,
    data: RowsDataModule,
    *,
    teacher: BaseModel | KnownTeachers | None = None,
    rank: Rank = ALONE,
) -> TrainingModule:
    """Combine backend and objective into the module, in training mode.

    Args:
        config: the whole configuration.
        backend: the model to train.
        data: the rows.
        teacher: the teacher model, or its cached top tokens, if the objective has one.
        rank: the rank of this process.
    """
    declare(config.objective.spec.metrics)
    module = _module(config, backend, objective_of(config), total_steps=data.max_steps)
    if config.lora.spec.allocates and backend.has_adapter:
        parameters = backend.trainable()
        module.ranks = RankAllocation(config.lora, parameters, total_steps=data.max_steps)
    module.validation_documents = len(data.val_documents)
    if config.objective.spec.is_likelihood:
        module.validated_bytes, _ = data.validated_bytes
    if isinstance(teacher, KnownTeachers):
        module.known_teachers = teacher
    elif teacher is not None:
        module.teacher = Teacher(
            config, teacher, device_of(config.trainer.accelerator, rank.local_rank)
        )
    module.train()  # from_pretrained sets evaluation mode, and Lightning keeps it
    return module


def _module(
    config: RunConfig, backend: Backend, objective: Objective | TokenLoss, *, total_steps: int
) -> TrainingModule:
    """Build the module: ours, a subclass of it, or a user's LightningModule hosted by ours."""
    node = config.module
    cls: Any = get_class(node._target_)  # Hydra's own spelling
    settings = {f.name: getattr(node, f.name) for f in fields(node) if f.name != "_target_"}
    if not issubclass(cls, TrainingModule):
        return hosting(cls, settings)(config, backend, objective, total_steps=total_steps)
    made: TrainingModule = cls(config, backend, objective, total_steps=total_steps, **settings)
    return made


def objective_of(config: RunConfig) -> Objective | TokenLoss:
    """Build the objective from its own settings; the other settings select its tokens."""
    node = config.objective
    on_gpu = device_of(config.trainer.accelerator).type == "cuda"
    settings = node.spec.arguments(node, shape_of(config.model).vocab_size, on_gpu=on_gpu)
    made: Objective | TokenLoss = _made(node._target_, settings, name=node.name)
    return made


def _made(target: str, settings: dict[str, Any], **offered: Any) -> Any:
    """Instantiate a class with its settings, plus those offered arguments that it accepts."""
    extra = offered_to(get_class(target), offered)
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
    if trainer.max_time is not None:
        callbacks.append(Timer(duration=trainer.max_time, verbose=False))
    callbacks.append(StopsAfterWholeSteps(run))
    loggers = build_loggers(config, run, rank)
    callbacks.insert(0, LoggerFeed(first_record(loggers), config))
    made = RunTrainer(
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
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        benchmark=trainer.benchmark,
        inference_mode=trainer.inference_mode,
        limit_val_batches=trainer.limit_val_batches,
        min_steps=trainer.min_steps,
        min_epochs=0,  # with min_steps alone, Lightning waits for the end of the only epoch
        detect_anomaly=trainer.detect_anomaly,
        sync_batchnorm=bool(trainer.sync_batchnorm),
        profiler=_profiler(config, run),
        plugins=_plugins(config, rank),
        logger=loggers,
        log_every_n_steps=trainer.log_every_n_steps,
        enable_checkpointing=_has(callbacks, Checkpoint),
        enable_progress_bar=trainer.enable_progress_bar or _has(callbacks, ProgressBar),
        enable_model_summary=trainer.enable_model_summary,
        enable_autolog_hparams=trainer.enable_autolog_hparams,
        num_sanity_val_steps=trainer.num_sanity_val_steps,
        use_distributed_sampler=False,
        default_root_dir=run.dir.path,
    )
    keep_signals(made)
    return made


def _has(callbacks: Sequence[Callback], kind: type) -> bool:
    return any(isinstance(one, kind) for one in callbacks)


class ComputeFormat(Precision):
    """Precision plugin that only names the format; the backend computes in it."""

    def __init__(self, config: RunConfig) -> None:
        """Name the format of ``quant.compute_dtype`` as Lightning does."""
        is_bf16 = config.quant.compute_dtype is ComputeDtype.bf16
        self.precision = "bf16-mixed" if is_bf16 else "32-true"


def _plugins(config: RunConfig, rank: Rank) -> list[Any]:
    """Build our plugins and the user's; a precision plugin of the user's replaces ours."""
    own = [instantiate(one, _convert_="all") for one in config.trainer.plugins or []]
    if not any(isinstance(one, Precision) for one in own):
        own.append(ComputeFormat(config))
    return [AtomicCheckpointIO(), StartedProcesses(rank), *own]


_PROFILERS = {
    "simple": "lightning.pytorch.profilers.SimpleProfiler",
    "advanced": "lightning.pytorch.profilers.AdvancedProfiler",
    "pytorch": "lightning.pytorch.profilers.PyTorchProfiler",
}


def _profiler(config: RunConfig, run: RunRecord) -> Profiler | None:
    """Build the profiler, whose reports go to the run directory unless it sets another."""
    chosen = config.trainer.profiler
    if chosen is None:
        return None
    settings = chosen if isinstance(chosen, dict) else {"_target_": _PROFILERS[chosen]}
    place = {"dirpath": str(run.dir.profiles), "filename": "profile"}
    offered = offered_to(get_class(settings["_target_"]), place)
    made: Profiler = instantiate({**offered, **settings}, _convert_="all")
    return made


class StopsAfterWholeSteps(Callback):
    """Delays a callback's request to stop until the end of an optimizer step, which is validated.

    Lightning would stop after any micro-batch. Callbacks that only stop after a validation, as
    early stopping does, are not delayed.
    """

    def __init__(self, run: RunRecord) -> None:
        """Attach to ``run``."""
        self.run = run
        self._is_asked = False
        self._stopped_at: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass on a request to stop if the micro-batch ended a step; keep it otherwise."""
        del outputs, batch, batch_idx
        if self._look(trainer, pl_module):
            payload = {"step": trainer.global_step, "max_steps": trainer.max_steps}
            self.run.telemetry.emit("stop_requested", payload)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Handle a request that was made after a validation."""
        self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: TrainingModule) -> bool:
        """Stop training if that was requested and is due; return whether this call stops it."""
        self._is_asked = self._is_asked or trainer.should_stop
        if not self._is_asked or trainer.state.fn is not TrainerFn.FITTING:
            return False
        is_early = trainer.global_step < (trainer.min_steps or 0)
        trainer.should_stop = pl_module.at_step_boundary and not is_early
        is_now = trainer.should_stop and self._stopped_at is None
        if is_now:
            self._stopped_at = trainer.global_step
        return is_now

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Note in the record that the run is shorter than planned, unless it stopped early."""
        del pl_module
        step, results = trainer.global_step, self.run.manifest.results
        if self._stopped_at is None or step >= trainer.max_steps or results.get("stopped_early"):
            return
        self.run.manifest.notes.append(
            f"training stopped after step {step} of {trainer.max_steps}, as a callback or "
            "trainer.max_time asked; another machine may stop at another step"
        )


def _validation_interval(config: RunConfig, max_steps: int) -> int:
    """Return micro-batches between validations; one step more than the run has disables them."""
    interval = config.trainer.val_check_interval
    return interval or (max_steps + 1) * config.trainer.accumulate_grad_batches


def _callbacks(
    config: RunConfig, run: RunRecord, score: Callable[[int], Measured] | None, rank: Rank
) -> list[Callback]:
    callbacks = [
        _callback(node, run, score)
        for node in _users_before_telemetry(list(config.callbacks.values()))
        if (score is not None or not isinstance(node, ScorecardConfig))
        and (rank.is_first or node._target_ not in _OF_THE_FIRST)  # Hydra's own spelling
    ]
    if config.adapter.select is Selection.best:
        from mens_exp.training.callbacks.best_adapter import BestAdapter

        metric = config.adapter.metric
        best = BestAdapter(run, metric if metric == "val/loss" else f"eval/{metric}")
        callbacks.insert(0, best)  # it must run before the adapter is written
    if isinstance(config.schedule, LrRangeConfig):
        from mens_exp.training.callbacks.lr_range import LrRange

        callbacks.insert(0, LrRange(run, config.schedule.divergence))  # before steps are written
    return callbacks


def _users_before_telemetry(nodes: list[CallbackConfig]) -> list[CallbackConfig]:
    """Move the user's callbacks before the telemetry writer, which writes what they record."""
    ours = [node for node in nodes if node._target_.startswith(_OURS)]  # Hydra's own spelling
    targets = [node._target_ for node in ours]
    place = targets.index(_WRITER) if _WRITER in targets else len(ours)
    return [*ours[:place], *(node for node in nodes if node not in ours), *ours[place:]]


def _callback(
    node: CallbackConfig, run: RunRecord, score: Callable[[int], Measured] | None
) -> Callback:
    settings = {f.name: getattr(node, f.name) for f in fields(node) if f.name != "_target_"}
    offered = {"score": score} if isinstance(node, ScorecardConfig) else {}
    made: Callback = _made(node._target_, settings, run=run, **offered)
    return made


@contextmanager
def lightning_quiet() -> Iterator[None]:
    """Suppress Lightning's notices on the terminal; our own record covers each of them.

    Output of its callbacks stays, because they are only present if the user adds them.

    Raises:
        RequestError: Lightning, or one of its callbacks, refuses the settings.
    """
    names = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")
    levels = {**dict.fromkeys(names, logging.ERROR), "lightning.pytorch.callbacks": logging.INFO}
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        with warnings.catch_warnings():
            # Modules in evaluation mode belong to the frozen base; torch's notice is caused by
            # Lightning.
            warnings.filterwarnings("ignore", message="Found .* module.s. in eval mode")
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
            # Shown if Slurm is installed; but we or torchrun start the processes of a run.
            warnings.filterwarnings("ignore", message="The `srun` command is available")
            # Our precision plugin only names a format; Lightning then counts 32 bits, as it should.
            warnings.filterwarnings("ignore", message="Precision .* is not supported by the model")
            # Checkpoints of earlier releases hold the state of the mirror, which was a callback.
            warnings.filterwarnings("ignore", message="Be aware that when using.*WandbMirror")
            yield
    except (MisconfigurationException, RuntimeError) as error:
        if not isinstance(error, MisconfigurationException) and not _is_of_callbacks(error):
            raise
        raise RequestError(
            "Lightning refuses it",
            where="trainer or callbacks",
            found=" ".join(str(error).split()),
            remedy="change the callback's settings, or leave it out",
        ) from error
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _is_of_callbacks(error: BaseException) -> bool:
    """Return whether a module of Lightning's callbacks raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return name.startswith("lightning.pytorch.callbacks")


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
    trainer.fit_loop.epoch_loop.min_steps = None  # the observer may stop before trainer.min_steps
    trainer.callbacks.append(_FirstSteps(look))  # type: ignore[attr-defined]  # Lightning adds it
    trainer.fit(module, data)
