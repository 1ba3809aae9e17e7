"""What an optimizer needs of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.optim import PagedAdamw8bitConfig
from mens_exp.errors import ConfigError
from mens_exp.plan.device import may_use_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


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
