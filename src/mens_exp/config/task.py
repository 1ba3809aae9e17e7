"""The task to run, and the settings of the tasks that have some."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import setting
from mens_exp.config.quant import QuantType

__all__ = [
    "AttributeConfig",
    "ChatConfig",
    "ExportConfig",
    "ExportFormat",
    "GgufConfig",
    "GgufDtype",
    "InspectConfig",
    "OllamaConfig",
    "OllamaForm",
    "PushConfig",
    "ServeConfig",
    "SyncConfig",
    "TaskConfig",
]


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
        False, "Pack the training states too, so that the run can go on elsewhere (bundle)."
    )
    allow_absolute_paths: bool = setting(
        False, "Pack even where the records name absolute paths of this machine (bundle)."
    )
    base_quant: QuantType | None = setting(
        None,
        "How the base was quantized while an adapter that does not tell was trained; null is nf4 "
        "for schema v2, whose trainer knows nothing else, and none for PEFT.",
    )
    double_quant: bool | None = setting(
        None, "Whether its constants were quantized once more; null is yes where it was quantized."
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
        3, "Optimizer steps that replay=true takes again, from the first (unverified guess).", ge=1
    )
