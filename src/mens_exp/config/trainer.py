"""Arguments of the Lightning Trainer; the names are its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import Effect, setting, when

__all__ = ["DEFAULT_STEPS", "Strategy", "TrainerConfig", "steps_beside"]

DEFAULT_STEPS = 60  # measured: four minutes of SmolLM2 on two cores


def steps_beside(max_epochs: int) -> int:
    """Return the bound on steps where none is named: epochs that are named are the budget."""
    return -1 if max_epochs > 0 else DEFAULT_STEPS


class Strategy(Enum):
    """The way the processes of a run share its work."""

    one = "one"
    ddp = "ddp"
    fsdp = "fsdp"


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The part of lightning.Trainer's arguments that an experiment sets."""

    accelerator: str = setting(
        MISSING,
        "auto, cpu or gpu; set by the option.",
        changes=Effect.NOTHING,
        read_by={"evaluate", "chat", "export", "merge", "attribute", "inspect"},
        only_if=when(
            "verify", True, tasks={"inspect"}, remedy="add verify=true, or drop trainer.accelerator"
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
        """Processes of the run, on all machines."""
        return self.devices * self.num_nodes
