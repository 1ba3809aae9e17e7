"""The split, and what a source of rows needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.data import JsonlData
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `data`."""
    data = config.data
    if data.val_frac + data.heldout_frac >= 1:
        yield ConfigError(
            "nothing is left to train on",
            where="data.val_frac",
            found=f"{data.val_frac} + heldout_frac {data.heldout_frac}",
            expected="a sum under 1",
        )
    if isinstance(data, JsonlData) and not data.path:
        yield ConfigError("no file named", where="data.path", expected="the path of a JSONL file")
