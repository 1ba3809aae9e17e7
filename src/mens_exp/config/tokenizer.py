"""How text becomes ids."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["TokenizerConfig"]


@dataclass(kw_only=True, slots=True)
class TokenizerConfig:
    """The tokenizer; `hf` reads the base model's tokenizer.json and chat template."""

    name: str = setting(MISSING, "Its name in records; set by the option.")
