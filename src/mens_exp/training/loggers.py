"""Lightning loggers of a run: the record first, then those that the user chose.

Values that a callback or a module logs reach ``telemetry.jsonl`` whatever the logger. The W&B
mirror reads them there. Other loggers get them from Lightning, and the run's own metrics from
telemetry. A logger that fails later is no longer used, and the failure is recorded.

Every number has the optimizer step in which it was logged, counted from 1 as in the rest of the
record; validations before the first step have step 0. Lightning itself counts finished steps, so
that its number is one less while a step is in progress.
"""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from typing import TYPE_CHECKING, Any

from hydra.utils import get_class, instantiate
from lightning import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn

from mens_exp.artifacts.manifest import Status
from mens_exp.artifacts.metrics import METRICS, own_metric
from mens_exp.artifacts.telemetry import own_results
from mens_exp.config.logger import CsvLogger, OwnLogger, TensorboardLogger
from mens_exp.config.logger import WandbLogger as WandbSettings
from mens_exp.config.validate import settings_read
from mens_exp.errors import RequestError, SetupError
from mens_exp.training.wandb_mirror import WandbMirror
from mens_exp.training.wandb_rendering import is_point, summary_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import wandb

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.telemetry import Event
    from mens_exp.config.logger import LoggerConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.planning.machine import Rank
    from mens_exp.training.module import RunRecord, TrainingModule

_OURS = "step"  # a key with which Lightning names the step itself


class RecordLogger(Logger):
    """Writes logged values to telemetry.jsonl, before any other logger gets them."""

    def __init__(self, run: RunRecord) -> None:
        """Attach to ``run``; :class:`LoggerFeed` keeps step and condition current."""
        super().__init__()
        self.run = run
        self.step = 0
        self.condition = "tuned"
        self.others: list[MirroredLogger] = []  # besides the W&B mirror
        self._not_finite: set[str] = set()

    @property
    def name(self) -> str:
        """Name of the directory of files that callbacks write, such as checkpoints of their own."""
        return "lightning"

    @property
    def version(self) -> str:
        """The attempt of the run."""
        return attempt_of(self.run)

    @property
    def save_dir(self) -> str:
        """The run directory."""
        return str(self.run.dir.path)

    @property
    def experiment(self) -> RecordLogger:
        """The logger itself: `log` and `log_metrics` write to the record."""
        return self

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics under the step in progress, whatever number Lightning passes.

        Raises:
            RequestError: a name is one of ours, or a misspelling of one.
        """
        del step
        # Lightning adds its epoch, which is always 0 in a run.
        self.log({name: v for name, v in metrics.items() if not (name == "epoch" and v == 0)})

    def log(self, data: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Record numbers, nested ones by dotted names, and the kinds of other values.

        Returns:
            Values that are not numbers, such as images and tables, which only other sinks can hold.

        Raises:
            RequestError: as for :meth:`log_metrics`.
        """
        del options  # rows are those of the record
        values = dict(_flat(data))
        media = {name: value for name, value in values.items() if not _is_number(value)}
        payload: dict[str, Any] = {
            "step": self.step,
            "values": {
                own_metric(name).name: self._number(name, float(value))
                for name, value in values.items()
                if name not in media
            },
        }
        if self.condition != "tuned":
            payload["condition"] = self.condition
        if media:
            payload["media"] = {name: _kind(value) for name, value in media.items()}
        if values:
            self.run.telemetry.emit("logged", payload)
        return media

    def _number(self, name: str, number: float) -> float | None:
        """Return a finite number, or None; the first of each metric that is not finite is noted."""
        if math.isfinite(number):
            return number
        if name not in self._not_finite:
            self._not_finite.add(name)
            text = f"{name} was {number} in step {self.step}; such values are recorded as null"
            self.run.telemetry.emit("warning", {"step": self.step, "text": text})
        return None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Record hyperparameters of a module or a callback, in addition to the configuration."""
        del args, kwargs
        values = vars(params) if hasattr(params, "__dict__") else dict(params)
        if not values:
            return
        plain = dict(flat_settings(values))
        self.run.manifest.facts["hyperparameters"] = plain
        self.run.telemetry.emit("hyperparameters", {"hyperparameters": plain})


class MirrorLogger(WandbLogger):
    """The W&B mirror as Lightning's WandbLogger, with the interface that its users know.

    Numbers go to the record first and come back from there; what a record cannot hold, such as
    images and tables, goes straight to the mirror.
    """

    def __init__(self, settings: WandbSettings, record: RecordLogger) -> None:
        """Store what to mirror; nothing is imported or started yet."""
        super().__init__(project=settings.project, save_dir=record.run.dir.path)
        self._record = record
        self._mirror = WandbMirror(logger=settings, run=record.run)

    @property
    def experiment(self) -> Any:
        """The W&B run; numbers that are logged to it go to the record first."""
        self._mirror.start()
        return RecordedRun(self._mirror.sink, self._record)

    @property
    def version(self) -> str:
        """Id of the W&B run."""
        return self._mirror.id

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values that are not numbers; numbers come through the record."""
        del step
        if media := {name: value for name, value in metrics.items() if not _is_number(value)}:
            self.experiment.log(media)

    def log_hyperparams(self, params: Any) -> None:
        """Do nothing: configuration and hyperparameters come through the record."""

    def watch(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse: W&B's hooks write into its global run, which the mirror leaves to the user.

        Raises:
            RequestError: always.
        """
        del model, args, kwargs
        raise RequestError(
            "the mirror cannot watch a model: W&B's hooks write only into its global run",
            where="WandbLogger.watch",
            remedy='log histograms in a callback: logger.experiment.log({"gradients/<name>": '
            "wandb.Histogram(…)}), or use Lightning's own WandbLogger (conf/logger/<name>.yaml)",
        )

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Do nothing: training states stay in the run directory."""

    def finalize(self, status: str) -> None:
        """Do nothing: the mirror ends with the run."""


class RecordedRun:
    """A W&B run for users' code: `log` writes numbers to the record, all else is W&B's own."""

    def __init__(self, sink: wandb.Run, record: RecordLogger) -> None:
        """Wrap ``sink``, which the mirror feeds and ends."""
        self._sink = sink
        self._record = record

    def log(self, data: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log numbers and media in the step in progress."""
        del step, options  # rows are those of the record
        media = self._record.log(data)
        numbers = {name: value for name, value in _flat(data) if name not in media}
        for other in self._record.others:
            other.log_metrics(numbers)
        if media:
            self._sink.log(media, step=self._record.step)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the mirror ends with the run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        nested = isinstance(value, dict)
        found += _flat(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", value)]
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float):
        return True
    size = getattr(value, "numel", None) or getattr(value, "size", None)
    return hasattr(value, "item") and (size() if callable(size) else size) == 1


def _kind(value: Any) -> str:
    one = value[0] if isinstance(value, list | tuple) and value else value
    return type(one).__name__


class MirroredLogger(Logger):
    """Mixin for a logger that the user chose: its failures never stop training."""

    sink: str
    record: RecordLogger
    has_failed = False

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log metrics under the record's step number where Lightning passes its own."""
        now = self.record.step
        if not is_point({"condition": self.record.condition, "step": now}):
            return
        shown = now if step in {None, now - 1} else step
        self._attempt(lambda: super(MirroredLogger, self).log_metrics(metrics, shown))  # type: ignore[safe-super]

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Log hyperparameters."""
        log = super().log_hyperparams  # type: ignore[safe-super]
        self._attempt(lambda: log(params, *args, **kwargs))

    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        """Log the graph, if the logger does that."""
        self._attempt(lambda: super(MirroredLogger, self).log_graph(*args, **kwargs))

    def save(self) -> None:
        """Flush."""
        self._attempt(super().save)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Handle a checkpoint of Lightning's own callback."""
        handle = super().after_save_checkpoint
        self._attempt(lambda: handle(checkpoint_callback))

    def finalize(self, status: str) -> None:
        """Flush: Lightning calls this after each validation and fit, while the run continues."""
        del status
        self.save()

    def close(self, manifest: Manifest) -> None:
        """Log the results and end, once the run's record is closed."""
        if self.has_failed:
            return
        log = super().log_metrics  # type: ignore[safe-super]
        if results := _results(self.record, manifest):
            log(results, self.record.step)
        super().finalize("success" if manifest.status is Status.SUCCEEDED else "failed")

    def _attempt(self, action: Callable[[], object]) -> None:
        if self.has_failed:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001  # a sink that fails never stops training
            self.has_failed = True
            what = {"sink": self.sink, "error": f"{type(error).__name__}: {error}"}
            self.record.run.telemetry.emit("sink_failed", what)


def _results(record: RecordLogger, manifest: Manifest) -> dict[str, float]:
    """Return the KPIs of base and tuned model, named as in W&B."""
    found = summary_of(record.run.dir, manifest)
    return {
        name: float(value)
        for name, value in found.items()
        if name.startswith(("base/", "tuned/")) and isinstance(value, int | float)
    }


def attempt_of(run: RunRecord) -> str:
    """Name the attempt, so that its loggers do not overwrite the files of the previous one."""
    return f"attempt_{max(1, len(run.manifest.attempts))}"


def build_loggers(config: RunConfig, run: RunRecord, rank: Rank) -> list[Logger]:
    """Build the loggers of a process: the record and, in the first process, the user's.

    Raises:
        SetupError: a logger does not start.
    """
    record = RecordLogger(run)
    chosen = config.loggers.items() if rank.is_first else ()
    made = [_built(sink, node, record, config) for sink, node in chosen]
    record.others = [one for one in made if isinstance(one, MirroredLogger)]
    return [record, *made]


def _built(sink: str, node: LoggerConfig, record: RecordLogger, config: RunConfig) -> Logger:
    if isinstance(node, WandbSettings):
        return MirrorLogger(node, record)
    run = record.run
    if isinstance(node, CsvLogger):
        cls: Any = CSVLogger
        settings: dict[str, Any] = {"flush_logs_every_n_steps": node.flush_every_n_steps}
        settings |= _place(run, run.dir.csv.name)
    elif isinstance(node, TensorboardLogger):
        cls, settings = TensorBoardLogger, {"default_hp_metric": False}
        settings |= _place(run, run.dir.tensorboard.name)
    else:
        assert isinstance(node, OwnLogger), "the group has no other kind"
        cls, settings = get_class(node._target_), _own_settings(sink, node, run)
    kind: Any = type(cls.__name__, (MirroredLogger, cls), {"sink": sink, "record": record})
    try:
        made: Any = kind(**instantiate(settings, _convert_="all"))
        _ = made.experiment
    except Exception as error:
        raise SetupError(
            "the logger did not start",
            where=f"logger={sink}",
            found=f"{type(error).__name__}: {error.__cause__ or error}",
            remedy="correct its settings, or run with logger=none",
        ) from error
    run.telemetry.subscribe(_follower(made, config.trainer.log_every_n_steps), sink)
    run.after_close(made.close)
    logger: Logger = made
    return logger


def _place(run: RunRecord, name: str) -> dict[str, Any]:
    return {"save_dir": str(run.dir.path), "name": name, "version": attempt_of(run)}


def _own_settings(sink: str, node: OwnLogger, run: RunRecord) -> dict[str, Any]:
    """Return the settings of a user's logger, with the run's directories as defaults."""
    cls: Any = get_class(node._target_)
    known = {field.name for field in dataclasses.fields(OwnLogger)}
    settings = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
    settings = {name: value for name, value in settings.items() if name not in known}
    offered: dict[str, Any] = {"run": run, "save_dir": str(run.dir.of_logger(sink))}
    if issubclass(cls, CSVLogger | TensorBoardLogger):
        offered |= _place(run, sink)
    return {**offered_to(cls, offered), **settings}


def offered_to(cls: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offered arguments that a class accepts."""
    taken = inspect.signature(cls).parameters
    return {name: value for name, value in offered.items() if name in taken}


def _follower(logger: Logger, every_n_steps: int) -> Callable[[Event], None]:
    """Return a telemetry subscriber that passes the run's own metrics on to a logger."""

    def take(record: Event) -> None:
        payload = record["payload"]
        match record["event"]:
            case "step" if payload["step"] % every_n_steps == 0:
                logger.log_metrics(_numbers(payload), payload["step"])
            case "scorecard_step":
                logger.log_metrics(_numbers(payload, "eval/"), payload["step"])
            case "validation":
                logger.log_metrics(_numbers(payload, "val/"), payload["step"])
            case _:
                return
        logger.save()

    return take


def _numbers(payload: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    return {
        name: value
        for name, value in payload.items()
        if name.startswith(prefix) and name != _OURS and isinstance(value, int | float)
    }


class LoggerFeed(Callback):
    """Keeps the step of the record current, and gives the settings to the loggers once."""

    def __init__(self, record: RecordLogger, config: RunConfig) -> None:
        """Collect the hyperparameters: the part of the configuration that training reads."""
        self.record = record
        self.settings = dict(flat_settings(settings_read(dataclasses.asdict(config), "train")))

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Log the hyperparameters by dotted path, unless Lightning's own switch is off."""
        del pl_module
        self.record.condition = "tuned"
        if trainer.enable_autolog_hparams:
            for logger in trainer.loggers:
                if isinstance(logger, MirroredLogger):
                    logger.log_hyperparams(self.settings)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Begin the first step of this process."""
        del pl_module
        self.record.step, self.record.condition = trainer.global_step + 1, "tuned"

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step at its first micro-batch, and drop the user's metrics of the last step."""
        del batch, batch_idx
        if pl_module.at_step_boundary:
            self.record.step = trainer.global_step + 1
            for name in pl_module.step_metrics.keys() - METRICS.keys():
                del pl_module.step_metrics[name]

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Set the condition; outside training, no step is in progress."""
        self.record.condition = "sanity" if trainer.sanity_checking else pl_module.condition
        if trainer.state.fn is not TrainerFn.FITTING:
            self.record.step = trainer.global_step

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Keep the user's metrics, each as one number, in the manifest."""
        del trainer, pl_module
        manifest = self.record.run.manifest
        declared, results = own_results(self.record.run.dir.telemetry)
        if declared:
            manifest.facts["metrics"], manifest.results["metrics"] = declared, results


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten to dotted paths; loggers accept plain values, so other values become strings."""
    entries: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            entries += flat_settings(value, f"{prefix}{name}.")
        else:
            plain = value is None or isinstance(value, bool | int | float | str)
            entries.append(
                (f"{prefix}{name}", value if plain else str(getattr(value, "value", value)))
            )
    return entries


class RunTrainer(Trainer):
    """Lightning's Trainer, whose `logger` is the first that the user chose.

    Lightning's own would be the record, which comes before the user's.
    """

    @property
    def logger(self) -> Logger | None:
        """The user's first logger, or the record if there is none.

        Users call it directly, while Lightning iterates over `loggers`. Its `log_metrics` and
        `log_hyperparams` therefore go to all of them.
        """
        own = [one for one in self.loggers if not isinstance(one, RecordLogger)]
        first = next(iter(own or self.loggers), None)
        return first if first is None or not own else _for_users(first, self.loggers)

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]


def _for_users(logger: Logger, loggers: Sequence[Logger]) -> Logger:
    """Return a copy of a logger whose metrics and hyperparameters go to several."""

    def to_all(name: str) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            for one in loggers:
                getattr(one, name)(*args, **kwargs)

        return call

    made = copy.copy(logger)
    for name in ("log_metrics", "log_hyperparams"):
        setattr(made, name, to_all(name))
    return made


def first_record(loggers: Sequence[Logger]) -> RecordLogger:
    """Return the record among the loggers of a trainer."""
    return next(one for one in loggers if isinstance(one, RecordLogger))
