"""What to do, and the settings of the tasks that have some."""

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
    "InspectConfig",
    "PushConfig",
    "TaskConfig",
]


class ExportFormat(Enum):
    """What task=export writes."""

    bundle = "bundle"
    peft = "peft"
    v2 = "v2"
    v3 = "v3"


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
class AttributeConfig:
    """What task=attribute measures on, and what its suggestion may cost."""

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
    """What task=export writes beside `format` and `out`."""

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
class InspectConfig:
    """How much task=inspect does again."""

    replay_steps: int = setting(
        3, "Optimizer steps that replay=true takes again, from the first (unverified guess).", ge=1
    )
