"""A search as a document: its space, its best trials and its progress.

Plots show its progress, the importance of each setting, and the Pareto front.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, MaxNLocator

from mens_exp.artifacts.sweep import TrialState
from mens_exp.report import wording
from mens_exp.report.document import (
    Cell,
    Document,
    Facts,
    Note,
    Section,
    Step,
    Table,
    Tone,
    bullets,
    cells_of,
    next_steps,
)
from mens_exp.report.plots import ARMS, absent, drawn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from mens_exp.artifacts.sweep import Dimension, SearchRecord, SweepRecord, Trial
    from mens_exp.report.document import Part, Plot

_UNKNOWN = "–"


def space_parts(record: SweepRecord) -> list[Part]:
    """Return the space of a search, and how it is sampled."""
    search = _of(record)
    many = min(record.n_jobs, search["n_trials"])
    at_a_time = f"{search['n_trials']} trials, {many} at a time: {settings(search)}"
    rows = [(one["key"], drawn_from(one)) for one in search["space"]]
    space = Table(("key", "drawn from"), rows, title="Search")
    notes = bullets((f"note: {note}" for note in record.notes), Tone.WARN)
    return [space, Note(at_a_time), *notes]


def best_parts(record: SweepRecord) -> list[Part]:
    """Return the best (non-dominated) trials, and the number of trials by outcome."""
    search = _of(record)
    rows = [_values(search, search["trials"][number]) for number in search["best"]]
    return [
        Table(
            ("trial", "drawn", *search["objectives"]),
            rows,
            title="Best",
            absent="No trial is complete.",
        ),
        Note(counted(search)),
    ]


def document(record: SweepRecord) -> Document:
    """Return the document of a search: its space, plots and trials."""
    search = _of(record)
    space = Facts(cells_of((one["key"], drawn_from(one)) for one in search["space"]))
    best, _ = best_parts(record)
    trials = Table(
        ("trial", "drawn", *search["objectives"], "state", "why"),
        [_trial(record, row) for row in search["trials"]],
        absent="No trial was drawn.",
    )
    folds = [Section("Space", [space], count=len(space.cells), folded=True)]
    if record.notes:
        notes = bullets(record.notes)
        folds.append(Section("Notes", notes, count=len(notes), folded=True))
    steps = _best_steps(record)
    return Document(
        title=record.sweep_id,
        kind="search",
        headline=counted(search),
        command=wording.command(*record.command),
        meta=cells_of(
            [("Search", settings(search)), ("Started", wording.moment(record.created_utc))]
        ),
        parts=[
            Section("Best", [best]),
            next_steps(steps),
            Section("Drawn", search_drawings(search)),
            Section("Trials", [trials]),
            Section("Record", folds, name="folds"),
        ],
        source="sweep.json",
        steps=steps,
    )


def _best_steps(record: SweepRecord) -> list[Step]:
    """Return the command that repeats the best trial with other seeds.

    There is none if an experiment's YAML selects the sweeper, because it would search again.
    """
    search = _of(record)
    if not any(text.startswith("hydra/sweeper=") for text in record.command):
        return []
    left_out = ("hydra/sweeper", "hydra.sweeper.", "hydra.sweep.", "seed=")
    fixed = [text for text in search["fixed"] if not text.lstrip("+").startswith(left_out)]
    for number in search["best"][:1]:
        params = search["trials"][number]["params"]
        drawn = [text for key, text in params.items() if key != "seed"]
        command = wording.command("-m", *fixed, "seed=1,2,3", *drawn)
        return [Step(command, "see whether the best trial's figures hold for other seeds")]
    return []


def drawn_from(dimension: Dimension) -> str:
    """Format the distribution of a key's values."""
    if dimension["values"]:
        return ", ".join(dimension["values"])
    ends = f"{dimension['low']:g} to {dimension['high']:g}"
    if dimension["step"] not in {None, 1.0}:
        ends += f" in steps of {dimension['step']:g}"
    kind = ", whole numbers" if dimension["kind"] == "int" else ""
    return ends + kind + (", even in the logarithm" if dimension["log"] else "")


def settings(search: SearchRecord) -> str:
    """Describe the sampler of a search, and its objectives."""
    goals = [
        f"{direction} {name}"
        for name, direction in zip(search["objectives"], search["directions"], strict=True)
    ]
    pruner = "" if search["pruner"] == "none" else f", pruner {search['pruner']}"
    return f"{', '.join(goals)}; sampler {search['sampler']}, seed {search['seed']}{pruner}"


def counted(search: SearchRecord) -> str:
    """Count trials by outcome, including repeats of earlier ones."""
    states = [row["state"] for row in search["trials"]]
    told = [f"{states.count(one)} {one.value}" for one in TrialState if states.count(one)]
    repeats = sum(row["job"] not in {None, row["number"]} for row in search["trials"])
    again = f"; {repeats} came to the same run as an earlier one" if repeats else ""
    return f"{len(states)} of {search['n_trials']} trials: {', '.join(told) or 'none'}{again}"


def _values(search: SearchRecord, row: Trial) -> list[str]:
    """Return a trial's number, sampled settings and objective values."""
    names, values = search["objectives"], row["values"]
    shown = [_UNKNOWN] * len(names)
    if values is not None:
        shown = [wording.as_text(one, name) for name, one in zip(names, values, strict=True)]
    return [str(row["number"]), " ".join(row["params"].values()), *shown]


def _trial(record: SweepRecord, row: Trial) -> list[Cell | str]:
    """Return a row of the trial table, with a link to its run's report."""
    job = next((job for job in record.jobs if job["number"] == row["job"]), None)
    why = row["reason"] or ""
    if row["job"] not in {None, row["number"]}:
        why = f"the same run as trial {row['job']}. {why}".strip()
    number, *values = _values(_of(record), row)
    link = "" if job is None else f"{job['directory']}/report.html"
    return [Cell(number, link=link), *values, str(row["state"]), why]


def _of(record: SweepRecord) -> SearchRecord:
    assert record.search is not None, "a sweep that searches"
    return record.search


_WIDE = 10.4  # inches
_LINE, _EDGE = 0.34, 1.1  # inches per bar, and around the bars
_MOST_CURVES = 60
_ALL, _BEST, _CUT = ARMS[0], ARMS[1], ARMS[3]
_MUTED, _RULE = "#020202", "#030303"


def search_drawings(search: SearchRecord) -> list[Plot]:
    """Draw progress, importance and Pareto front; a plot without values states the reason."""
    objectives = list(enumerate(search["objectives"]))
    pairs = [(a, b) for a, _ in objectives for b, _ in objectives if a < b]
    drawn = [_progress(search, place) for place, _ in objectives]
    drawn += [_importance(search, name) for _, name in objectives]
    drawn += [_front(search, *pair) for pair in pairs]
    return drawn + ([] if search["pruner"] == "none" else [_trial_curves(search)])


def _complete(search: SearchRecord) -> list[tuple[Trial, list[float]]]:
    return [(row, row["values"]) for row in search["trials"] if row["values"] is not None]


def _progress(search: SearchRecord, place: int) -> Plot:
    objective = search["objectives"][place]
    name, title = f"progress_{place}", f"{objective} by trial"
    found = [(row["number"], values[place]) for row, values in _complete(search)]
    if not found:
        return absent(name, title, "no trial is complete")
    better = max if search["directions"][place] == "maximize" else min
    numbers, values = [one for one, _ in found], [value for _, value in found]

    def paint(axes: Axes) -> None:
        axes.scatter(numbers, values, color=_ALL, s=22, alpha=0.8, label="trial")
        best = list(accumulate(values, better))
        axes.step(numbers, best, where="post", color=_BEST, linewidth=1.7, label="best so far")
        axes.set_xlabel("trial")
        axes.set_ylabel(objective)
        _spell_sizes(axes.yaxis, objective)
        axes.legend(frameon=False, labelcolor=_MUTED)

    return drawn(name, title, "Complete trials, in the order of draws.", (_WIDE, 3.4), paint)


def _importance(search: SearchRecord, objective: str) -> Plot:
    name, title = f"importance_{objective}", f"What decides {objective}"
    shares = search["importance"].get(objective)
    if not shares:
        return absent(name, title, search["importance_unknown"] or "no key was drawn")
    rows = sorted(shares.items(), key=lambda one: (-one[1], one[0]))

    def paint(axes: Axes) -> None:
        axes.barh(range(len(rows)), [share for _, share in rows], color=_ALL, height=0.62)
        axes.set_yticks(range(len(rows)), [wording.visible(key) for key, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color=_RULE, linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.set_xlabel("share")

    caption = (
        f"PED-ANOVA over {len(_complete(search))} complete trials: how much a key's values in the "
        "best tenth differ from those of all; shares of their sum. Little is known from few trials."
    )
    return drawn(name, title, caption, (_WIDE, _EDGE + _LINE * len(rows)), paint)


def _front(search: SearchRecord, x: int, y: int) -> Plot:
    names = search["objectives"]
    name, title = f"front_{x}_{y}", f"{names[y]} against {names[x]}"
    found = _complete(search)
    if not found:
        return absent(name, title, "no trial is complete")
    best = sorted((v[x], v[y]) for row, v in found if row["number"] in search["best"])

    def paint(axes: Axes) -> None:
        others = [(v[x], v[y]) for row, v in found if row["number"] not in search["best"]]
        _trial_points(axes, others, _ALL, "trial")
        _trial_points(axes, best, _BEST, "on the front")
        if len(names) == 2:  # noqa: PLR2004  # otherwise not a line
            axes.step(
                [one for one, _ in best],
                [one for _, one in best],
                # Between two trials, the front is a step: the best value reachable at x.
                where="post" if search["directions"][x] == "minimize" else "pre",
                color=_BEST,
                linewidth=1,
            )
        axes.set_xlabel(names[x])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.set_ylabel(names[y])
        _spell_sizes(axes.xaxis, names[x])
        _spell_sizes(axes.yaxis, names[y])
        axes.margins(x=0.08, y=0.1)
        axes.legend(frameon=False, labelcolor=_MUTED)

    caption = "The front: trials that no other is at least as good as in all objectives."
    return drawn(name, title, caption, (_WIDE, 3.8), paint)


def _spell_sizes(axis: Axis, objective: str) -> None:
    """Label an axis of bytes in binary units."""
    if objective.endswith("_bytes"):
        axis.set_major_formatter(FuncFormatter(lambda value, _: wording.size(value)))


def _trial_points(
    axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str
) -> None:
    if points:
        xs, ys = zip(*points, strict=True)
        axes.scatter(xs, ys, color=color, s=26, alpha=0.85, label=label)


def _trial_curves(search: SearchRecord) -> Plot:
    name, title = "curves", "Validation loss while trials ran"
    rows = [row for row in search["trials"] if row["intermediate"]][-_MOST_CURVES:]
    if not rows:
        return absent(name, title, "no trial validated in training")

    def paint(axes: Axes) -> None:
        labels = {TrialState.PRUNED.value: "pruned"}
        for row in rows:
            is_cut = row["state"] == TrialState.PRUNED
            steps, losses = zip(*row["intermediate"], strict=True)
            label = labels.pop(str(row["state"]), None)
            color = _CUT if is_cut else _ALL
            axes.plot(steps, losses, color=color, marker="o", markersize=3, alpha=0.7, label=label)
        axes.set_ylabel("loss")
        if TrialState.PRUNED in {row["state"] for row in rows}:
            axes.legend(frameon=False, labelcolor=_MUTED)

    return drawn(name, title, f"The last {len(rows)} trials.", (_WIDE, 3.4), paint)
