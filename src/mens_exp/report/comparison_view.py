"""A comparison as tables for the terminal, as Markdown, and as one self-contained HTML page.

All functions are pure functions of the record; the page has no scripts and no external resources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mens_exp.artifacts.comparison import Verdict
from mens_exp.report import wording
from mens_exp.report.rendering import rendered
from mens_exp.report.study_plots import comparison_drawings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mens_exp.artifacts.comparison import Comparison, ContrastRecord, KpiRecord

Grid = tuple[list[str], list[list[str]]]
"""The head and the rows of a table, as text."""

_COLORS = {Verdict.BETTER: "green", Verdict.WORSE: "red"}
_BUDGET = ("tokens", "train_s", "tokens_per_s", "peak_bytes", "trainable_parameters")
_UNKNOWN = "unknown"
_TWO = 2
_WIDE = ("× seed noise", "paired ÷ unpaired", "look")  # columns of the verdicts


def headline(record: Comparison) -> str:
    """Summarise each arm's result on the primary KPI in one sentence."""
    said = []
    for one in record.contrasts:
        kpi = one["kpis"][record.primary]
        confounded = " (confounded)" if one["confounded_by"] else ""
        said.append(f"{one['arm']}: {kpi['verdict']}{confounded}, {_interval(kpi)}.")
    start = f"{record.primary} on {about(record)}, against {record.reference}"
    return wording.visible(f"{start}. {' '.join(said)}")


def hypothesis_lines(record: Comparison, study: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a comparison says about the hypothesis of its study, one line an arm.

    Args:
        record: the comparison.
        study: the settings of the study, as its sweep records them.
    """
    for one in record.contrasts:
        kpi = one["kpis"][record.primary]
        sign = 1 if study["direction"] == "higher" else -1
        bounds = [sign * bound for bound in (kpi["low"], kpi["high"]) if bound is not None]
        answer = "stays open"
        if len(bounds) == _TWO and not one["confounded_by"]:
            if min(bounds) > study["margin"]:
                answer = "holds"
            elif max(bounds) < study["margin"]:
                answer = "is refuted"
        claim = f"{record.primary} is {study['direction']} by more than {study['margin']:g}"
        more = " (confounded)" if one["confounded_by"] else ""
        text = f"The hypothesis {answer} for {one['arm']}{more}: {claim}? {_interval(kpi)}."
        yield wording.visible(text)


def about(record: Comparison) -> str:
    """Say which items the verdicts are about."""
    return record.target.replace("_", " ")


def verdict_table(record: Comparison) -> RenderableType:
    """Show the verdicts on the primary KPI, and objections to their use as evidence."""
    heads, rows = _narrower(verdicts_grid(record))
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", show_edge=False, pad_edge=False)
    table.title = f"{record.primary} on {about(record)}: each arm minus {record.reference}"
    for number, head in enumerate(heads):
        justify: Literal["left", "right"] = "right" if 0 < number < len(heads) - 1 else "left"
        table.add_column(head, justify=justify, overflow="fold")
    for row, contrast in zip(rows, record.contrasts, strict=True):
        color = _COLORS.get(Verdict(contrast["kpis"][record.primary]["verdict"]), "")
        *plain, last = row
        table.add_row(*plain, Text(last, style=color))
    return Group(table, Text(), *(Text(line, style=style) for line, style in findings(record)))


def verdicts_grid(record: Comparison) -> Grid:
    """Return the verdicts: one row an arm."""
    percent = wording.level(1 - record.alpha)
    heads = ["arm", "difference", f"{percent} interval", "p (Holm)", "seeds"]
    heads += [f"found at {wording.level(record.power)}"]
    heads += ["× seed noise", "paired ÷ unpaired", *(["look"] if record.looks else []), "verdict"]
    rows = []
    for one in record.contrasts:
        kpi = one["kpis"][record.primary]
        mark = " · confounded" if one["confounded_by"] else ""
        rows.append(
            [
                wording.visible(one["arm"]),
                _signed(kpi["estimate"]),
                _bounds(kpi["low"], kpi["high"]),
                _figure(kpi["p_holm"]),
                str(len(kpi["seeds"])),
                _found(kpi),
                _figure(kpi["in_seed_noise"]),
                _figure(kpi["width_ratio"]),
                *([_look(record, one["arm"])] if record.looks else []),
                f"{kpi['verdict']}{mark}",
            ]
        )
    return heads, rows


def _narrower(grid: Grid) -> Grid:
    """Leave out what is for the page alone: a terminal of 80 columns has room for seven."""
    heads, rows = grid
    kept = [place for place, head in enumerate(heads) if head not in _WIDE]
    return [heads[place] for place in kept], [[row[place] for place in kept] for row in rows]


def kpis_grid(contrast: ContrastRecord) -> Grid:
    """Return every KPI of one contrast; an interval that holds for all arms says so."""
    alone = min((k["level"] for k in contrast["kpis"].values() if k["level"]), default=1)
    heads = ["KPI", "group", "unit", "arm", "reference", "difference"]
    heads += ["interval (each alone)", "× seed noise"]
    rows = [
        [
            wording.visible(name),
            kpi["group"],
            "share" if kpi["unit"] == "1" else kpi["unit"],
            _figure(kpi["arm_mean"]),
            _figure(kpi["reference_mean"]),
            _signed(kpi["estimate"]),
            f"{_bounds(kpi['low'], kpi['high'])}{_at_level(kpi, alone)}",
            _figure(kpi["in_seed_noise"]),
        ]
        for name, kpi in contrast["kpis"].items()
    ]
    return heads, rows


def arms_grid(record: Comparison) -> Grid:
    """Return the arms side by side: seeds, the primary KPI, and their budgets."""
    columns = [record.primary, *(name for name in _BUDGET if name != record.primary)]
    heads = ["arm", "seeds", "runs", *(name.replace("_", " ") for name in columns)]
    rows = [
        [
            wording.visible(arm["name"]),
            ", ".join(map(str, arm["seeds"])),
            str(arm["runs"]),
            *(_figure(arm["kpis"].get(name)) for name in columns),
        ]
        for arm in record.arms
    ]
    return heads, rows


def noise_grid(record: Comparison) -> Grid:
    """Return the spread of each KPI between seeds, and between runs of one seed."""
    rows = [
        [wording.visible(name), _figure(noise["seed"]), _figure(noise["rerun"])]
        for name, noise in record.noise.items()
    ]
    return ["KPI", "sd between seeds", "sd between reruns"], rows


def findings(record: Comparison) -> Iterator[tuple[str, str]]:
    """Yield remarks that a reader needs to interpret the verdicts, each with a colour."""
    for one in record.contrasts:
        kpi = one["kpis"][record.primary]
        yield wording.visible(f"{one['arm']}: {kpi['verdict']}, {kpi['why']}{_more(kpi)}"), ""
        if one["confounded_by"]:
            causes = "; ".join(one["confounded_by"])
            text = f"{one['arm']}: confounded by {causes}. This is no evidence for a promotion."
            yield wording.visible(text), "bold yellow"
        if one["moved_inputs"]:
            text = f"{one['arm']}: the factor itself moves {', '.join(one['moved_inputs'])}."
            yield wording.visible(text), ""
        if one["environment"]:
            text = f"{one['arm']}: other conditions: {'; '.join(one['environment'])}."
            yield wording.visible(text), "yellow"
        if one["arm"] in record.looks:
            yield wording.visible(_looked(record, one["arm"])), "yellow"
    if len(record.contrasts) > 1:
        yield wording.visible(_simultaneous(record)), ""
    if record.exploratory is not None:
        yield wording.visible(f"Exploratory: {record.exploratory}."), "yellow"
    for path, why in record.left_out.items():
        yield wording.visible(f"Left out: {path}: {why}."), "yellow"
    for note in record.notes:
        yield wording.visible(note), ""


def markdown(record: Comparison) -> str:
    """Return the study as Markdown: verdicts, arms, every KPI."""
    parts = [f"# {wording.visible(record.primary)}, against {wording.visible(record.reference)}"]
    parts += ["", headline(record), "", *_table(verdicts_grid(record)), ""]
    parts += [f"- {text}" for text, _ in findings(record)]
    parts += ["", "## Arms", "", *_table(arms_grid(record))]
    for contrast in record.contrasts:
        parts += ["", f"## {wording.visible(contrast['arm'])}", "", *_table(kpis_grid(contrast))]
    parts += ["", "## Noise", "", *_table(noise_grid(record)), ""]
    return "\n".join(parts)


def _table(grid: Grid) -> Iterator[str]:
    heads, rows = grid
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join('---' if i == 0 else '---:' for i in range(len(heads)))}|"
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| {' | '.join(cells)} |"


def _interval(kpi: KpiRecord) -> str:
    if kpi["estimate"] is None:
        return kpi["why"]
    count, said = len(kpi["seeds"]), _signed(kpi["estimate"])
    if count == 1:
        return f"{said} in 1 seed, which tells no interval"
    if kpi["low"] is None:
        return f"{said} in {count} seeds, too few for an interval"
    if kpi["low"] == kpi["high"]:
        return f"{said if kpi['estimate'] else 'the same'} in all {count} seeds"
    return f"{said} {_bounds(kpi['low'], kpi['high'])} over {count} seeds"


def _more(kpi: KpiRecord) -> str:
    needed = kpi["seeds_needed"]
    if needed is None or needed <= len(kpi["seeds"]):
        return ""
    if kpi["verdict"] == Verdict.NOT_REACHABLE:
        return ""
    low, high = kpi["seeds_needed_low"], kpi["seeds_needed_high"]
    if low is None:  # equal differences, or a record of an older version
        return f"; an effect of the observed size would take {needed} seeds"
    count = f"{low} seeds or more" if high is None else f"{low} to {high} seeds"
    return f"; an effect of the observed size would take {count}"


def _looked(record: Comparison, arm: str) -> str:
    """Say how many looks at an arm there are records of, and what follows for the verdict."""
    looks = record.looks[arm]
    counts = ", ".join(str(len(one["seeds"])) for one in looks["others"])
    number = len(looks["others"]) + 1
    seen = f"{arm}: look {number} at these runs, as far as there are records here"
    seen = f"{seen} (the others had {counts} seeds)"
    if record.sequential != "none":
        return f"{seen}; the always-valid p-value allows for any number of looks."
    if record.cycle is not None:
        return f"{seen}; cycle {record.cycle} registered these seeds before any run."
    said = f"{seen}; the p-value is that of a single look"
    if looks["false"] is not None:
        own = record.contrast(arm)
        assert own is not None, "looks are of a contrast"
        sizes = {len(one["seeds"]) for one in (own["kpis"][record.primary], *looks["others"])}
        bound = "up to " if len(record.contrasts) > 1 else ""
        said += (
            f", and whoever looks at {', '.join(map(str, sorted(sizes)))} seeds and stops at the "
            f"first verdict is wrong in {bound}{100 * looks['false']:.2g}% of studies without a "
            "difference"
        )
    remedy = "fix the seeds before the first look, or use compare.sequential=always_valid"
    return f"{said}; {remedy}."


def _simultaneous(record: Comparison) -> str:
    each = f"{100 * (1 - record.alpha / len(record.contrasts)):.4g}%"
    return (
        f"The intervals of {record.primary} hold for all arms at once, each at {each} "
        "(Bonferroni); those of other KPIs hold each alone."
    )


def _look(record: Comparison, arm: str) -> str:
    looks = record.looks.get(arm)
    return "1" if looks is None else str(len(looks["others"]) + 1)


def _at_level(kpi: KpiRecord, alone: float) -> str:
    return " (all arms)" if (kpi["level"] or 0) > alone else ""


def _bounds(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return _UNKNOWN
    return "no spread" if low == high else f"[{_signed(low)}, {_signed(high)}]"


def _found(kpi: KpiRecord) -> str:
    """Return the range of differences that are found; an older record has its middle alone."""
    low, high = kpi["mde_low"], kpi["mde_high"]
    if low is None or high is None:
        return _UNKNOWN if kpi["mde"] is None else f"about {_figure(kpi['mde'])}"
    return f"{low:.2g} to {high:.2g}"


def _signed(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:+.4g}".replace("-", wording.MINUS)


def _figure(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.4g}".replace("-", wording.MINUS)


def comparison_page(record: Comparison) -> str:
    """Render a comparison; the same record gives the same text."""
    return rendered(
        "comparison.html.j2",
        record=record,
        title=wording.visible(f"{record.primary} by {', '.join(record.factors) or 'arm'}"),
        headline=headline(record),
        verdicts=verdicts_grid(record),
        findings=[text for text, _ in findings(record)],
        arms=arms_grid(record),
        noise=noise_grid(record),
        kpis=[(wording.visible(one["arm"]), kpis_grid(one)) for one in record.contrasts],
        plots=[(plot, Markup(plot.svg)) for plot in comparison_drawings(record)],  # noqa: S704 - drawn here
    )
