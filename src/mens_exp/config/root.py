"""The whole configuration of one run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.config.backend import BackendConfig
from mens_exp.config.callbacks import CallbackConfig
from mens_exp.config.data import DataConfig
from mens_exp.config.fields import setting
from mens_exp.config.logger import LoggerConfig
from mens_exp.config.lora import LoraConfig
from mens_exp.config.model import ModelConfig
from mens_exp.config.objective import ObjectiveConfig
from mens_exp.config.optim import OptimConfig
from mens_exp.config.quant import QuantConfig
from mens_exp.config.schedule import ScheduleConfig
from mens_exp.config.suite import SuiteConfig
from mens_exp.config.task import TaskConfig
from mens_exp.config.tokenizer import TokenizerConfig
from mens_exp.config.trainer import TrainerConfig

__all__ = ["DeploymentTarget", "RunConfig"]


class DeploymentTarget(Enum):
    """The machine that the adapter is for."""

    workstation = "workstation"
    mobile_edge = "mobile_edge"


def _group() -> Any:
    return setting(MISSING, "A config group; see its options.")


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run: every group composed, every value checked."""

    seed: int = setting(42, "Seed of data order, LoRA initialisation and dropout.", ge=0)
    path: str | None = setting(
        None, "The run a task reads: a run directory, or `latest` (evaluate)."
    )
    resume: str | None = setting(
        None, "A run directory, or `latest`: continue that run from its last checkpoint (train)."
    )
    deployment_target: DeploymentTarget = setting(
        DeploymentTarget.workstation,
        "What the adapter is for: workstation, or mobile_edge, which bounds length and rank.",
    )
    task: TaskConfig = _group()
    model: ModelConfig = _group()
    tokenizer: TokenizerConfig = _group()
    quant: QuantConfig = _group()
    lora: LoraConfig = _group()
    objective: ObjectiveConfig = _group()
    backend: BackendConfig = _group()
    data: DataConfig = _group()
    optim: OptimConfig = _group()
    schedule: ScheduleConfig = _group()
    trainer: TrainerConfig = _group()
    logger: LoggerConfig = _group()
    callbacks: dict[str, CallbackConfig] = _group()
    suite: SuiteConfig = _group()
