"""The planner's gates, as preflight asks them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.plan.contract import contract_of
from mens_exp.plan.planner import Gate, refusals
from mens_exp.plan.surroundings import surroundings_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield every reason to refuse what the run means."""
    for gate, error in refusals(contract_of(config), surroundings_of(config)):
        if gate is not Gate.FLAGS:  # the rules of their groups name them by their dotted paths
            yield error
