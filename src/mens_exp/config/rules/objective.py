"""Rules for the tokens that learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.nearest import expected_name
from mens_exp.config.objective import LABELLINGS, LastKObjective
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `objective`."""
    if config.objective.labels not in LABELLINGS:
        yield ConfigError(
            "unknown labelling rule",
            where="objective.labels",
            found=config.objective.labels,
            expected=expected_name(config.objective.labels, LABELLINGS),
        )
    if isinstance(config.objective, LastKObjective) and config.objective.k > config.data.seq_len:
        yield ConfigError(
            "more last tokens than a sequence has",
            where="objective.k",
            found=config.objective.k,
            expected=f"at most data.seq_len ({config.data.seq_len})",
            remedy="lower objective.k, or raise data.seq_len",
        )
