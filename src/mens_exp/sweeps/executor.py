"""The launcher's interface to the place where jobs run: start them, report on them, end them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.sweep import SweepJob
    from mens_exp.sweeps.process import Ended

__all__ = ["Executor", "Work"]


class Work(Protocol):
    """One job in the hands of an executor.

    Attributes:
        waits: why it does not run yet; None while it does.
    """

    waits: str | None

    def ended(self) -> Ended | None:
        """Tell how it ended; None while it runs or waits.

        The attempts of the job's record are brought up to date on the way.
        """
        ...

    def end(self) -> None:
        """Let this job alone close its record and end, as nobody wants its result any more."""
        ...


class Executor(Protocol):
    """A place where the jobs of a sweep run."""

    look_s: float  # between two looks at them, in seconds

    def start(self, jobs: Sequence[SweepJob]) -> list[tuple[SweepJob, Work | str]]:
        """Take as many waiting jobs, in order, as there is room for; the others are offered again.

        A sweep that lists its cells offers all of them from the first; a search offers each as it
        is drawn.

        Returns:
            Each one taken, with its work, or with why it could not be started.
        """
        ...

    def adopt(self, job: SweepJob) -> Work | None:
        """Take up a job that an earlier launcher left behind; None where it is not at work."""
        ...

    def poll(self) -> None:
        """Ask how all jobs are, once for all of them; their works then tell of it."""
        ...

    def cancel(self, works: Sequence[Work], number: int) -> None:
        """Let jobs close their records and end.

        Args:
            works: those at work.
            number: of the signal that asked for it.
        """
        ...
