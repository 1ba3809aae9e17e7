"""Programs run in a sandbox, several at once, each within the same limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.sandbox.program import Execution, Limits, Program, Sandbox

__all__ = ["Runner"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """A sandbox with the limits of a suite's programs.

    Attributes:
        sandbox: a fresh surrounding for each program.
        limits: what one of them may use.
        workers: how many run at once; None is one for each processor.
    """

    sandbox: Sandbox
    limits: Limits
    workers: int | None = None

    @property
    def kind(self) -> str:
        """The sandbox's kind; ``unsafe`` isolates nothing."""
        return self.sandbox.kind

    def run(self, programs: Sequence[Program], *, limits: Limits | None = None) -> list[Execution]:
        """Run programs and return what came of each, in their order.

        Args:
            programs: what to run.
            limits: of each, instead of the runner's own: a compiler needs more.
        """
        from mens_exp.sandbox.batch import run_all

        return run_all(self.sandbox, programs, limits or self.limits, self.workers)
