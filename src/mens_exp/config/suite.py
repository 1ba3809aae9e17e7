"""What the scorecard measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["HeldoutSyntaxSuite", "NoSuite", "SuiteConfig"]


@dataclass(kw_only=True, slots=True)
class SuiteConfig:
    """What every suite has."""

    executes: ClassVar[bool] = False
    """Whether it executes what a model wrote, and so needs a sandbox."""

    name: str = setting(MISSING, "Name of the suite; set by the option.")


@dataclass(kw_only=True, slots=True)
class NoSuite(SuiteConfig):
    """No scorecard."""

    name: str = "none"


@dataclass(kw_only=True, slots=True)
class HeldoutSyntaxSuite(SuiteConfig):
    """Greedy completions of held-out prompts: the share that parses as Python."""

    name: str = "heldout_syntax"
    items: int = setting(16, "Held-out prompts, drawn by hash, the same for every seed.", ge=1)
    max_new_tokens: int = setting(
        160, "Longest completion, in tokens; prompts whose reference is longer are not used.", ge=1
    )
    batch_size: int = setting(
        8, "Prompts completed together (measured: as fast as 16, half a gigabyte less).", ge=1
    )
