"""Whether the chosen sink can be written to."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from mens_exp.config.logger import TensorboardLogger
from mens_exp.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield the package that the sink needs and that is not installed."""
    if isinstance(config.logger, TensorboardLogger) and find_spec("tensorboard") is None:
        yield MissingExtra(
            "tensorboard is not installed",
            where="logger",
            found="tensorboard",
            expected="the extra `tensorboard`, or another logger, such as logger=csv",
            remedy="pip install 'mens-exp[tensorboard]'",
        )
