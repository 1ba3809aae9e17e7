"""Several programs at once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.sandbox.program import Execution, Limits, Program, Sandbox

__all__ = ["run_all"]


def run_all(
    sandbox: Sandbox, programs: Sequence[Program], limits: Limits, workers: int | None = None
) -> list[Execution]:
    """Execute every program.

    Args:
        sandbox: where.
        programs: what.
        limits: of each one.
        workers: how many at once; None is one for each processor this process may use.

    Returns:
        What came of each, in the order of the programs.

    Raises:
        SetupError: the sandbox broke; programs that had not begun are not executed.
    """
    at_once = workers or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(at_once, thread_name_prefix="sandbox") as pool:
        futures = [pool.submit(sandbox.run, program, limits) for program in programs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
