"""The complete configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.config.backend import BackendConfig
from mens_exp.config.corpus import COUNTS_TOKENS, CorpusConfig
from mens_exp.config.data import DataConfig
from mens_exp.config.evaluation import GRAPH_ANSWERS, OWN_GRAPH_ANSWERS, EvalConfig, SandboxConfig
from mens_exp.config.fields import TRAINING, Condition, Effect, section, setting, unless, when
from mens_exp.config.logger import LoggerConfig, NoLogger, WandbLogger
from mens_exp.config.lora import LoraConfig
from mens_exp.config.model import ModelConfig, TokenizerConfig
from mens_exp.config.objective import ObjectiveConfig
from mens_exp.config.optim import OptimizerConfig
from mens_exp.config.promotion import (
    COMPARES,
    CompareConfig,
    PolicyConfig,
    PromoteConfig,
    StudyConfig,
)
from mens_exp.config.quant import QuantConfig
from mens_exp.config.schedule import AnySchedule
from mens_exp.config.suite import SuiteConfig, by_suite
from mens_exp.config.sweep import SweepConfig
from mens_exp.config.task import (
    EXPORT,
    NAMES_BASE,
    WRITES_MERGED,
    WRITES_WEIGHTS,
    AttributeConfig,
    ChatConfig,
    ExportConfig,
    GgufConfig,
    InspectConfig,
    MergeConfig,
    OllamaConfig,
    ParityConfig,
    PushConfig,
    RejectionSamplingConfig,
    ServeConfig,
    SyncConfig,
    TaskConfig,
)
from mens_exp.config.trainer import (
    AdapterConfig,
    CallbackConfig,
    CheckpointConfig,
    ModuleConfig,
    TrainerConfig,
)


class DeploymentTarget(Enum):
    """The machine on which the adapter will be used."""

    workstation = "workstation"
    mobile_edge = "mobile_edge"


def _group(changes: Effect, *contract: str, **facts: Any) -> Any:
    doc = "A config group; see its options."
    return setting(MISSING, doc, changes=changes, contract=contract, **facts)


LOGS = frozenset({"evaluate", "compare", "merge", "attribute"})
"""Tasks other than training that have a W&B mirror."""
_BY_PATH = Condition(
    holds=lambda config: config.adapter.file is None,
    words=lambda _: "with adapter=<safetensors>",
    needs="no adapter=<safetensors>",
    tasks=frozenset({"merge"}),
)
_HOLDS_ROWS_OUT = by_suite(
    when("suite.name", "heldout_syntax", tasks={"evaluate"}), lambda suite: suite.from_rows
)
_BRINGS_NO_MODELS = by_suite(
    unless("suite.name", "scorecard_spec", tasks={"evaluate"}),
    lambda suite: not suite.brings_models,
)
_EXECUTES = Condition(
    holds=lambda config: config.suite.spec.executes,
    words=lambda config: f"with suite={config.suite.name}, which executes nothing",
    needs="a suite that executes programs",
    tasks=TRAINING | {"evaluate"},
)
_COMPILES = Condition(
    holds=lambda config: config.corpus.validate.compile and "validate" in config.corpus.steps,
    words=lambda _: "on a corpus whose code is not compiled",
    needs="the step validate and corpus.validate.compile=true",
    tasks=frozenset({"corpus"}),
)


# Root keys of earlier releases, each with the task key that replaced it.
MOVED: dict[str, tuple[str, ...]] = {
    "base_shard": ("merge.base_shard",),
    "factors": ("compare.factors",),
    "format": ("export.format",),
    "meta": ("merge.meta",),
    "open": ("promote.open_cycle",),
    "prompt": ("chat.prompt",),
    "replay": ("inspect.replay", "promote.replay"),
    "repo": ("push.repo",),
    "verify": ("inspect.verify",),
}


def moved_to(key: str, task: str | None) -> str:
    """Return the current name of a key in :data:`MOVED`; if there are several, the task's.

    Args:
        key: the key in earlier releases.
        task: the task's name; None if unknown.
    """
    places = MOVED[key]
    return next((place for place in places if place.startswith(f"{task}.")), places[0])


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run, with every group composed and every value checked."""

    seed: int = setting(
        42,
        "Seed of data order, LoRA initialisation and dropout.",
        ge=0,
        changes=Effect.TRAINING,
        contract=("exec.seed",),
        read_by=TRAINING | {"chat"},
    )
    path: str | None = setting(
        None,
        "What a task reads: a run directory, or `latest` (evaluate, chat, push, export, merge, "
        "inspect), the run that started last of those under outputs and up to two directories "
        "below the working directory. chat, evaluate and export.format=hf also accept `base`, the "
        "model of the command alone. evaluate also accepts a run of task=merge, whose weights it "
        "scores. evaluate, merge and export also accept the directory of an adapter in schema "
        "v2, v3 or PEFT's form. serve and export.format=gguf accept a complete model "
        "directory. inspect accepts these, a checkpoint, and what a merge or an export wrote. "
        "compare and sync accept runs, sweeps, scorecard files and globs, several separated by "
        "commas; promote accepts compare.json files in the same way.",
        changes=Effect.NOTHING,
        read_by={
            "evaluate",
            "chat",
            "push",
            "sync",
            "export",
            "merge",
            "serve",
            "inspect",
            "compare",
            "promote",
        },
        only_if=(_BRINGS_NO_MODELS, _BY_PATH, COMPARES),
        idle=None,
        example="latest",
    )
    out: str | None = setting(
        None,
        "File or directory to write (export, merge, compare); null: one in the task's own run "
        "directory.",
        changes=Effect.NOTHING,
        read_by={"export", "merge", "compare"},
        example="merged",
    )
    base: str | None = setting(
        None,
        "The base to merge into, a hub id or a directory; null is the recorded one (merge).",
        changes=Effect.NOTHING,
        read_by={"export", "merge"},
        only_if=(WRITES_MERGED, _BY_PATH),
        idle=None,
        example="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
    ledger: str | None = setting(
        None,
        "The file of registered cycles, their evidence and decisions, which promote only appends "
        "to. compare finds the cycle of a study there and freezes the digests of its runs; "
        "any other study is exploratory. evaluate refuses to keep answers (eval.keep_passing) of "
        "suites by which its cycles are scored.",
        changes=Effect.NOTHING,
        read_by={"evaluate", "compare", "promote"},
        only_if=unless(
            "eval.keep_passing", None, needs="eval.keep_passing=<file>", tasks={"evaluate"}
        ),
        example="decisions.jsonl",
    )
    resume: str | None = setting(
        None,
        "A run directory, or `latest`: continue that run from its last checkpoint (train).",
        changes=Effect.NOTHING,
        read_by={"train"},
        example="latest",
    )
    deployment_target: DeploymentTarget = setting(
        DeploymentTarget.workstation,
        "Purpose of the adapter: workstation, or mobile_edge, which limits length and rank.",
        changes=Effect.NOTHING,
        read_by=TRAINING,
    )
    task: TaskConfig = _group(Effect.NOTHING)
    model: ModelConfig = _group(
        Effect.TRAINING,
        "model",
        read_by=TRAINING | {"export", "attribute", "corpus"},
        only_if=(NAMES_BASE, GRAPH_ANSWERS, COUNTS_TOKENS),
    )
    tokenizer: TokenizerConfig = _group(
        Effect.TRAINING,
        read_by=TRAINING | {"export", "merge", "attribute", "corpus"},
        only_if=(WRITES_MERGED, GRAPH_ANSWERS, COUNTS_TOKENS),
    )
    quant: QuantConfig = _group(
        Effect.TRAINING,
        label="quantization",
        read_by=TRAINING,
        only_if=(GRAPH_ANSWERS, OWN_GRAPH_ANSWERS),
    )
    lora: LoraConfig = _group(
        Effect.TRAINING,
        read_by=TRAINING,
        only_if=(
            unless("backend.name", "full", why="which has no adapter"),
            GRAPH_ANSWERS,
            OWN_GRAPH_ANSWERS,
        ),
    )
    objective: ObjectiveConfig = _group(
        Effect.TRAINING,
        "exec.ce_last_k",
        read_by=TRAINING | {"attribute", "corpus"},
        only_if=COUNTS_TOKENS,
    )
    backend: BackendConfig = _group(
        Effect.TRAINING,
        "exec.require_full_proxy_stack",
        "exec.lm_head_only",
        "exec.proxy_max_layers",
        "exec.ce_last_k",
        read_by=TRAINING | {"corpus"},
        only_if=(COUNTS_TOKENS, GRAPH_ANSWERS, OWN_GRAPH_ANSWERS),
    )
    data: DataConfig = _group(
        Effect.TRAINING,
        "data.generated_from",
        read_by=TRAINING | {"export", "merge", "attribute"},
        only_if=(WRITES_MERGED, GRAPH_ANSWERS, _HOLDS_ROWS_OUT, COUNTS_TOKENS),
    )
    optim: OptimizerConfig = _group(Effect.TRAINING, read_by=TRAINING)
    schedule: AnySchedule = _group(Effect.TRAINING, read_by=TRAINING)
    module: ModuleConfig = _group(Effect.TRAINING, read_by=TRAINING)
    trainer: TrainerConfig = _group(
        Effect.TRAINING,
        read_by=TRAINING,
        only_if=(WRITES_WEIGHTS, GRAPH_ANSWERS, OWN_GRAPH_ANSWERS),
    )
    checkpoint: CheckpointConfig = section(
        CheckpointConfig, changes=Effect.NOTHING, read_by=TRAINING
    )
    adapter: AdapterConfig = section(AdapterConfig, changes=Effect.NOTHING, read_by=TRAINING)
    # One option, or a mapping of several by their names: logger=[wandb,csv].
    logger: Any = _group(Effect.NOTHING, read_by=TRAINING | LOGS)
    callbacks: dict[str, CallbackConfig] = _group(Effect.TRAINING, read_by=TRAINING)
    suite: SuiteConfig = _group(Effect.NOTHING, read_by=TRAINING | {"evaluate"})
    sandbox: SandboxConfig = _group(
        Effect.NOTHING, read_by=TRAINING | {"evaluate", "corpus"}, only_if=(_EXECUTES, _COMPILES)
    )
    eval: EvalConfig = section(
        EvalConfig,
        changes=Effect.NOTHING,
        read_by=TRAINING | {"evaluate"},
        only_if=by_suite(
            unless("suite.name", "none", needs="a suite, such as suite=mini_python"),
            lambda suite: suite.scores,
        ),
    )
    chat: ChatConfig = section(ChatConfig, changes=Effect.NOTHING, read_by={"chat"})
    push: PushConfig = section(PushConfig, changes=Effect.NOTHING, read_by={"push"})
    sync: SyncConfig = section(SyncConfig, changes=Effect.NOTHING, read_by={"sync"})
    merge: MergeConfig = section(
        MergeConfig, changes=Effect.NOTHING, read_by={"export", "merge"}, only_if=WRITES_MERGED
    )
    export: ExportConfig = section(ExportConfig, changes=Effect.NOTHING, read_by=EXPORT)
    parity: ParityConfig = section(
        ParityConfig, changes=Effect.NOTHING, read_by={"export", "merge"}, only_if=WRITES_WEIGHTS
    )
    attribute: AttributeConfig = section(
        AttributeConfig, changes=Effect.NOTHING, read_by={"attribute"}
    )
    rejection_sampling: RejectionSamplingConfig = section(
        RejectionSamplingConfig, changes=Effect.NOTHING, read_by={"rejection_sampling"}
    )
    gguf: GgufConfig = section(
        GgufConfig,
        changes=Effect.NOTHING,
        read_by=EXPORT,
        only_if=when("export.format", "gguf", tasks=EXPORT),
    )
    ollama: OllamaConfig = section(
        OllamaConfig,
        changes=Effect.NOTHING,
        read_by=EXPORT,
        only_if=when("export.format", "ollama", tasks=EXPORT),
    )
    serve: ServeConfig = section(ServeConfig, changes=Effect.NOTHING, read_by={"serve"})
    inspect: InspectConfig = section(InspectConfig, changes=Effect.NOTHING, read_by={"inspect"})
    corpus: CorpusConfig = section(CorpusConfig, changes=Effect.NOTHING, read_by={"corpus"})
    compare: CompareConfig = section(CompareConfig, changes=Effect.NOTHING, read_by={"compare"})
    policy: PolicyConfig | None = setting(
        None, "A config group; see its options.", changes=Effect.NOTHING, read_by={"promote"}
    )
    promote: PromoteConfig = section(PromoteConfig, changes=Effect.NOTHING, read_by={"promote"})
    study: StudyConfig | None = setting(
        None, "A config group; see its options.", changes=Effect.NOTHING, read_by=TRAINING
    )
    sweep: SweepConfig = section(SweepConfig, changes=Effect.NOTHING)

    @property
    def loggers(self) -> dict[str, LoggerConfig]:
        """The loggers by option name; empty with logger=none."""
        chosen = self.logger if isinstance(self.logger, dict) else {self.logger.sink: self.logger}
        return {name: one for name, one in chosen.items() if not isinstance(one, NoLogger)}

    @property
    def wandb(self) -> WandbLogger | None:
        """The settings of the W&B mirror; None without it."""
        return next((one for one in self.loggers.values() if isinstance(one, WandbLogger)), None)
