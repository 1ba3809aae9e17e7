"""What to do, and the settings of the tasks that have some."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = [
    "ChatConfig",
    "ExportConfig",
    "ExportFormat",
    "GgufConfig",
    "GgufDtype",
    "PushConfig",
    "ServeConfig",
    "TaskConfig",
]


class ExportFormat(Enum):
    """What task=export writes."""

    bundle = "bundle"
    gguf = "gguf"


class GgufDtype(Enum):
    """How a GGUF file holds a model's matrices."""

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
    """How task=chat answers."""

    max_new_tokens: int = setting(256, "Longest answer, in tokens (unverified guess).", ge=1)
    temperature: float = setting(
        0.0, "0 takes the likeliest token; above, tokens are drawn under `seed`.", ge=0
    )


@dataclass(kw_only=True, slots=True)
class PushConfig:
    """How task=push uploads."""

    private: bool = setting(True, "Make a repository that is not there yet a private one.")
    message: str | None = setting(None, "Commit message; null names the run.")


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """What task=export packs; `out` names the file."""

    checkpoints: bool = setting(
        False, "Pack the training states too, so that the run can go on elsewhere."
    )
    allow_absolute_paths: bool = setting(
        False, "Pack even where the records name absolute paths of this machine."
    )


@dataclass(kw_only=True, slots=True)
class GgufConfig:
    """What task=export format=gguf writes."""

    dtype: GgufDtype = setting(
        GgufDtype.f16,
        "Of the matrices: f32 and bf16 hold a model of that type exactly, q8_0 takes half of f16 "
        "(default: what every reader runs).",
    )


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    """How task=serve listens."""

    host: str = setting(
        "127.0.0.1", "Address to listen on; the default is this machine alone, without a password."
    )
    port: int = setting(0, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
