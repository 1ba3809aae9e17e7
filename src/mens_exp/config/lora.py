"""LoRA settings: target layers, adapter shape and initialization."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import Effect, setting, when


class LoraVariant(Enum):
    """The way the two matrices modify a weight."""

    lora = "lora"
    rslora = "rslora"
    dora = "dora"


class LoraInit(Enum):
    """The initialization of the two matrices."""

    default = "default"
    pissa = "pissa"
    loftq = "loftq"


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """LoRA (arXiv:2106.09685): a target's update is ``(alpha / r) · B A``, B initially zero."""

    name: str = setting(
        MISSING, "Name of the target group; set by the option.", changes=Effect.NOTHING
    )
    targets: list[str] = setting(
        MISSING,
        "What gets an adapter: groups (attention, qkv, qv, o_proj, mlp, experts, all_linear, "
        "lm_head), "
        "last names of modules (q_proj, self_attn.q_proj), or globs over a module's whole path "
        "('*.layers.1?.mlp.*').",
        aliases={
            "lora_target": "LLaMA-Factory",
            "lora_target_modules": "Axolotl and TRL",
            "target_modules": "PEFT and Unsloth",
        },
        example="[attention,down_proj]",
    )
    r: int = setting(
        16,
        "Rank of the update (SigilDERG's value).",
        ge=1,
        contract=("adapter.rank",),
        aliases={"lora_rank": "LLaMA-Factory and torchtune", "lora_r": "Axolotl and LitGPT"},
    )
    alpha: int = setting(
        16,
        "Numerator of the scale: alpha / r, alpha / sqrt(r) in rslora (SigilDERG's value).",
        ge=1,
        contract=("adapter.alpha",),
        aliases={"lora_alpha": "PEFT, Axolotl, LLaMA-Factory, torchtune and LitGPT"},
    )
    dropout: float = setting(
        0.05,
        "Probability of dropping an input element of A (the QLoRA paper's); 0 with experts, whose "
        "weights PEFT adapts and not their inputs.",
        ge=0,
        lt=1,
        contract=("adapter.dropout",),
        aliases={"lora_dropout": "PEFT, Axolotl, LLaMA-Factory, torchtune and LitGPT"},
    )
    variant: LoraVariant = setting(
        LoraVariant.lora,
        "lora; rslora, whose scale is alpha / sqrt(r) (arXiv:2312.03732); or dora, which learns "
        "the length of each output's weights apart (arXiv:2402.09353).",
    )
    rank_pattern: dict[str, int] = setting(
        {},
        "Ranks of single modules, by target: {down_proj: 8}. The last one that matches counts.",
        example="{down_proj:8}",
    )
    alpha_pattern: dict[str, int] = setting(
        {},
        "Alphas of single modules, by target. The last one that matches counts.",
        example="{down_proj:16}",
    )
    init: LoraInit = setting(
        LoraInit.default,
        "default: A random, B zero (PEFT's); pissa: the first r singular directions of a weight, "
        "the base quantizes what is left (arXiv:2404.02948); loftq: those of the quantization "
        "error (arXiv:2310.08659).",
    )
    loftq_iters: int = setting(
        1,  # with one, the base stays plainly quantized, and the adapter fits it exactly
        "Rounds of quantizing and decomposing in loftq; from the second on the base changes too.",
        ge=1,
        only_if=when("lora.init", "loftq"),
        idle=1,
    )
    init_from: str | None = setting(
        None,
        "A run, `latest`, or an adapter directory (schema v3 or PEFT) whose adapter this run "
        "starts from, with a fresh optimizer; null: a new adapter.",
        example="latest",
    )

    @property
    def start_changes_base(self) -> bool:
        """Whether the base holds the residual that initialization left of its weights."""
        return self.init is LoraInit.pissa or (self.init is LoraInit.loftq and self.loftq_iters > 1)
