"""The rank of this process among the processes of a run; torch-free.

A run of several processes has its first one keep the record. It starts the others on its own
machine; several machines are started by torchrun, which says in the environment who is who.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["ALONE", "Rank", "of_torchrun"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One of the processes that train together.

    Attributes:
        rank: its number among all, from 0.
        world_size: processes on all machines.
        local_rank: its number on its machine.
        local_world_size: processes on its machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_first(self) -> bool:
        """Whether it is the one that keeps the record."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self.world_size == 1


ALONE = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1)


def of_torchrun() -> Rank | None:
    """Return what torchrun says this process is; None where it did not start it, or it alone."""
    said = [os.environ.get(name, "") for name in _VARIABLES]
    numbers = said[:4]
    if not all(said) or not all(text.isdecimal() for text in numbers):
        return None
    rank, world_size, local_rank, local_world_size = map(int, numbers)
    if world_size == 1:
        return None
    return Rank(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )
