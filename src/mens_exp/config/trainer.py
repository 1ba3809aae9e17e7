"""The training loop: Trainer arguments, checkpoints, callbacks, and the kept adapter.

Trainer arguments have Lightning's names. Arguments that would break a design promise are refused
with the name of that promise (:data:`REFUSED`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, NamedTuple

from omegaconf import MISSING

from mens_exp.config.fields import Condition, Effect, setting, unless, when
from mens_exp.errors import ConfigError

DEFAULT_STEPS = 60  # measured: four minutes of SmolLM2 on two cores


def steps_beside(max_epochs: int) -> int:
    """Return the default step limit: none if epochs are set, which are then the budget."""
    return -1 if max_epochs > 0 else DEFAULT_STEPS


class Strategy(Enum):
    """The strategy by which the processes of a run share its work."""

    one = "one"
    ddp = "ddp"
    fsdp = "fsdp"


class Promise(StrEnum):
    """A property guaranteed for every run, whatever its settings."""

    ASKED = "What ran is what you asked for"
    COMPARISON = "A comparison is a comparison"
    ARTIFACT = "The artifact is the model"
    NOTHING_LOST = "Nothing is lost"
    PLANNED = "It plans before it spends"


class Refusal(NamedTuple):
    """An argument of Lightning's Trainer that is not offered, or a class that is not accepted."""

    promise: Promise
    why: str
    remedy: str

    def error(self, where: str, found: object = None) -> ConfigError:
        """Return the error that names the promise."""
        return ConfigError(
            f"would break the promise “{self.promise}”: {self.why}",
            where=where,
            found=found,
            remedy=self.remedy,
        )


_NO_LOOP = "a run trains and validates; nothing would read it"
# Arguments that a trainer option may not set; Lightning's other arguments are settings below.
REFUSED: dict[str, Refusal] = {
    "barebones": Refusal(
        Promise.NOTHING_LOST,
        "it switches loggers and checkpoints off",
        "measure speed with make bench, or use callbacks=minimal",
    ),
    "check_val_every_n_epoch": Refusal(
        Promise.ASKED,
        "the run is one epoch of Lightning's, whatever trainer.max_epochs",
        "use trainer.val_check_interval=<micro-batches>",
    ),
    "default_root_dir": Refusal(
        Promise.NOTHING_LOST, "everything of a run is in its directory", "use hydra.run.dir=<path>"
    ),
    "enable_checkpointing": Refusal(
        Promise.NOTHING_LOST,
        "checkpoints are the work of a callback",
        "leave it out with ~callbacks.checkpoint, or set checkpoint.every_n_steps",
    ),
    "fast_dev_run": Refusal(
        Promise.NOTHING_LOST,
        "it switches loggers and checkpoints off",
        "use trainer.max_steps=1, a whole run of one step",
    ),
    "limit_predict_batches": Refusal(Promise.ASKED, _NO_LOOP, "drop it"),
    "limit_test_batches": Refusal(Promise.ASKED, _NO_LOOP, "drop it"),
    "limit_train_batches": Refusal(
        Promise.PLANNED,
        "the schedule and the plan are laid over all steps",
        "use trainer.max_steps=<optimizer steps>",
    ),
    "min_epochs": Refusal(
        Promise.ASKED,
        "the run is one epoch of Lightning's, whatever trainer.max_epochs",
        "use trainer.min_steps=<optimizer steps>",
    ),
    "model_registry": Refusal(
        Promise.ARTIFACT,
        "no model leaves without its certificate",
        "use task=push, or task=export",
    ),
    "overfit_batches": Refusal(
        Promise.COMPARISON,
        "it validates on the rows that are trained on",
        "train on few rows with data.path=<a small file> trainer.max_epochs=<many>",
    ),
    "reload_dataloaders_every_n_epochs": Refusal(
        Promise.NOTHING_LOST,
        "a resumed run continues in the stream where it stopped",
        "drop it: one stream has all passes over the rows",
    ),
    "use_distributed_sampler": Refusal(
        Promise.COMPARISON,
        "arms share the order of their rows, on any number of processes",
        "drop it: the processes share each step's micro-batches already",
    ),
}


_OWN_PROCESSES = Refusal(
    Promise.NOTHING_LOST,
    "the run starts its processes itself, and closes its record whichever of them ends",
    "use trainer=ddp",
)
# Lightning's strategies that are not supported, by the first word of their names.
REFUSED_STRATEGIES: dict[str, Refusal] = {
    "ddp": _OWN_PROCESSES,
    "deepspeed": Refusal(
        Promise.ARTIFACT,
        "its engine keeps the weights that are trained, and writes them in its own format",
        "use trainer=fsdp, which shares out the frozen base",
    ),
    "fsdp": Refusal(
        Promise.ARTIFACT,
        "it shards the adapter, which is written and digested whole",
        "use trainer=fsdp, which shares out the frozen base alone",
    ),
    "model": Refusal(
        Promise.ARTIFACT,
        "it shards the adapter, which is written and digested whole",
        "use trainer=fsdp, which shares out the frozen base alone",
    ),
    "single": Refusal(
        Promise.ASKED,
        "trainer.accelerator decides on the device",
        "use trainer.strategy=one with trainer=cpu or trainer=gpu",
    ),
    "xla": Refusal(
        Promise.NOTHING_LOST, "runs resume on CPU and CUDA devices alone", "use trainer=ddp"
    ),
}
# Settings that may be a mapping with _target_, and an example of a class for it.
BY_CLASS: dict[str, str] = {
    "strategy": "lightning.pytorch.strategies.DDPStrategy",
    "profiler": "lightning.pytorch.profilers.SimpleProfiler",
}
SINGLE_DEVICE = frozenset(
    f"lightning.pytorch.strategies.{name}"
    for name in ("SingleDeviceStrategy", "single_device.SingleDeviceStrategy")
)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The arguments of lightning.Trainer that an experiment sets."""

    accelerator: str = setting(
        MISSING,
        "auto, cpu or gpu; set by the option.",
        changes=Effect.NOTHING,
        read_by={"evaluate", "chat", "export", "merge", "attribute", "inspect"},
        only_if=when(
            "inspect.verify",
            True,
            tasks={"inspect"},
            remedy="add inspect.verify=true, or drop trainer.accelerator",
        ),
    )
    strategy: Any = setting(
        "one",
        "one process, or several that share the micro-batches of a step: ddp, each with the whole "
        "model, or fsdp, each with its part of the frozen decoder layers; auto is one or ddp, by "
        "the number of processes. A mapping with _target_ names a DDPStrategy and its arguments, "
        "or SingleDeviceStrategy.",
        changes=Effect.NOTHING,
        example="ddp",
    )
    devices: int = setting(
        1,
        "Processes on each machine: one for each GPU, or several that share a CPU.",
        ge=1,
        changes=Effect.NOTHING,
    )
    num_nodes: int = setting(
        1, "Machines; several are started by torchrun or Slurm.", ge=1, changes=Effect.NOTHING
    )
    device_gib: float | None = setting(
        None,
        "GiB of memory of each device that task=plan plans for; null is this machine's.",
        gt=0,
        changes=Effect.NOTHING,
        only_if=when("task.name", "plan", why="which meets the device itself"),
        idle=None,
    )
    class_gib: float | None = setting(
        None,
        "GiB of memory of the GPUs that a preset is written for: a plan for a GPU warns where the "
        "run may take more, unless device_gib names the device.",
        gt=0,
        changes=Effect.NOTHING,
    )
    max_steps: int = setting(
        DEFAULT_STEPS,
        "Optimizer steps; -1: only max_epochs limits the run, which is the default where it is "
        "set. With both, the limit that is reached first ends the run.",
        ge=-1,
        contract=("exec.max_steps",),
        aliases={"max_steps_per_epoch": "torchtune", "steps": "shorter command lines"},
    )
    max_epochs: int = setting(
        -1,
        "Passes over the training data, each row exactly once in each; -1: no limit.",
        ge=-1,
        contract=("exec.epochs",),
        aliases={
            "num_train_epochs": "Transformers and TRL and LLaMA-Factory",
            "num_epochs": "Axolotl",
            "epochs": "torchtune and LitGPT",
        },
    )
    accumulate_grad_batches: int = setting(
        4,
        "Micro-batches in one optimizer step, over all processes.",
        ge=1,
        contract=("exec.grad_accum",),
        aliases={
            "gradient_accumulation_steps": (
                "Transformers and TRL, Axolotl, LLaMA-Factory and torchtune"
            ),
            "accumulate": "shorter command lines",
        },
        label="gradient accumulation",
    )
    gradient_clip_val: float | None = setting(
        1.0,
        "Largest global gradient norm; longer ones are scaled down. 0 or null: off.",
        ge=0,
        aliases={
            "max_grad_norm": "Transformers and TRL, Axolotl and LLaMA-Factory",
            "gradient_clipping": "DeepSpeed and H2O LLM Studio",
        },
    )
    val_check_interval: int | None = setting(
        None,
        "Micro-batches between validations, over all processes; null: validation only before and "
        "after training.",
        ge=1,
        changes=Effect.NOTHING,
        aliases={"eval_steps": "Transformers and TRL, Axolotl and LLaMA-Factory"},
    )
    log_every_n_steps: int = setting(
        1,
        "Optimizer steps between logged values of callbacks and modules, and between rows of "
        "loggers other than W&B. The record, and W&B as its mirror, have the metrics of every "
        "step.",
        ge=1,
        changes=Effect.NOTHING,
        aliases={"logging_steps": "Transformers and TRL, Axolotl and LLaMA-Factory"},
    )
    deterministic: Any = setting(
        None,
        "Deterministic algorithms: true, false, or warn to use them where they exist; null: on "
        "for CPU and off for GPU.",
        changes=Effect.NOTHING,
        example="warn",
    )
    compile: Any = setting(
        "auto",
        "Compile the decoder layers with torch.compile, between their projections: true, false, "
        "or auto, which does so where the time saved is more than the time it takes, by measured "
        "rates. The results differ in rounding, and dropout masks come from another generator.",
        changes=Effect.NOTHING,
        aliases={"torch_compile": "Transformers and TRL and Axolotl"},
        example="true",
    )
    gradient_clip_algorithm: str | None = setting(
        None,
        "norm scales all gradients together, value clips each number; null is norm.",
        example="value",
    )
    precision: str | None = setting(
        None,
        "Lightning's name for quant.compute_dtype, which takes precedence: 32-true or bf16-mixed. "
        "The adapter is in f32 with either.",
        example="bf16-mixed",
    )
    min_steps: int | None = setting(
        None,
        "Optimizer steps before a callback or trainer.max_time may end the run; null: none.",
        ge=1,
    )
    max_time: str | None = setting(
        None,
        "Training time after which the run ends, DD:HH:MM:SS; null: no limit. How many steps that "
        "is depends on the machine.",
        example="00:12:00:00",
    )
    limit_val_batches: Any = setting(
        None,
        "Micro-batches of a validation, as a whole number or a share of all; null: all. Part of "
        "the contract, because losses over other text cannot be compared.",
        example="0.5",
    )
    num_sanity_val_steps: int = setting(
        0,
        "Micro-batches to validate before the first step, to find errors; their figures are not "
        "recorded.",
        ge=-1,
        changes=Effect.NOTHING,
    )
    benchmark: bool | None = setting(
        None, "Let cuDNN choose its fastest algorithms; null leaves torch's setting."
    )
    inference_mode: bool = setting(
        True, "Validate under inference_mode, or under no_grad.", changes=Effect.NOTHING
    )
    detect_anomaly: bool = setting(
        False,
        "Find the operation whose gradient is not a number; several times slower.",
        changes=Effect.NOTHING,
    )
    sync_batchnorm: bool | None = setting(
        None, "Share the statistics of batch normalisation between processes, if the model has any."
    )
    profiler: Any = setting(
        None,
        "simple, advanced or pytorch, whose reports are in the run directory; or a mapping with "
        "_target_, a profiler of Lightning's form.",
        changes=Effect.NOTHING,
        example="simple",
    )
    plugins: list[Any] | None = setting(
        None,
        "Mappings with _target_: precision plugins and LayerSync of Lightning's form.",
        example="[{_target_: lightning.pytorch.plugins.TorchSyncBatchNorm}]",
    )
    enable_progress_bar: bool = setting(
        False,
        "Show Lightning's progress bar in addition to callbacks.progress.",
        changes=Effect.NOTHING,
    )
    enable_model_summary: bool = setting(
        False, "Print Lightning's summary of the model.", changes=Effect.NOTHING
    )
    enable_autolog_hparams: bool = setting(
        True, "Give the settings to the loggers.", changes=Effect.NOTHING
    )

    @property
    def is_single_device(self) -> bool:
        """Whether the strategy is given as Lightning's class for one device."""
        given = self.strategy.get("_target_") if isinstance(self.strategy, dict) else None
        return isinstance(given, str) and given in SINGLE_DEVICE

    @property
    def sharing(self) -> Strategy:
        """The strategy by which processes share the work; a user's class counts as ddp."""
        if isinstance(self.strategy, str) and self.strategy in Strategy.__members__:
            return Strategy(self.strategy)
        return Strategy.one if self.world_size == 1 else Strategy.ddp

    @property
    def world_size(self) -> int:
        """Number of processes of the run on all machines."""
        return self.devices * self.num_nodes


TUNING = "mens_exp.training.module.TrainingModule"


@dataclass(kw_only=True, slots=True)
class ModuleConfig:
    """The LightningModule that turns micro-batches into optimizer steps."""

    _target_: str = setting(TUNING, "Class of the module; set by the option.")


_SAVES = Condition(
    holds=lambda config: "checkpoint" in config.callbacks,
    words=lambda _: "without the checkpoint callback",
    needs="callbacks=default, or another choice with checkpoint in it",
)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """The interval between saved training states, and the number of states kept."""

    every_n_steps: int = setting(
        20,
        "Optimizer steps between checkpoints.",
        ge=1,
        only_if=_SAVES,
        idle=20,
        aliases={"save_steps": "Transformers and TRL, Axolotl and LLaMA-Factory"},
    )
    keep: int = setting(
        2,
        "Newest checkpoints kept.",
        ge=1,
        only_if=_SAVES,
        idle=2,
        aliases={"save_total_limit": "Transformers and TRL and Axolotl"},
    )


class Selection(Enum):
    """The adapter of a run that is saved, scored and reported."""

    last = "last"
    best = "best"


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """The adapter that a run produces, and the one that a merge reads."""

    file: str | None = setting(
        None,
        "A safetensors file of an adapter, together with merge.meta= (merge); `adapter=<file>` on "
        "the command line says the same.",
        read_by={"merge"},
        only_if=when(
            "task.name",
            "merge",
            remedy="drop adapter=, or start from it with lora.init_from=<its directory>",
        ),
        idle=None,
        example="candle_qlora_adapter.safetensors",
    )

    select: Selection = setting(
        Selection.last,
        "last: that of the last step; best: the best one by adapter.metric, by default the lowest "
        "validation loss, including the final validation (needs "
        "trainer.val_check_interval).",
        changes=Effect.TRAINING,
    )
    metric: str = setting(
        "val/loss",
        "Metric that adapter.select=best uses: val/loss, or a KPI such as task_success or "
        "parse_rate that callbacks.scorecard measures while training runs.",
        only_if=when("adapter.select", "best"),
        idle="val/loss",
        aliases={"metric_for_best_model": "Transformers and TRL"},
        example="task_success",
    )


@dataclass(kw_only=True, slots=True)
class CallbackConfig:
    """A callback without settings."""

    _target_: str = setting(MISSING, "Class of the callback; set by the option.")


@dataclass(kw_only=True, slots=True)
class EarlyStoppingConfig(CallbackConfig):
    """Early stopping: end a run when validation no longer improves."""

    patience: int = setting(
        3,
        "Validations without a lower loss after which the run ends (Lightning's default).",
        ge=1,
        aliases={"early_stopping_patience": "Transformers and TRL and Axolotl"},
    )
    min_delta: float = setting(
        0.0, "Nats a token by which a loss must fall to count as lower (Lightning's default).", ge=0
    )


@dataclass(kw_only=True, slots=True)
class FiniteGuardConfig(CallbackConfig):
    """Stop a run when a loss or gradient is not finite."""

    check_every_n_steps: int = setting(1, "Optimizer steps between checks.", ge=1)


@dataclass(kw_only=True, slots=True)
class MemoryConfig(CallbackConfig):
    """The interval at which freed memory is returned to the operating system."""

    trim_every_n_steps: int = setting(
        2, "Optimizer steps between returns of freed pages (measured: experiments/LOG.md).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class ProgressConfig(CallbackConfig):
    """Terminal output during training."""

    plain_every_n_steps: int = setting(
        10, "Optimizer steps between lines where the output is not a terminal.", ge=1
    )


@dataclass(kw_only=True, slots=True)
class ScorecardConfig(CallbackConfig):
    """The interval at which a run is scored on its suite during training."""

    every_n_steps: int | None = setting(
        None,
        "Optimizer steps between scorecards of the tuned model, including one after the last "
        "step; null: no scorecards during training.",
        ge=1,
    )
    items: int = setting(
        8,
        "Items of each scorecard, from the suite's first (a rough choice: a minute on two cores, "
        "and shares in steps of an eighth).",
        ge=1,
        only_if=unless(
            "callbacks.scorecard.every_n_steps",
            None,
            needs="callbacks.scorecard.every_n_steps",
        ),
        idle=8,
    )
