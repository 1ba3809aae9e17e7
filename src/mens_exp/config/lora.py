"""Which linear layers get an adapter, and of what shape."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["LoraConfig"]


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """LoRA (arXiv:2106.09685): the update of a target is ``(alpha / r) · B A``, B zero at first."""

    name: str = setting(MISSING, "Name of the target group; set by the option.")
    targets: list[str] = setting(
        MISSING, "Last names of the linear modules that get an adapter, such as q_proj."
    )
    r: int = setting(16, "Rank of the update (SigilDERG's value).", ge=1)
    alpha: int = setting(16, "Numerator of the scale alpha / r (SigilDERG's value).", ge=1)
    dropout: float = setting(
        0.05, "Probability of dropping an input element of A (the QLoRA paper's).", ge=0, lt=1
    )
    init_from: str | None = setting(
        None,
        "A run, `latest`, or an adapter directory (schema v3 or PEFT) whose adapter this run "
        "starts from, with a fresh optimizer; null: a new adapter.",
    )
