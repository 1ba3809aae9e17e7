"""A run as one self-contained HTML page.

The page asks for nothing from anywhere: styles and plots are inside it and it runs no
script. All text is escaped, since completions are whatever a model wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mens_exp.report import attribution_view, data_contract_view, sections, summary, wording
from mens_exp.report.rendering import rendered

if TYPE_CHECKING:
    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.report.attribution_view import AttributionPage
    from mens_exp.report.plots import Plot
    from mens_exp.report.records import Records

__all__ = ["render"]

_CONDITIONS = ("base", "tuned")
_OPEN_ITEMS = 3  # completions unfolded at first sight
_MOST_ITEMS = 100  # more would make a page of megabytes; the rest stays in events.jsonl


@dataclass(frozen=True, kw_only=True, slots=True)
class _Completion:
    condition: str
    text: str
    outcome: summary.Outcome | None
    finished: bool
    error: str
    facts: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shown:
    item: summary.Item
    first_line: str
    completions: list[_Completion]


def render(records: Records) -> str:
    """Render the report of one run.

    Args:
        records: the run; whatever it never reached is shown as absent, with the reason.

    Returns:
        An HTML document; the same records give the same text.
    """
    return rendered(
        "report.html.j2",
        title=_title(records),
        m=records.manifest,
        status=records.status,
        headline=_headline(records),
        command=summary.command(records),
        commit=_commit(records.manifest.provenance),
        error=_error(records),
        pairs=summary.pairs(records),
        costs=summary.cost(records),
        plots=_plots(records),
        attribution=_attribution(records),
        items=_shown(records),
        open_items=_OPEN_ITEMS,
        unseen_items=_unseen(records),
        crossed=_crossed(records),
        no_items=_no_items(records),
        scorecard=records.scorecard,
        answers_title=_answers_title(records),
        unsafe=summary.unsafe(records),
        scores=sections.scores(records),
        compared=sections.compared(records),
        components=_components(records),
        facts=sections.facts(records),
        inputs=sections.inputs(records),
        data_contract=data_contract_view.cells(records),
        data_violations=data_contract_view.violations(records),
        outputs=sections.outputs(records),
        attempts=sections.attempts(records),
        peft_view=summary.peft_view(records),
        environment=sections.environment(records),
        unknown=_unknown(records),
        config=None if records.config is None else wording.visible(records.config),
    )


def _headline(records: Records) -> str:
    if records.attribution is not None and records.status == "succeeded":
        return attribution_view.headline(records.attribution)
    return summary.headline(records)


def _attribution(records: Records) -> tuple[AttributionPage, list[tuple[Plot, Markup]]] | None:
    if records.attribution is None:
        return None
    page = attribution_view.page(records.attribution)
    return page, [(plot, Markup(plot.svg)) for plot in page.maps]  # noqa: S704 - drawn here


def _plots(records: Records) -> list[tuple[Plot, Markup]]:
    """Draw the telemetry; these tasks have none, and matplotlib alone takes a second to import."""
    if records.manifest.task in {"plan", "attribute", "compare", "promote"}:
        return []
    from mens_exp.report import kpi_plot, plots

    drawn = [*plots.draw(records), *kpi_plot.draw(records)]
    return [(plot, Markup(plot.svg)) for plot in drawn]  # noqa: S704 - drawn here


def _title(records: Records) -> str:
    manifest = records.manifest
    if manifest.experiment:
        return wording.visible(manifest.experiment)
    model = str(manifest.inputs.get("base_model") or "").rsplit("/", 1)[-1]
    return wording.visible(f"{manifest.task} · {model}" if model else manifest.run_id)


def _commit(provenance: dict[str, Any]) -> dict[str, Any] | None:
    commit = provenance.get("commit")
    if commit is None:
        return None
    return {"hash": wording.visible(str(commit)), "dirty": bool(provenance.get("dirty"))}


def _error(records: Records) -> dict[str, str] | None:
    error = records.manifest.error
    if error is None:
        return None
    return {
        key: wording.visible(str(error.get(key) or "")) for key in ("type", "message", "remedy")
    }


def _shown(records: Records) -> list[_Shown]:
    return [
        _Shown(
            item=item,
            first_line=next((line for line in item.prompt.splitlines() if line.strip()), ""),
            completions=[_completion(name, item.completions.get(name)) for name in item.conditions],
        )
        for item in summary.by_item(records.items)[:_MOST_ITEMS]
    ]


def _unseen(records: Records) -> int:
    return max(0, len(summary.by_item(records.items)) - _MOST_ITEMS)


def _completion(condition: str, event: ItemEvent | None) -> _Completion:
    condition = wording.visible(condition)
    if event is None:
        return _Completion(
            condition=condition, text="", outcome=None, finished=True, error="", facts=""
        )
    tokens, style = event["tokens_out"], event["style"]
    facts = [] if tokens is None else [f"{wording.count(tokens)} tokens"]
    facts += [] if style is None else [f"read as: {wording.visible(style)}"]
    return _Completion(
        condition=condition,
        text=wording.visible(event["completion"]),
        outcome=summary.outcome_of(event),
        finished=event["finished"],
        error=wording.visible(event["error"] or ""),
        facts=", ".join(facts),
    )


def _crossed(records: Records) -> list[tuple[str, str, int]]:
    """Cross the outcomes of the items of which both are known: (class, words, items)."""
    pairs = [
        tuple(summary.outcome_of(item.completions[name]) for name in _CONDITIONS)
        for item in summary.by_item(records.items)
        if item.completions.keys() >= set(_CONDITIONS)
    ]
    outcomes = [pair for pair in pairs if all(one.good is not None for one in pair)]
    if not outcomes:
        return []
    good = [tuple(one.good for one in pair) for pair in outcomes]
    does, do = outcomes[0][0].words_of_good
    return [
        ("both", f"both {do}", good.count((True, True))),
        ("tuned", f"only tuned {does}", good.count((False, True))),
        ("base", f"only base {does}", good.count((True, False))),
        ("neither", f"neither {does}", good.count((False, False))),
        *([("unknown", "unknown", unknown)] if (unknown := len(pairs) - len(outcomes)) else []),
    ]


def _answers_title(records: Records) -> str:
    card = records.scorecard
    if card is None or card.suite == "heldout_syntax":
        return "Held-out completions"
    return f"Answers to {wording.visible(card.suite)}"


def _no_items(records: Records) -> str:
    if not summary.expects_answers(records):
        return "This run evaluated no held-out items."
    return "The run ended before any held-out item was completed."


def _components(records: Records) -> list[tuple[str, str]]:
    memory = (records.plan or {}).get("memory_bytes") or {}
    return [(wording.label(name), wording.size(part)) for name, part in sections.components(memory)]


def _unknown(records: Records) -> list[tuple[str, str]]:
    merged = {
        **records.manifest.unknown,
        **(records.scorecard.unknown if records.scorecard else {}),
    }
    return [(wording.visible(name), wording.visible(why)) for name, why in sorted(merged.items())]
