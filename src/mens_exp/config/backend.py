"""What graph is trained."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["BackendConfig"]


@dataclass(kw_only=True, slots=True)
class BackendConfig:
    """The trained graph: base model, quantizer and adapter put together."""

    _target_: str = setting(MISSING, "Class of the backend; set by the option.")
    name: str = setting(MISSING, "Its name in records; set by the option.")
