"""The whole configuration of one run."""

from __future__ import annotations

from dataclasses import dataclass
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
from mens_exp.config.fields import Effect, section, setting
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


def _group(changes: Effect, *contract: str) -> Any:
    return setting(MISSING, "A config group; see its options.", changes=changes, contract=contract)


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run: every group composed, every value checked."""

    seed: int = setting(
        42,
        "Seed of data order, LoRA initialisation and dropout.",
        ge=0,
        changes=Effect.TRAINING,
        contract=("exec.seed",),
    )
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
        changes=Effect.NOTHING,
    )
    factors: list[str] = setting(
        [],
        "What the arms differ in, settings or groups, such as [quant.double_quant]; an empty list "
        "finds what the runs' own command lines vary (compare).",
        changes=Effect.NOTHING,
    )
    prompt: str | None = setting(
        None,
        "One question: chat answers it and ends; null talks until Ctrl-D.",
        changes=Effect.NOTHING,
    )
    repo: str | None = setting(
        None, "The hub's repository, <user>/<name> (push).", changes=Effect.NOTHING
    )
    format: ExportFormat = setting(
        ExportFormat.bundle,
        "What to write (export): a run packed whole, or its adapter in another form.",
        changes=Effect.NOTHING,
    )
    out: str | None = setting(
        None,
        "File or directory to write (export, merge, compare); null is one in the task's own run "
        "directory.",
        changes=Effect.NOTHING,
    )
    base: str | None = setting(
        None,
        "The base to merge into, a hub id or a directory; null is the recorded one (merge).",
        changes=Effect.NOTHING,
    )
    meta: str | None = setting(
        None,
        "JSON header, of schema v2 or v3, of the tensors that adapter= names (merge).",
        changes=Effect.NOTHING,
    )
    base_shard: list[str] = setting(
        [],
        "Safetensors files of the base to merge into, beside adapter= and meta= (merge).",
        changes=Effect.NOTHING,
    )
    verify: bool = setting(
        False,  # a plain inspection reads and hashes nothing that is large
        "Compute every hash and figure that path rests on again, back to its base model, and "
        "compare them with the records; a difference ends with exit code 4 (inspect).",
        changes=Effect.NOTHING,
    )
    ledger: str | None = setting(
        None,
        "The file of registered cycles, their evidence and decisions, which only grows (promote); "
        "compare says by it which cycle a study is of, freezes the digests of its runs in it, and "
        "calls any other study exploratory; evaluate refuses to keep answers (eval.keep_passing) "
        "to suites that its cycles are scored by.",
        changes=Effect.NOTHING,
    )
    open: str | None = setting(
        None,
        "Name of a benchmark cycle to register before any of its runs (promote).",
        changes=Effect.NOTHING,
    )
    replay: bool = setting(
        False,  # as above
        "Take the first steps of a run again and name the first tensor that differs; a difference "
        "ends with exit code 4 (inspect). Or make every decision of a ledger again (promote).",
        changes=Effect.NOTHING,
    )
    resume: str | None = setting(
        None,
        "A run directory, or `latest`: continue that run from its last checkpoint (train).",
        changes=Effect.NOTHING,
    )
    deployment_target: DeploymentTarget = setting(
        DeploymentTarget.workstation,
        "What the adapter is for: workstation, or mobile_edge, which bounds length and rank.",
        changes=Effect.NOTHING,
    )
    task: TaskConfig = _group(Effect.NOTHING)
    model: ModelConfig = _group(Effect.TRAINING, "model")
    tokenizer: TokenizerConfig = _group(Effect.TRAINING)
    quant: QuantConfig = _group(Effect.TRAINING)
    lora: LoraConfig = _group(Effect.TRAINING)
    objective: ObjectiveConfig = _group(Effect.TRAINING, "exec.ce_last_k")
    backend: BackendConfig = _group(
        Effect.TRAINING,
        "exec.require_full_proxy_stack",
        "exec.lm_head_only",
        "exec.proxy_max_layers",
        "exec.ce_last_k",
    )
    data: DataConfig = _group(Effect.TRAINING, "data.generated_from")
    optim: OptimizerConfig = _group(Effect.TRAINING)
    schedule: ScheduleConfig = _group(Effect.TRAINING)
    trainer: TrainerConfig = _group(Effect.TRAINING)
    checkpoint: CheckpointConfig = section(CheckpointConfig, changes=Effect.NOTHING)
    adapter: AdapterConfig = section(AdapterConfig, changes=Effect.NOTHING)
    logger: LoggerConfig = _group(Effect.NOTHING)
    callbacks: dict[str, CallbackConfig] = _group(Effect.TRAINING)
    suite: SuiteConfig = _group(Effect.NOTHING)
    sandbox: SandboxConfig = _group(Effect.NOTHING)
    eval: EvalConfig = section(EvalConfig, changes=Effect.NOTHING)
    chat: ChatConfig = section(ChatConfig, changes=Effect.NOTHING)
    push: PushConfig = section(PushConfig, changes=Effect.NOTHING)
    sync: SyncConfig = section(SyncConfig, changes=Effect.NOTHING)
    merge: MergeConfig = section(MergeConfig, changes=Effect.NOTHING)
    export: ExportConfig = section(ExportConfig, changes=Effect.NOTHING)
    parity: ParityConfig = section(ParityConfig, changes=Effect.NOTHING)
    attribute: AttributeConfig = section(AttributeConfig, changes=Effect.NOTHING)
    gguf: GgufConfig = section(GgufConfig, changes=Effect.NOTHING)
    ollama: OllamaConfig = section(OllamaConfig, changes=Effect.NOTHING)
    serve: ServeConfig = section(ServeConfig, changes=Effect.NOTHING)
    inspect: InspectConfig = section(InspectConfig, changes=Effect.NOTHING)
    corpus: CorpusConfig = section(CorpusConfig, changes=Effect.NOTHING)
    compare: CompareConfig = section(CompareConfig, changes=Effect.NOTHING)
    policy: PolicyConfig | None = setting(
        None, "A config group; see its options.", changes=Effect.NOTHING
    )
    promote: PromoteConfig = section(PromoteConfig, changes=Effect.NOTHING)
    sweep: SweepConfig = section(SweepConfig, changes=Effect.NOTHING)
