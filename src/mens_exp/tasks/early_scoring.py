"""Scoring of a run while it trains: prepared before the first step, or refused there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.adapter import Selection
from mens_exp.config.rules.suite import scorecard_of
from mens_exp.errors import RequestError
from mens_exp.evals.during import FirstItems, Measured, measure
from mens_exp.evals.kpi_table import KPIS, KpiGroup
from mens_exp.tasks.scoring import Prepared, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["first_items", "prepared_early"]


def prepared_early(
    config: RunConfig,
    run: Run,
    backend: Backend,
    heldout: Sequence[TrainingPair],
    tokenizer: Tokenizer,
) -> Prepared | None:
    """Prepare what scores in training and after it; None where nothing is scored before its end.

    Args:
        config: the whole configuration.
        run: the open run.
        backend: the graph.
        heldout: rows that were held out, for a suite made of them.
        tokenizer: with the chat template of training.

    Raises:
        RequestError: the suite cannot score, or not what the best adapter is chosen by.
    """
    node = scorecard_of(config)
    if node is None or node.every_n_steps is None:
        return None
    prepared = prepare(config, run, backend, heldout, tokenizer)
    if isinstance(prepared, str):
        raise RequestError(
            "nothing can be scored while training runs",
            where="callbacks.scorecard.every_n_steps",
            found=prepared,
            expected="a suite that can score",
            remedy="choose another suite, or callbacks.scorecard.every_n_steps=null",
        )
    chosen_by = KPIS.get(config.adapter.metric)
    if config.adapter.select is Selection.best and chosen_by is not None:
        runs_nothing = prepared.suite.needs_sandbox and prepared.runner is None
        if runs_nothing and chosen_by.group is KpiGroup.SEMANTIC:
            raise RequestError(
                "nothing that the model writes is executed here, so it is never measured",
                where="adapter.metric",
                found=chosen_by.name,
                expected="parse_rate, or a sandbox that opens",
                remedy="see sandbox in `python -m mens_exp task=doctor`",
            )
    return prepared


def first_items(prepared: Prepared, manifest: Manifest) -> Callable[[int], Measured]:
    """Return what scores the tuned model on so many of the suite's first items.

    Args:
        prepared: suite, engine and sandbox.
        manifest: of the run.
    """

    def score(items: int) -> Measured:
        suite = FirstItems(prepared.suite, items)
        return measure(suite, prepared.engine, prepared.runner, prepared.plan, manifest)

    return score
