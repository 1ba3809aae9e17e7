"""Requirements of the chosen backend on the base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.fields import range_problems
from mens_exp.layout.shape import shape_of
from mens_exp.plan.trained import proxy_stack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what keeps the backend from being built on the base model."""
    if any(range_problems(config.model)) or any(range_problems(config.backend)):
        return  # told already
    proxy_stack(config, shape_of(config.model))  # raises what it has to say
    yield from ()
