"""What to do."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["TaskConfig"]


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """One task; its option's YAML names it."""

    name: str = setting(MISSING, "The task's name; set by the option.")
