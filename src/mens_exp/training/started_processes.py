"""Lightning's view of a run's processes, so that it neither looks for nor starts any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.fabric.plugins import ClusterEnvironment

if TYPE_CHECKING:
    from mens_exp.plan.ranks import Rank

__all__ = ["StartedProcesses"]


class StartedProcesses(ClusterEnvironment):
    """Says that the processes are there, have joined, and which of them this is.

    One process alone is told too: Lightning would look for a cluster around it.
    """

    def __init__(self, rank: Rank) -> None:
        """Stand for one process."""
        self._rank = rank

    @property
    def creates_processes_externally(self) -> bool:
        """Not by Lightning."""
        return True

    @property
    def main_address(self) -> str:
        """Nowhere: the processes have met before Lightning would make them."""
        return ""

    @property
    def main_port(self) -> int:
        """None, for the same reason."""
        return 0

    @staticmethod
    def detect() -> bool:
        """It is named, never found."""
        return False

    def world_size(self) -> int:
        """Processes on all machines."""
        return self._rank.world_size

    def set_world_size(self, size: int) -> None:
        """Take note of what Lightning has counted."""
        assert size == self._rank.world_size, "Lightning counts the same processes"

    def global_rank(self) -> int:
        """The number of this process among all."""
        return self._rank.rank

    def set_global_rank(self, rank: int) -> None:
        """Take note of how Lightning numbers this process."""
        assert rank == self._rank.rank, "Lightning numbers them the same way"

    def local_rank(self) -> int:
        """The number of this process on its machine."""
        return self._rank.local_rank

    def node_rank(self) -> int:
        """The number of its machine."""
        return self._rank.rank // self._rank.local_world_size
