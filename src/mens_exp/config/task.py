"""The task to run, and the settings of the tasks that have some."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.config.fields import Condition, setting, unless, when
from mens_exp.config.quant import QuantType

__all__ = [
    "EXPORT",
    "RUNS_GRAPH",
    "TASKS",
    "WRITES_ADAPTER",
    "WRITES_MERGED",
    "WRITES_WEIGHTS",
    "AttributeConfig",
    "ChatConfig",
    "ExportConfig",
    "ExportFormat",
    "ExportKind",
    "GgufConfig",
    "GgufDtype",
    "InspectConfig",
    "OllamaConfig",
    "OllamaForm",
    "PushConfig",
    "ServeConfig",
    "SyncConfig",
    "TaskConfig",
    "export_kind",
]


TASKS = (
    *("train", "plan", "evaluate", "compare", "promote", "chat", "serve", "inspect", "attribute"),
    *("merge", "export", "push", "sync", "corpus", "doctor"),
)  # a test compares them with the options


class ExportFormat(Enum):
    """The format that task=export writes."""

    bundle = "bundle"
    peft = "peft"
    v2 = "v2"
    v3 = "v3"
    hf = "hf"
    ollama = "ollama"
    vllm = "vllm"
    gguf = "gguf"


class GgufDtype(Enum):
    """The storage format of a model's matrices in a GGUF file."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """One task; its option's YAML names it."""

    name: str = setting(MISSING, "The task's name; set by the option.")


@dataclass(kw_only=True, slots=True)
class ChatConfig:
    """Settings of task=chat."""

    max_new_tokens: int = setting(256, "Longest answer, in tokens (unverified guess).", ge=1)
    temperature: float = setting(
        0.0, "0 takes the likeliest token; above, tokens are drawn under `seed`.", ge=0
    )


@dataclass(kw_only=True, slots=True)
class PushConfig:
    """Settings of uploads by task=push."""

    private: bool = setting(True, "Make a repository that is not there yet a private one.")
    message: str | None = setting(None, "Commit message; null names the run.")


@dataclass(kw_only=True, slots=True)
class SyncConfig:
    """The destination of uploads by task=sync, and the time it waits."""

    project: str | None = setting(
        None, "W&B project; null is each run's own logger.project, mens_exp where it had none."
    )
    entity: str | None = setting(
        None, "W&B entity; null is each run's own logger.entity, or the account's default."
    )
    timeout_s: float = setting(
        600.0,
        "Seconds after which a run counts as not sent, and sync ends (unverified guess).",
        gt=0,
    )


@dataclass(kw_only=True, slots=True)
class AttributeConfig:
    """The data that task=attribute measures on, and the allowed cost of its suggestion."""

    tokens: int = setting(
        1024,
        "Calibration tokens: about so many of the validation documents, the same for every seed.",
        ge=1,
    )
    position_bounds: list[int] = setting(
        [0, 16, 64, 256],
        "Lowest position of each bucket in the comparison by position, ascending from 0 "
        "(unverified guess).",
    )
    extra_bits: float = setting(
        0.25,
        "Bits per parameter of the quantized modules that the suggested quant.skip may add "
        "(unverified guess).",
        ge=0,
        le=28,
    )
    targets_frac: float = setting(
        0.8,
        "Share of the modules' summed KL that the suggested lora.targets cover (unverified guess).",
        gt=0,
        le=1,
    )


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """Settings of task=export besides `format` and `out`."""

    checkpoints: bool = setting(
        False,
        "Pack the training states too, so that the run can go on elsewhere (bundle).",
        only_if=when("format", "bundle"),
    )
    allow_absolute_paths: bool = setting(
        False,
        "Pack even where the records name absolute paths of this machine (bundle).",
        only_if=when("format", "bundle"),
    )
    base_quant: QuantType | None = setting(
        None,
        "How the base was quantized while an adapter that does not tell was trained; null is nf4 "
        "for schema v2, whose trainer knows nothing else, and none for PEFT.",
        only_if=when("format", "peft", "v2", "v3"),
    )
    double_quant: bool | None = setting(
        None,
        "Whether its constants were quantized once more; null is yes where it was quantized.",
        only_if=when("format", "peft", "v2", "v3"),
    )


@dataclass(kw_only=True, slots=True)
class GgufConfig:
    """Settings of task=export format=gguf."""

    dtype: GgufDtype = setting(
        GgufDtype.f16,
        "Of the matrices: f32 and bf16 hold a model of that type exactly, q8_0 takes half of f16 "
        "(default: what every reader runs).",
    )


class OllamaForm(Enum):
    """The form of the model that a Modelfile for Ollama names."""

    merged = "merged"
    adapter = "adapter"


@dataclass(kw_only=True, slots=True)
class OllamaConfig:
    """Settings of task=export format=ollama besides its Modelfile; format=gguf writes one too."""

    form: OllamaForm = setting(
        OllamaForm.merged,
        "merged: the whole model in safetensors; adapter: the adapter alone, on a base that Ollama "
        "knows by the name that the Modelfile gives.",
    )


class ExportKind(Enum):
    """Kinds of what task=export writes."""

    bundle = "a run packed whole"
    adapter = "an adapter"
    merged = "a merged model"


_ADAPTERS = frozenset({ExportFormat.peft, ExportFormat.v2, ExportFormat.v3, ExportFormat.vllm})


def export_kind(config: Any) -> ExportKind:
    """Return the kind of what task=export writes."""
    if config.format is ExportFormat.bundle:
        return ExportKind.bundle
    of_ollama = config.format is ExportFormat.ollama and config.ollama.form is OllamaForm.adapter
    return ExportKind.adapter if of_ollama or config.format in _ADAPTERS else ExportKind.merged


def _writes(*kinds: ExportKind) -> Condition:
    return Condition(
        holds=lambda config: export_kind(config) in kinds,
        words=lambda config: f"with format={config.format.value}",
        needs=f"a format of {' or '.join(kind.value for kind in kinds)}",
        tasks=EXPORT,
    )


EXPORT = frozenset({"export"})
WRITES_ADAPTER = _writes(ExportKind.adapter)
WRITES_MERGED = _writes(ExportKind.merged)
WRITES_WEIGHTS = _writes(ExportKind.adapter, ExportKind.merged)
# The schemas' deltas are compared as they stand; any other graph is run on a text.
RUNS_GRAPH = unless("format", "bundle", "v2", "v3", tasks=EXPORT)


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    """Settings of the server of task=serve."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. The default is this machine alone; an address that other machines "
        "reach needs a token (serve.token_env).",
    )
    port: int = setting(0, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    token_env: str = setting(
        "MENS_EXP_SERVE_TOKEN",
        "The environment variable that holds the token. If it is set, requests must send the "
        "token as `Authorization: Bearer <token>`.",
    )


@dataclass(kw_only=True, slots=True)
class InspectConfig:
    """The checks that task=inspect repeats."""

    replay_steps: int = setting(
        3,
        "Optimizer steps that replay=true takes again, from the first (unverified guess).",
        ge=1,
        only_if=when("replay", True, remedy="add replay=true, or drop inspect.replay_steps"),
    )
