"""Inspections, certificates, decisions and searches: terminal tables, and parts of pages.

Pure functions of their records.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mens_exp.artifacts.certificate import Link, Outcome
from mens_exp.artifacts.sweep import TrialState
from mens_exp.report import wording
from mens_exp.report.rendering import rendered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.artifacts.certificate import (
        Ancestor,
        Certificate,
        Check,
        Comparison,
        Inspection,
        LayerRecord,
        Replay,
    )
    from mens_exp.artifacts.decision_ledger import DecisionEntry
    from mens_exp.artifacts.sweep import Dimension, SearchRecord, SweepRecord, Trial

_SHORT = 12  # digits of a hash, enough to tell two apart by eye
_FIGURES = {
    "frobenius": "Frobenius",
    "spectral": "spectral",
    "effective_rank": "eff. rank",
    "stable_rank": "stable rank",
    "magnitude_change": "row lengths",
}
_SEVERITY = (Outcome.EQUAL, Outcome.CLOSE, Outcome.NOT_HERE, Outcome.DIFFERS)
_MARKS = {
    Outcome.EQUAL: ("=", "green"),
    Outcome.CLOSE: ("≈", "green"),
    Outcome.DIFFERS: ("≠", "bold red"),
    Outcome.NOT_HERE: ("-", "dim"),
}


def inspection_view(found: Inspection) -> RenderableType:
    """Show the findings of an inspection; for a verification, everything that is not equal."""
    parts: list[RenderableType] = [_title(found.path), _head(found)]
    if found.layers:
        parts += [_title("Layers"), _places(found.layers)]
        parts += [_title("Deltas, scale · B A"), _sizes(found.layers)]
    parts += [_title("Lineage"), _lineage(found.lineage)]
    if found.verification is not None:
        checks = found.verification["checks"]
        parts.append(_title(f"Verified: {verification_verdict(checks)}"))
        parts.append(_chain(checks))
        parts.append(_checks([one for one in checks if one["outcome"] != Outcome.EQUAL]))
    if found.replay is not None:
        again = found.replay
        parts += [_title(f"Replayed: {replay_verdict(again)}"), _checks(again["checks"])]
        parts += [Text(f"other conditions: {one}", style="yellow") for one in again["conditions"]]
    return Group(*parts)


def _chain(checks: Sequence[Check]) -> RenderableType:
    """Count what each link of the chain of evidence came to, in the chain's order."""
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("link", no_wrap=True)
    table.add_column("records", justify="right", no_wrap=True)
    table.add_column("values", overflow="fold")
    for link in Link:
        own = [check for check in checks if check["link"] == link]
        if own:
            worst = max((Outcome(check["outcome"]) for check in own), key=_SEVERITY.index)
            mark, style = _MARKS[worst]
            records = str(len({check["of"] for check in own}))
            table.add_row(Text(mark, style=style), str(link), records, verification_verdict(own))
    return table if table.row_count else Text()


def verification_verdict(checks: Sequence[Check]) -> str:
    """Summarise in one line how many values match their records."""
    counts = dict.fromkeys(Outcome, 0)
    for check in checks:
        counts[Outcome(check["outcome"])] += 1
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)


def replay_verdict(replay: Replay) -> str:
    """Say in a line how far a replay was the same."""
    if replay["first_difference"] is None:
        return f"identical through step {replay['identical_through']}"
    return f"first difference: {replay['first_difference']}"


def _title(text: str) -> Text:
    return Text(text, style="italic")


def _head(found: Inspection) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(found):
        table.add_row(name, Text(text))
    return table


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "what", found.what
    base = found.base
    if base is not None:
        quant = base["base_quant"] or "quantization unknown"
        double = ", double quantized" if base["double_quant"] else ""
        revision = f" @ {base['revision']}" if base["revision"] else ""
        yield "base", f"{base['name'] or 'unknown'}{revision}, {quant}{double}"
        if base["weights_sha256"] is not None:
            yield "base sha256", base["weights_sha256"]
        if base["quantizer"] is not None:
            told = ", ".join(f"{name} {value}" for name, value in base["quantizer"].items())
            yield "quantizer", told
    if found.layers:
        ranks = sorted({one["rank"] for one in found.layers.values()})
        size = f"{len(found.layers)} layers, {found.parameters:,} parameters"
        yield "adapter", f"{found.variant or 'variant unknown'}, rank {_listed(ranks)}, {size}"
    state = found.checkpoint
    if state is not None:
        optimizer = f"{state['optimizer_tensors']} tensors, {_mib(state['optimizer_bytes'])}"
        yield "state", f"step {state['step']}, {_mib(state['bytes'])}"
        yield "optimizer", optimizer if state["optimizer_tensors"] else "no state"
        yield "resumable", f"{'yes' if state['resumable'] else 'no'}: {state['why']}"
    if found.certificate is not None:
        yield "certificate", f"{found.certificate['evidence']}: {found.certificate['verdict']}"
        for one in found.certificate["comparisons"].values():
            figures = (
                f"mean KL {one['mean_kl']:.2g}, max KL {one['max_kl']:.2g}, same top-1 "
                f"{one['top1_agreement']:.2%}, NLL {one['nll_difference']:+.2g}"
            )
            yield "", f"{one['what']}: {figures}"
        for name, error in found.certificate["worst"].items():
            largest = f"largest relative error {error['relative']:.2g}, {name}"
            yield "", f"{found.certificate['tensors']} tensors, {largest}"
    for name, reason in found.unknown.items():
        yield "unknown", f"{name}: {reason}"


def _places(layers: dict[str, LayerRecord]) -> Table:
    table = _table()
    table.add_column("layer", no_wrap=True)
    table.add_column("base key", overflow="fold")
    for name in ("out x in", "rank", "scale"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in layers.items():
        size = f"{one['shape'][0]}x{one['shape'][1]}"
        key = Text(one["base_key"] or "-")
        table.add_row(Text(name), key, size, str(one["rank"]), _figure(one["scale"]))
    return table


def _sizes(layers: dict[str, LayerRecord]) -> Table:
    """Show how much each layer changes; the column of rows' lengths is DoRA's."""
    table = _table()
    figures = dict(_FIGURES)
    if all(one["magnitude_change"] is None for one in layers.values()):
        del figures["magnitude_change"]
    table.add_column("layer", no_wrap=True)
    for heading in figures.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for layer, one in layers.items():
        values = dict(one)
        table.add_row(Text(layer), *(_figure(values[name]) for name in figures))
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False)


def _lineage(line: Sequence[Ancestor]) -> Table:
    table = Table(box=None, show_header=False)
    for style in ("dim", "", "dim"):
        table.add_column(style=style, overflow="fold")
    for number, one in enumerate(line):
        hashes = ", ".join(f"{name} {text[:_SHORT]}" for name, text in one["hashes"].items())
        arrow = "→ " if number else ""
        note = "; ".join(part for part in (hashes, one["missing"]) if part)
        table.add_row(f"{arrow}{one['role']}", Text(one["name"]), Text(note))
    return table


def _checks(checks: Sequence[Check]) -> RenderableType:
    if not checks:
        return Text()
    table = _table()
    for name in ("", "what", "recorded", "found"):
        table.add_column(name, overflow="fold")
    records = {check["of"] for check in checks}
    for check in sorted(checks, key=lambda one: one["outcome"] != Outcome.DIFFERS):
        mark, style = _MARKS[Outcome(check["outcome"])]
        step = "" if check["step"] is None else f"step {check['step']}: "
        step += f"{check['of']}: " if check["of"] and len(records) > 1 else ""
        is_equal = check["outcome"] == Outcome.EQUAL
        found = check["note"] if check["outcome"] == Outcome.NOT_HERE else str(check["found"])
        table.add_row(
            Text(mark, style=style),
            Text(f"{step}{check['name']}"),
            Text(
                _short(
                    check["recorded"], whole=check["outcome"] != Outcome.NOT_HERE and not is_equal
                )
            ),
            Text("same" if is_equal else found or ""),
        )
    return table


def _short(value: object, *, whole: bool) -> str:
    text = "null" if value is None else str(value)
    return text if whole or len(text) <= 2 * _SHORT else f"{text[:_SHORT]}…"


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


_COLUMNS = ("mean KL", "max KL", "same top-1", "NLL", "worst layer")
_WORST = 5  # tensors shown


def parity_table(certificate: Certificate) -> Table:
    """Show all comparisons side by side, with the deciding one marked."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", show_edge=False, pad_edge=False)
    table.title = f"Parity: {verdict(certificate)}"
    table.add_column(f"against {certificate.reference}", overflow="fold")
    columns = _COLUMNS if certificate.comparisons else ("max error", "share")
    for name in columns:
        table.add_column(name, justify="right")
    for name, one in certificate.comparisons.items():
        mark = " ←" if name == certificate.judged else ""
        table.add_row(Text(f"{one['what']}{mark}"), *_figures(one))
    worst = sorted(certificate.tensors.items(), key=lambda item: -item[1]["relative"])
    for name, error in worst[: 1 if certificate.comparisons else _WORST]:
        apart = f"{error['relative']:.2g} of ΔW"
        cells = [apart] if certificate.comparisons else [f"{error['max_abs']:.2g}", apart]
        table.add_row(Text(f"worst of {len(worst)} tensors: {name}"), *cells)
    for name, reason in certificate.unknown.items():
        table.add_row(Text(f"{name}: not compared, {reason}", style="dim"), *[""] * len(columns))
    return table


def verdict(certificate: Certificate) -> str:
    """State in one line whether the output matches the trained model."""
    if certificate.passed:
        return "within the budget"
    over = "; ".join(certificate.exceeded()[:_WORST])
    return f"over the budget ({over}){', and accepted' if certificate.accepted else ''}"


def card_section(certificate: Certificate) -> str:
    """Return the certificate as a section of a model card, Markdown."""
    lines = ["## Parity with the trained model", "", f"Verdict: {verdict(certificate)}.", ""]
    if certificate.comparisons:
        assert certificate.probe is not None, "graphs are compared on a text"
        lines.append(
            f"Compared on {certificate.probe['tokens']} tokens ({certificate.probe['source']}) "
            f"with {certificate.reference}; KL and NLL in nats."
        )
        lines += [
            "",
            f"| graph | {' | '.join(_COLUMNS)} |",
            f"|---|{'---:|' * len(_COLUMNS)}",
        ]
        lines += [
            f"| {one['what']} | {' | '.join(_figures(one))} |"
            for one in certificate.comparisons.values()
        ]
    if certificate.tensors:
        worst = max(one["relative"] for one in certificate.tensors.values())
        many = len(certificate.tensors)
        lines += ["", f"{many} tensors against W + ΔW in f64: at most {worst:.2g} of ΔW apart."]
    return "\n".join([*lines, "", "parity.json beside this card has every figure and hash.", ""])


def _figures(one: Comparison) -> tuple[str, ...]:
    worst = one["worst_layer"]
    return (
        f"{one['mean_kl']:.2g}",
        f"{one['max_kl']:.2g}",
        f"{one['top1_agreement']:.2%}",
        f"{one['nll_difference']:+.2g}",
        f"{worst['layer']} {worst['relative_error']:.2g}",
    )


_COLORS = {"passed": "green", "failed": "bold red", "unknown": "yellow"}


def decision_view(policy: str, made: DecisionEntry) -> RenderableType:
    """Show the answer, and the rules that led to it."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", show_edge=False, pad_edge=False)
    table.title = f"{policy}: {made['decision']}"
    for head in ("rule", "evidence", "KPI", "observed", "threshold", "outcome", "note"):
        table.add_column(head, overflow="fold")
    for rule in made["rules"]:
        where = "" if rule["evidence"] is None else PurePath(rule["evidence"]).parent.name
        cells = (rule["rule"], where, rule["kpi"] or "", _text(rule["observed"]))
        outcome = Text(str(rule["outcome"]), style=_COLORS[str(rule["outcome"])])
        shown = (wording.visible(cell) for cell in (*cells, _text(rule["threshold"])))
        table.add_row(*shown, outcome, wording.visible(rule["note"]))
    said = made["recommendation"]
    lines = [] if said is None else [Text(f"Recommended: {said}")]
    lines += [Text(wording.visible(text), style="yellow") for text in made.get("unverifiable", [])]
    return Group(table, *lines, Text())


def _text(value: float | str | None) -> str:
    if value is None:
        return "unknown"
    return value if isinstance(value, str) else f"{value:.4g}"


def space_table(record: SweepRecord) -> RenderableType:
    """Show the space of a search, and its sampling."""
    search = _search_of(record)
    table = Table(box=box.SIMPLE_HEAD, title="Search", title_justify="left", show_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("drawn from", overflow="fold")
    for one in search["space"]:
        table.add_row(Text(wording.visible(one["key"])), Text(drawn_from(one)))
    many = min(record.n_jobs, search["n_trials"])
    at_a_time = f"{search['n_trials']} trials, {many} at a time: {settings(search)}"
    notes = [Text(f"note: {wording.visible(note)}", style="yellow") for note in record.notes]
    return Group(table, Text(at_a_time), *notes)


def best_table(record: SweepRecord) -> RenderableType:
    """Show the best (non-dominated) trials, and the number of trials by outcome."""
    search = _search_of(record)
    table = Table(box=box.SIMPLE_HEAD, title="Best", title_justify="left", show_edge=False)
    table.add_column("trial", justify="right")
    table.add_column("drawn", overflow="fold")
    for name in search["objectives"]:
        table.add_column(name, justify="right")
    for number in search["best"]:
        row = search["trials"][number]
        values = [wording.as_text(value, name) for name, value in _named(search, row["values"])]
        drawn = " ".join(row["params"].values())
        table.add_row(str(number), Text(wording.visible(drawn)), *values)
    return Group(table, Text(counted(search)))


def drawn_from(dimension: Dimension) -> str:
    """Write what a key's values are drawn from."""
    if dimension["values"]:
        return wording.visible(", ".join(dimension["values"]))
    ends = f"{dimension['low']:g} to {dimension['high']:g}"
    if dimension["step"] not in {None, 1.0}:
        ends += f" in steps of {dimension['step']:g}"
    kind = ", whole numbers" if dimension["kind"] == "int" else ""
    return ends + kind + (", even in the logarithm" if dimension["log"] else "")


def settings(search: SearchRecord) -> str:
    """Write how a search draws, and what it is after."""
    goals = [
        f"{direction} {name}"
        for name, direction in zip(search["objectives"], search["directions"], strict=True)
    ]
    pruner = "" if search["pruner"] == "none" else f", pruner {search['pruner']}"
    return f"{', '.join(goals)}; sampler {search['sampler']}, seed {search['seed']}{pruner}"


def counted(search: SearchRecord) -> str:
    """Count the trials by how they ended; repeats of an earlier one are counted as well."""
    states = [row["state"] for row in search["trials"]]
    told = [f"{states.count(one)} {one.value}" for one in TrialState if states.count(one)]
    repeats = sum(row["job"] not in {None, row["number"]} for row in search["trials"])
    again = f"; {repeats} came to the same run as an earlier one" if repeats else ""
    return f"{len(states)} of {search['n_trials']} trials: {', '.join(told) or 'none'}{again}"


def _named(search: SearchRecord, values: list[float] | None) -> list[tuple[str, float]]:
    return list(zip(search["objectives"], values or [], strict=False))


def _search_of(record: SweepRecord) -> SearchRecord:
    assert record.search is not None, "a sweep that searches"
    return record.search


def search_page(record: SweepRecord) -> str:
    """Render a search; the same record gives the same text."""
    from mens_exp.report.study_plots import search_drawings

    assert record.search is not None, "a sweep that searches"
    search = record.search
    return rendered(
        "search.html.j2",
        record=record,
        search=search,
        counted=counted(search),
        settings=settings(search),
        best=[_cells(search, search["trials"][number]) for number in search["best"]],
        trials=[_trial(record, row) for row in search["trials"]],
        space=[(one["key"], drawn_from(one)) for one in search["space"]],
        plots=[(plot, Markup(plot.svg)) for plot in search_drawings(search)],  # noqa: S704 - drawn here
    )


def _cells(search: SearchRecord, row: Trial) -> list[str]:
    """Return a trial's number, draws and values."""
    names, values = search["objectives"], row["values"]
    if values is None:
        shown = ["–"] * len(names)
    else:
        pairs = zip(names, values, strict=True)
        shown = [wording.as_text(value, name) for name, value in pairs]
    return [str(row["number"]), wording.visible(" ".join(row["params"].values())), *shown]


def _trial(record: SweepRecord, row: Trial) -> dict[str, object]:
    """Return a line of the table of trials, with the way to its run's report."""
    assert record.search is not None, "a sweep that searches"
    job = next((job for job in record.jobs if job["number"] == row["job"]), None)
    why = row["reason"] or ""
    if row["job"] not in {None, row["number"]}:
        why = f"the same run as trial {row['job']}. {why}".strip()
    return {
        "cells": _cells(record.search, row),
        "state": str(row["state"]),
        "why": wording.visible(why),
        "report": None if job is None else f"{job['directory']}/report.html",
    }
