"""A `suite` option to the suite it means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.config.suite import (
    HeldoutSyntaxSuite,
    HumanEvalSuite,
    JsonlSuite,
    LmEvalSuite,
    MiniPythonSuite,
    RustSuite,
    ScorecardSpecSuite,
    SuiteConfig,
)
from mens_exp.errors import MensError, Problems

if TYPE_CHECKING:
    from mens_exp.evals.suite import Suite

__all__ = ["file_problems", "frozen_suite", "needs_rows"]


def needs_rows(config: SuiteConfig) -> bool:
    """Tell whether the suite's items are rows that the run held out."""
    return isinstance(config, HeldoutSyntaxSuite)


def file_problems(config: SuiteConfig, *, calls_functions: bool = False) -> list[MensError]:
    """List what is wrong with the file of a suite that has one; told before anything is spent.

    Args:
        config: the suite's own.
        calls_functions: whether the task may run Python that the user's files name.
    """
    try:
        if isinstance(config, ScorecardSpecSuite) and config.path is not None:
            from mens_exp.evals.scorecard_spec import read_spec

            read_spec(Path(config.path).expanduser())
        elif isinstance(config, LmEvalSuite) and config.path is not None:
            from mens_exp.evals.harness_suite import files_of

            files_of(config, calls_functions=calls_functions)
        elif isinstance(config, HumanEvalSuite) or getattr(config, "path", None) is not None:
            frozen_suite(config)
    except Problems as several:
        return list(several.problems)
    except MensError as error:
        return [error]
    return []


def frozen_suite(config: SuiteConfig, *, calls_functions: bool = False) -> Suite:
    """Return a suite whose items depend on its own settings alone.

    Args:
        config: the suite's own.
        calls_functions: whether Python that task files name may be run in this process.

    Raises:
        MensError: its files cannot be read, or there are not so many items.
    """
    if isinstance(config, MiniPythonSuite):
        from mens_exp.evals.mini_python import mini_python

        return mini_python(config)
    if isinstance(config, LmEvalSuite):
        from mens_exp.evals.harness_suite import lm_eval_suite
        from mens_exp.plan.preflight import writable_cache

        return lm_eval_suite(config, writable_cache(), calls_functions=calls_functions)
    if isinstance(config, JsonlSuite):
        from mens_exp.evals.jsonl import jsonl_suite

        return jsonl_suite(config)
    if isinstance(config, HumanEvalSuite):
        from mens_exp.evals.program_suite import humaneval

        return humaneval(config)
    if isinstance(config, RustSuite):
        from mens_exp.evals.rust_suite import rust_suite

        return rust_suite(config)
    raise AssertionError(f"suite={config.name} has no items of its own")
