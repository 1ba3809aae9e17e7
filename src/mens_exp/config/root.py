"""The whole configuration of one run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.config.adapter import AdapterConfig
from mens_exp.config.backend import BackendConfig
from mens_exp.config.callbacks import CallbackConfig
from mens_exp.config.checkpoint import CheckpointConfig
from mens_exp.config.compare import CompareConfig
from mens_exp.config.corpus import CorpusConfig
from mens_exp.config.data import DataConfig
from mens_exp.config.evaluation import EvalConfig
from mens_exp.config.fields import setting
from mens_exp.config.logger import LoggerConfig
from mens_exp.config.lora import LoraConfig
from mens_exp.config.merge import MergeConfig
from mens_exp.config.model import ModelConfig
from mens_exp.config.objective import ObjectiveConfig
from mens_exp.config.optim import OptimizerConfig
from mens_exp.config.parity import ParityConfig
from mens_exp.config.policy import PolicyConfig, PromoteConfig
from mens_exp.config.quant import QuantConfig
from mens_exp.config.sandbox import SandboxConfig
from mens_exp.config.schedule import ScheduleConfig
from mens_exp.config.suite import SuiteConfig
from mens_exp.config.sweep import SweepConfig
from mens_exp.config.task import (
    AttributeConfig,
    ChatConfig,
    ExportConfig,
    ExportFormat,
    GgufConfig,
    InspectConfig,
    OllamaConfig,
    PushConfig,
    ServeConfig,
    SyncConfig,
    TaskConfig,
)
from mens_exp.config.tokenizer import TokenizerConfig
from mens_exp.config.trainer import TrainerConfig

__all__ = ["DeploymentTarget", "RunConfig"]


class DeploymentTarget(Enum):
    """The machine that the adapter is for."""

    workstation = "workstation"
    mobile_edge = "mobile_edge"


def _group() -> Any:
    return setting(MISSING, "A config group; see its options.")


def _section(kind: type) -> Any:
    """Declare a node that is no group: there is one way to fill it, by its keys."""
    return dataclasses.field(default_factory=kind, metadata={"doc": kind.__doc__, "range": None})


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run: every group composed, every value checked."""

    seed: int = setting(42, "Seed of data order, LoRA initialisation and dropout.", ge=0)
    path: str | None = setting(
        None,
        "The run a task reads: a run directory, or `latest` (evaluate, chat, push, export, merge, "
        "inspect); chat and evaluate take `base` too, the model of the command alone; evaluate "
        "takes a run of task=merge too, whose weights it scores; evaluate, merge and export take "
        "an adapter's directory too, in schema v2, v3 or PEFT's form; serve, and export "
        "format=gguf, take a complete model directory; inspect takes all of these, a checkpoint, "
        "and what a merge or an export wrote; compare takes runs, sweeps, scorecard files and "
        "globs, several with commas between, and so does sync; promote takes compare.json "
        "files, likewise.",
    )
    factors: list[str] = setting(
        [],
        "What the arms differ in, settings or groups, such as [quant.double_quant]; an empty list "
        "finds what the runs' own command lines vary (compare).",
    )
    prompt: str | None = setting(
        None, "One question: chat answers it and ends; null talks until Ctrl-D."
    )
    repo: str | None = setting(None, "The hub's repository, <user>/<name> (push).")
    format: ExportFormat = setting(
        ExportFormat.bundle,
        "What to write (export): a run packed whole, or its adapter in another form.",
    )
    out: str | None = setting(
        None,
        "File or directory to write (export, merge, compare); null is one in the task's own run "
        "directory.",
    )
    base: str | None = setting(
        None,
        "The base to merge into, a hub id or a directory; null is the recorded one (merge).",
    )
    meta: str | None = setting(
        None, "JSON header, of schema v2 or v3, of the tensors that adapter= names (merge)."
    )
    base_shard: list[str] = setting(
        [], "Safetensors files of the base to merge into, beside adapter= and meta= (merge)."
    )
    verify: bool = setting(
        False,  # a plain inspection reads and hashes nothing that is large
        "Compute every hash and figure that path rests on again, back to its base model, and "
        "compare them with the records; a difference ends with exit code 4 (inspect).",
    )
    ledger: str | None = setting(
        None,
        "The file of registered cycles, their evidence and decisions, which only grows (promote); "
        "compare says by it which cycle a study is of, freezes the digests of its runs in it, and "
        "calls any other study exploratory; evaluate refuses to keep answers (eval.keep_passing) "
        "to suites that its cycles are scored by.",
    )
    open: str | None = setting(
        None, "Name of a benchmark cycle to register before any of its runs (promote)."
    )
    replay: bool = setting(
        False,  # as above
        "Take the first steps of a run again and name the first tensor that differs; a difference "
        "ends with exit code 4 (inspect). Or make every decision of a ledger again (promote).",
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
    optim: OptimizerConfig = _group()
    schedule: ScheduleConfig = _group()
    trainer: TrainerConfig = _group()
    checkpoint: CheckpointConfig = _section(CheckpointConfig)
    adapter: AdapterConfig = _section(AdapterConfig)
    logger: LoggerConfig = _group()
    callbacks: dict[str, CallbackConfig] = _group()
    suite: SuiteConfig = _group()
    sandbox: SandboxConfig = _group()
    eval: EvalConfig = _section(EvalConfig)
    chat: ChatConfig = field(default_factory=ChatConfig, metadata={"doc": "See its keys."})
    push: PushConfig = field(default_factory=PushConfig, metadata={"doc": "See its keys."})
    sync: SyncConfig = _section(SyncConfig)
    merge: MergeConfig = field(default_factory=MergeConfig, metadata={"doc": "See its keys."})
    export: ExportConfig = field(default_factory=ExportConfig, metadata={"doc": "See its keys."})
    parity: ParityConfig = field(default_factory=ParityConfig, metadata={"doc": "See its keys."})
    attribute: AttributeConfig = _section(AttributeConfig)
    gguf: GgufConfig = field(default_factory=GgufConfig, metadata={"doc": "See its keys."})
    ollama: OllamaConfig = field(default_factory=OllamaConfig, metadata={"doc": "See its keys."})
    serve: ServeConfig = field(default_factory=ServeConfig, metadata={"doc": "See its keys."})
    inspect: InspectConfig = _section(InspectConfig)
    corpus: CorpusConfig = _section(CorpusConfig)
    compare: CompareConfig = _section(CompareConfig)
    policy: PolicyConfig | None = setting(None, "A config group; see its options.")
    promote: PromoteConfig = _section(PromoteConfig)
    sweep: SweepConfig = _section(SweepConfig)
