"""Write a run's HTML report, model card and the mens trainer's views next to its records.

The page is self-contained: styles and plots are inline, and it has no scripts. All text is escaped,
because completions may contain anything. run_summary.json and training_skip_stats.json have the
mens trainer's keys; our additions are under the key ``mens_exp``. Values missing from the manifest
are null, and ``mens_exp.unknown`` gives the reasons.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mens_exp.artifacts.atomic import write_json, write_text
from mens_exp.config.suite import title_of
from mens_exp.report import attribution_view, rendering, sections, summary, wording
from mens_exp.report.rendering import rendered
from mens_exp.report.summary import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.report.attribution_view import AttributionPage
    from mens_exp.report.plots import Plot
    from mens_exp.report.summary import Records

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


def render_page(records: Records) -> str:
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
        own_metrics=sections.own_metrics(records),
        media=sections.media(records),
        compared=sections.compared(records),
        components=_components(records),
        facts=sections.facts(records),
        inputs=sections.inputs(records),
        data_contract=sections.contract_cells(records),
        data_violations=sections.contract_violations(records),
        outputs=sections.outputs(records),
        attempts=sections.attempts(records),
        peft_view=summary.peft_view(records),
        environment=sections.environment(records),
        unknown=_unknown_rows(records),
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
    from mens_exp.report import plots

    drawn = [*plots.draw(records), *plots.draw_kpis(records), *plots.draw_own(records)]
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
    return wording.visible(title_of(None if card is None else card.suite))


def _no_items(records: Records) -> str:
    if not summary.expects_answers(records):
        return "This run evaluated no held-out items."
    return "The run ended before any held-out item was completed."


def _components(records: Records) -> list[tuple[str, str]]:
    memory = (records.plan or {}).get("memory_bytes") or {}
    return [(wording.label(name), wording.size(part)) for name, part in sections.components(memory)]


def _unknown_rows(records: Records) -> list[tuple[str, str]]:
    merged = {
        **records.manifest.unknown,
        **(records.scorecard.unknown if records.scorecard else {}),
    }
    return [(wording.visible(name), wording.visible(why)) for name, why in sorted(merged.items())]


_ADAPTER = ("adapter/adapter.safetensors", "weights/model.safetensors")


def run_summary(manifest: Manifest) -> dict[str, Any]:
    """Return the figures that a run ended with; paths are relative to its directory."""
    results, contract = manifest.results, manifest.contract or {}
    weights = next((name for name in _ADAPTER if name in manifest.outputs), None)
    view = {
        "schema": "vox_mens_run_summary_v1",
        "run_id": manifest.run_id,
        "base_model": manifest.inputs.get("base_model"),
        "adapter_tag": None,
        "global_step": results.get("micro_batches"),
        "optimizer_step_count": results.get("steps"),
        "avg_train_loss": None,
        "avg_val_loss_last_epoch": results.get("tuned_val_loss"),
        "total_tokens": results.get("tokens"),
    }
    unknown = _unknown_keys(manifest, view) | {
        "adapter_tag": "a run has no tag; its run_id is unique",
        "avg_train_loss": "telemetry.jsonl has the loss of each step; the manifest has no mean",
    }
    if weights is None:
        unknown["artifacts.final_adapter"] = _not_reached(manifest)
    return view | {
        "artifacts": {
            "final_adapter": weights,
            "training_skip_stats": "training_skip_stats.json",
            "telemetry_jsonl": "telemetry.jsonl",
            "model_card": "MODEL_CARD.md",
        },
        "mens_exp": {
            "status": str(manifest.status),
            "experiment": manifest.experiment,
            "started_utc": manifest.started_utc,
            "ended_utc": manifest.ended_utc,
            "config_digest": manifest.config_digest,
            "contract_digest": contract.get("digest"),
            "base_val_loss": results.get("base_val_loss"),
            "supervised_tokens": results.get("supervised_tokens"),
            "wall_s": results.get("wall_s"),
            "unknown": dict(sorted(unknown.items())),
        },
    }


def training_skip_stats(manifest: Manifest) -> dict[str, Any]:
    """Return how many training rows were not learned from, by reason.

    ``no_supervised_skip_rate`` is a share of the encoded documents, each counted once; over the
    epochs of a run none is skipped again. Filters and the quarantine act before rows are encoded,
    on all sides of the split; a quarantined row counts for each of its reasons.
    """
    data: Mapping[str, Any] = manifest.inputs.get("data") or {}
    counts = _counts(data, manifest.results.get("streamed"))
    dropped, short, kept = counts["dropped"], counts["short"], counts["documents"]
    no_supervision = None if dropped is None or short is None else dropped - short
    encoded = None if kept is None or dropped is None else kept + dropped
    view = {
        "schema": "vox_mens_training_skip_stats_v1",
        "optimizer_steps_executed": manifest.results.get("steps"),
        "micro_steps_executed": manifest.results.get("micro_batches"),
        "skip_no_supervised_positions": no_supervision,
        "skip_short_seq": short,
        "skip_curriculum": 0,
        "skip_token_id_oob": 0,  # an id without an embedding is refused before training
        "no_supervised_skip_rate": None
        if no_supervision is None or encoded is None
        else no_supervision / max(encoded, 1),
    }
    return view | {
        "mens_exp": {
            "run_id": manifest.run_id,
            "documents": kept,
            "truncated": counts["truncated"],
            "skips": {
                "bad_vocab": 0,
                "short_seq": short,
                "no_supervision": no_supervision,
                "quarantined": counts["quarantined"],
                "filtered": counts["filtered"],
            },
            "unknown": _unknown_keys(manifest, view),
        }
    }


def _counts(data: Mapping[str, Any], streamed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the counts of encoded documents, and of rows that were left out before, by reason."""
    if streamed is not None:  # what was read until training ended; reasons are not kept apart
        rows = streamed.get("rows") or {}
        names = ("documents", "truncated", "dropped", "short")
        before = {"quarantined": rows.get("bad"), "filtered": rows.get("filtered")}
        return {name: streamed.get(name) for name in names} | before
    return {
        "documents": data.get("train_rows"),
        "truncated": data.get("train_truncated"),
        "dropped": data.get("train_dropped"),
        "short": data.get("train_short"),
        "quarantined": dict((data.get("quarantined") or {}).get("reasons") or {}),
        "filtered": _filtered(data),
    }


def _filtered(data: Mapping[str, Any]) -> dict[str, int]:
    """Add up what the filters of all rows refused, and in a mix those of each source."""
    of_mix = ((data.get("mixed") or {}).get("sources") or {}).values()
    refused: Counter[str] = Counter()
    for part in (data.get("filtered") or {}, *of_mix):
        refused.update(part.get("refused") or {})
    return dict(refused)


def _unknown_keys(manifest: Manifest, view: Mapping[str, Any]) -> dict[str, str]:
    return {name: _not_reached(manifest) for name, value in view.items() if value is None}


def _not_reached(manifest: Manifest) -> str:
    if manifest.status == "succeeded":
        return "not recorded by the version that trained"
    return f"not reached: the run {manifest.status}"


def write_report(run: RunDir) -> None:
    """Render ``report.html`` and ``MODEL_CARD.md`` from the JSON of a run.

    A training run gets ``run_summary.json`` and ``training_skip_stats.json`` as well. All are made
    before any is written, and each is either whole or absent.

    Args:
        run: a directory that holds at least a manifest.

    Raises:
        MensError: a record is missing or damaged.
    """
    records = load(run)
    page, model_card = render_page(records), rendering.render_card(records)
    views = {}
    if records.manifest.task == "train":
        views[run.run_summary] = run_summary(records.manifest)
        views[run.skip_stats] = training_skip_stats(records.manifest)
    write_text(run.report, page)
    write_text(run.model_card, model_card)
    for path, view in views.items():
        write_json(path, view)
