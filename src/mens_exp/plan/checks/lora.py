"""The modules that get an adapter, matched against the model's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.validate import range_problems
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import target_problems

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what is wrong with the modules that get an adapter."""
    if any(range_problems(config.model)):
        return  # told already, and the model has no shape then
    yield from target_problems(config.lora, shape_of(config.model))
