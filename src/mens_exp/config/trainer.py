"""The training loop: Trainer arguments, checkpoints, callbacks, the kept adapter, and loggers.

Trainer arguments have Lightning's names. Loggers mirror the JSON record.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import Condition, Effect, setting, unless, when

DEFAULT_STEPS = 60  # measured: four minutes of SmolLM2 on two cores


def steps_beside(max_epochs: int) -> int:
    """Return the default step limit: none if epochs are set, since they are then the budget."""
    return -1 if max_epochs > 0 else DEFAULT_STEPS


class Strategy(Enum):
    """The way in which the processes of a run divide its work."""

    one = "one"
    ddp = "ddp"
    fsdp = "fsdp"


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
    strategy: Strategy = setting(
        Strategy.one,
        "one process, or several that share the micro-batches of a step: ddp, each with the whole "
        "model, or fsdp, each with its part of the frozen decoder layers.",
        changes=Effect.NOTHING,
    )
    devices: int = setting(
        1,
        "Processes on each machine: one for each GPU, or that share a CPU.",
        ge=1,
        changes=Effect.NOTHING,
    )
    num_nodes: int = setting(
        1, "Machines; several are started by torchrun.", ge=1, changes=Effect.NOTHING
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
        "Optimizer steps; -1: max_epochs alone decides, which is the default where it is set. With "
        "both, the one that is reached first ends the run.",
        ge=-1,
        contract=("exec.max_steps",),
        aliases={"max_steps_per_epoch": "torchtune"},
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
        "Micro-batches in one optimizer step, those of all processes together.",
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
        "Micro-batches, of all processes together, between validations; null validates before "
        "and after only.",
        ge=1,
        changes=Effect.NOTHING,
        aliases={"eval_steps": "Transformers and TRL, Axolotl and LLaMA-Factory"},
    )
    deterministic: bool | None = setting(
        None,
        "Deterministic algorithms; null turns them on on CPU and leaves them off on GPU.",
        changes=Effect.NOTHING,
    )

    @property
    def world_size(self) -> int:
        """Number of processes of the run, on all machines."""
        return self.devices * self.num_nodes


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
        "A safetensors file of an adapter, with merge.meta= beside it (merge); `adapter=<file>` on "
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
        "last: that of the last step; best: the best one by adapter.metric, by default that "
        "of the lowest validation loss seen, the final validation included (needs "
        "trainer.val_check_interval).",
        changes=Effect.TRAINING,
    )
    metric: str = setting(
        "val/loss",
        "What adapter.select=best selects by: val/loss, or a KPI such as task_success or "
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
        "Validations without a lower loss before the run ends (Lightning's default).",
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
        10, "Optimizer steps between lines where the output is no terminal.", ge=1
    )


@dataclass(kw_only=True, slots=True)
class ScorecardConfig(CallbackConfig):
    """The interval at which a run is scored on its suite during training."""

    every_n_steps: int | None = setting(
        None,
        "Optimizer steps between scorecards of the tuned model, one after the last step included; "
        "null scores nothing before training has ended.",
        ge=1,
    )
    items: int = setting(
        8,
        "Items of each, the suite's first (unverified guess: a minute on two cores, and a share "
        "in steps of an eighth).",
        ge=1,
        only_if=unless(
            "callbacks.scorecard.every_n_steps",
            None,
            needs="callbacks.scorecard.every_n_steps beside it",
        ),
        idle=8,
    )


class WandbMode(Enum):
    """Whether the W&B client connects to a server."""

    offline = "offline"
    online = "online"


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    """Settings common to all loggers."""

    sink: str = setting(MISSING, "Name of the sink; set by the option.")


@dataclass(kw_only=True, slots=True)
class NoLogger(LoggerConfig):
    """No logger other than the JSON record."""

    sink: str = "none"


@dataclass(kw_only=True, slots=True)
class WandbLogger(LoggerConfig):
    """Weights & Biases, offline by default."""

    sink: str = "wandb"
    mode: WandbMode = setting(
        WandbMode.offline,
        "Both write into the run directory; with online, a process of its own uploads as it runs.",
    )
    project: str = setting(
        "mens_exp", "W&B project.", aliases={"wandb_project": "Axolotl"}, example="qlora-study"
    )
    entity: str | None = setting(
        None, "W&B entity; null is the account's default.", example="my-team"
    )
    group: str | None = setting(
        None, "W&B group; null is the sweep, or the experiment.", example="first-study"
    )
    name: str | None = setting(
        None,
        "W&B run name; null is made from what varies. Jobs of a sweep add their number to it.",
        aliases={"run_name": "Transformers and TRL"},
        example="nf4-r16",
    )
    tags: list[str] = setting(
        [], "Tags beside those made from the overrides.", example="[nf4,pilot]"
    )
    wait_s: float = setting(
        60.0,
        "Seconds to wait for the upload once the run's record is closed (unverified guess); what "
        "is not sent by then goes on in the background, or later by task=sync.",
        ge=0,
    )


@dataclass(kw_only=True, slots=True)
class CsvLogger(LoggerConfig):
    """lightning.pytorch.loggers.CSVLogger."""

    sink: str = "csv"
    flush_every_n_steps: int = setting(
        10, "Optimizer steps whose metrics a kill may lose; Lightning's own default is 100.", ge=1
    )


@dataclass(kw_only=True, slots=True)
class TensorboardLogger(LoggerConfig):
    """lightning.pytorch.loggers.TensorBoardLogger."""

    sink: str = "tensorboard"
