"""Score base and tuned in one process and write the scorecard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.scorecard import Condition, write_item_events
from mens_exp.config.suite import HeldoutSyntaxSuite, SuiteConfig
from mens_exp.evals.heldout_syntax import choose_items, evaluate, to_scorecard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.backends.protocol import Backend
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["score"]


def score(
    suite: SuiteConfig,
    run: Run,
    backend: Backend,
    heldout: Sequence[TrainingPair],
    tokenizer: Tokenizer,
) -> None:
    """Write scorecard.json and events.jsonl, or say in the manifest why there is none."""
    if not isinstance(suite, HeldoutSyntaxSuite):
        run.unknown("scorecard", "suite=none")
        return
    if not heldout:
        run.unknown("scorecard", "no row is held out; see data.heldout_frac")
        return
    items = choose_items(heldout, tokenizer, suite, max_positions=backend.max_positions)
    if not items:
        run.unknown(
            "scorecard",
            f"no held-out answer is under suite.max_new_tokens={suite.max_new_tokens}",
        )
        return
    with backend.base_only():
        events = evaluate(items, backend, tokenizer, suite, Condition.BASE)
    events += evaluate(items, backend, tokenizer, suite, Condition.TUNED)
    scorecard = to_scorecard(suite, items, events)
    write_item_events(run.dir.events, events)
    scorecard.write(run.dir.scorecard)
    run.telemetry.emit(
        "scorecard", {"suite": suite.name, "items": len(items), "conditions": scorecard.conditions}
    )
