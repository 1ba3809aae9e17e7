"""The modules that get an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.nearest import expected_name
from mens_exp.errors import ConfigError
from mens_exp.layout.shape import family_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what is wrong with the modules that get an adapter."""
    paths = [one.path for one in family_for(config.model).projections]
    for target in config.lora.targets:
        if not any(f".{path}".endswith(f".{target}") for path in paths):
            yield ConfigError(
                "matches no module of the model",
                where="lora.targets",
                found=target,
                expected=expected_name(target, [path.rpartition(".")[2] for path in paths]),
            )
