"""A study as tables: for the terminal, for the page, and in Markdown; pure functions of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mens_exp.artifacts.comparison import Verdict
from mens_exp.report import wording

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.artifacts.comparison import Comparison, ContrastRecord, KpiRecord

__all__ = [
    "Grid",
    "about",
    "arms_grid",
    "findings",
    "headline",
    "kpis_grid",
    "markdown",
    "noise_grid",
    "verdict_table",
    "verdicts_grid",
]

Grid = tuple[list[str], list[list[str]]]
"""The head and the rows of a table, as text."""

_COLORS = {Verdict.BETTER: "green", Verdict.WORSE: "red"}
_BUDGET = ("tokens", "train_s", "tokens_per_s", "peak_bytes", "trainable_parameters")
_UNKNOWN = "unknown"
_WIDE = (6, 7)  # columns of the verdicts: in seed noise, and paired beside unpaired


def headline(record: Comparison) -> str:
    """Say in one sentence per arm what came of it on the primary KPI."""
    said = []
    for one in record.contrasts:
        kpi = one["kpis"][record.primary]
        confounded = " (confounded)" if one["confounded_by"] else ""
        said.append(f"{one['arm']}: {kpi['verdict']}{confounded}, {_interval(kpi)}.")
    start = f"{record.primary} on {about(record)}, against {record.reference}"
    return wording.visible(f"{start}. {' '.join(said)}")


def about(record: Comparison) -> str:
    """Say which items the verdicts are about."""
    return record.target.replace("_", " ")


def verdict_table(record: Comparison) -> RenderableType:
    """Show the verdicts on the primary KPI, and what stands against taking them as evidence."""
    heads, rows = (_narrower(part) for part in verdicts_grid(record))
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
    heads += ["× seed noise", "paired ÷ unpaired", "verdict"]
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
                _figure(kpi["mde"]),
                _figure(kpi["in_seed_noise"]),
                _figure(kpi["width_ratio"]),
                f"{kpi['verdict']}{mark}",
            ]
        )
    return heads, rows


def _narrower(part: list[Any]) -> list[Any]:
    """Leave out what is for the page alone: a terminal of 80 columns has room for seven."""
    if part and isinstance(part[0], list):
        return [_narrower(row) for row in part]
    return [cell for place, cell in enumerate(part) if place not in _WIDE]


def kpis_grid(contrast: ContrastRecord) -> Grid:
    """Return every KPI of one contrast."""
    heads = ["KPI", "group", "unit", "arm", "reference", "difference", "interval", "× seed noise"]
    rows = [
        [
            wording.visible(name),
            kpi["group"],
            "share" if kpi["unit"] == "1" else kpi["unit"],
            _figure(kpi["arm_mean"]),
            _figure(kpi["reference_mean"]),
            _signed(kpi["estimate"]),
            _bounds(kpi["low"], kpi["high"]),
            _figure(kpi["in_seed_noise"]),
        ]
        for name, kpi in contrast["kpis"].items()
    ]
    return heads, rows


def arms_grid(record: Comparison) -> Grid:
    """Return the arms side by side: seeds, the primary KPI, and what each was given to spend."""
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
    """Yield what a reader must know of the verdicts, each with a colour."""
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
    if kpi["low"] == kpi["high"]:
        return f"{said if kpi['estimate'] else 'the same'} in all {count} seeds"
    return f"{said} {_bounds(kpi['low'], kpi['high'])} over {count} seeds"


def _more(kpi: KpiRecord) -> str:
    needed = kpi["seeds_needed"]
    if needed is None or needed <= len(kpi["seeds"]):
        return ""
    if kpi["verdict"] == Verdict.NOT_REACHABLE:
        return ""
    return f"; an effect of the observed size would take {needed} seeds"


def _bounds(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return _UNKNOWN
    return "no spread" if low == high else f"[{_signed(low)}, {_signed(high)}]"


def _signed(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:+.4g}".replace("-", wording.MINUS)


def _figure(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.4g}".replace("-", wording.MINUS)
