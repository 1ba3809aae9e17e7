"""Checks of the optimizer: the machine that it needs, and a rate that fits the model's size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.optim import LionConfig, PagedAdamw8bitConfig
from mens_exp.errors import ConfigError
from mens_exp.plan.device import may_use_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError
    from mens_exp.layout.shape import Shape

__all__ = ["check", "rate_warnings"]

# Peak rates of published QLoRA runs under AdamW (arXiv:2305.14314, table 9): 7B and 13B, then 33B
# and 65B. Smaller models have none; ours of 135M trains best at ten times the first.
_FEWEST, _MANY = 3e9, 2e10  # parameters
_RATE, _RATE_OF_MANY = 2e-4, 1e-4
_FAR = 4.0  # times higher or lower; unverified guess
_OF_LION = 0.1  # its steps are all of one length (arXiv:2302.06675, section 5)


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield an optimizer that this machine cannot run."""
    accelerator = config.trainer.accelerator
    if isinstance(config.optim, PagedAdamw8bitConfig) and not may_use_gpu(accelerator):
        yield ConfigError(
            "paged memory needs a CUDA GPU",
            where="optim",
            found=f"{config.optim.name} with trainer={accelerator}, and no GPU to use",
            expected="optim=adamw, adamw_8bit or lion, which run on CPU",
            remedy="use optim=adamw_8bit, which is the same arithmetic, or optim=adamw",
        )


def rate_warnings(config: RunConfig, shape: Shape) -> Iterator[str]:
    """Yield a warning where an adapter's peak rate is far from those of published runs."""
    if config.backend.name in {"full", "proxy"} or shape.parameters < _FEWEST:
        return
    published = _RATE if shape.parameters < _MANY else _RATE_OF_MANY
    usual = published * (_OF_LION if isinstance(config.optim, LionConfig) else 1.0)
    times = config.optim.lr / usual
    if not 1 / _FAR <= times <= _FAR:
        yield (
            f"optim.lr={config.optim.lr:g} is {times:.2g} times the rate that published QLoRA runs "
            f"of this size train with ({usual:g}; arXiv:2305.14314, table 9). "
            f"Next: set optim.lr={usual:g}, or sweep it"
        )
