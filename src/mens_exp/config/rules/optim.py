"""The optimizer's own values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.optim import OptimConfig
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `optim`."""
    optim = config.optim
    if not isinstance(optim, OptimConfig):
        return  # an optimizer of the user's own, which judges its values itself
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):  # noqa: PLR2004
        yield ConfigError(
            "two decay rates are needed",
            where="optim.betas",
            found=optim.betas,
            expected="two numbers >= 0 and < 1",
        )
