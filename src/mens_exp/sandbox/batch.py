"""Several programs, or other calls that wait, at once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.sandbox.program import Execution, Limits, Program, Sandbox

__all__ = ["call_all", "run_all"]

_T = TypeVar("_T")


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
    return call_all([partial(sandbox.run, program, limits) for program in programs], workers)


def call_all(calls: Sequence[Callable[[], _T]], workers: int | None = None) -> list[_T]:
    """Make calls in threads, and return what they do, in their order.

    Where one raises, those that had not begun are not made.
    """
    at_once = workers or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(at_once, thread_name_prefix="sandbox") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
