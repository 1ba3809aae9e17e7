"""A comparison as a document, for the terminal, Markdown and a self-contained HTML page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.comparison import Verdict
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
    next_steps,
)
from mens_exp.report.sections import unknown_fold

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mens_exp.artifacts.comparison import Comparison, ContrastRecord, KpiRecord
    from mens_exp.config.promotion import StudyConfig
    from mens_exp.report.document import Part

_TONES = {Verdict.BETTER: Tone.GOOD, Verdict.WORSE: Tone.BAD}
_BUDGET = ("tokens", "train_s", "tokens_per_s", "peak_bytes", "trainable_parameters")
_UNKNOWN = "unknown"
_LEDGER = "decisions.jsonl"
_WALL_CLOCK = (
    "Times and rates are wall-clock figures. Other work slows a run down on a shared machine."
)
_FEW = (
    "this verdict rests on two seeds, but error rates were measured for three or more. Confirm it "
    "with more seeds."
)
_FEWEST = 3  # seeds for which error rates were measured (docs/method/statistics.md)
WIDE = ("× seed noise", "paired ÷ unpaired", "look")
"""Columns of the verdict table that are omitted on a terminal."""


def document(record: Comparison, place: str = "", ledger: str | None = None) -> Document:
    """Return the document of a comparison, without drawings.

    Args:
        record: the comparison.
        place: its directory, for suggested commands; empty if unknown.
        ledger: the ledger of decisions, if any.
    """
    steps = _steps(record, place, ledger or _LEDGER)
    test = record.test
    if record.sequential != "none":
        test += f", {record.sequential.replace('_', '-')}"
    factors = ", ".join(record.factors) or "none"
    parts: list[Part] = [
        verdicts(record),
        next_steps(steps),
        Section(f"Differences in {record.primary}, seed by seed", [seeds_table(record)]),
        Section("Arms, and what each spent", [arms_table(record), Note(_WALL_CLOCK, Tone.QUIET)]),
        *(Section(one["arm"], [kpis_table(one)]) for one in record.contrasts),
        Section("Noise", [noise_table(record)]),
        Section(
            "Record",
            [
                Section("Runs", [_runs(record)], count=len(record.runs), folded=True),
                *unknown_fold(record.unknown),
            ],
            name="folds",
        ),
    ]
    return Document(
        title=f"{record.primary} by {', '.join(record.factors) or 'arm'}",
        kind=f"comparison of {len(record.arms)} arms over {len(record.runs)} runs",
        headline=headline(record),
        meta=[
            Cell(record.primary, label="Primary KPI", code=True),
            Cell(record.reference, label="Reference"),
            Cell(factors, label="Factors", detail="" if record.declared else "found in the runs"),
            Cell(f"{test}, α {record.alpha}, Holm over {len(record.contrasts)}", label="Test"),
            Cell(record.condition, label="Condition"),
            *([Cell(record.cycle, label="Cycle")] if record.cycle else []),
        ],
        parts=parts,
        source="compare.json",
        steps=steps,
    )


def drawn(made: Document, record: Comparison) -> Document:
    """Add the drawings to the document of a comparison, for an HTML page."""
    from mens_exp.report.study_plots import comparison_drawings  # matplotlib takes a second

    first, *rest = made.parts
    plots = Section("Drawn", comparison_drawings(record))
    return replace(made, parts=[first, plots, *rest])


def brief(record: Comparison) -> list[Part]:
    """Return the summary for a terminal: the verdicts without some columns, and caveats."""
    found = verdicts(record)
    table, *remarks = found.parts
    assert isinstance(table, Table), "the verdicts come first"
    return [replace(found, parts=[table.without(*WIDE), *remarks])]


def _steps(record: Comparison, place: str, ledger: str) -> list[Step]:
    """Return the next commands; the gate is included only if burn was better than qlora."""
    if not place:
        return []
    backends = {arm["name"]: arm["backend"] for arm in record.arms}
    found = {
        one["kpis"][record.primary]["verdict"]
        for one in record.contrasts
        if not one["confounded_by"]
        and (backends[one["arm"]], backends[record.reference]) == ("burn", "qlora")
    }
    gate = Step(
        wording.command("task=promote", "policy=burn_rnd", ("path", place), ("ledger", ledger)),
        "let a policy decide on it, on the record",
    )
    verify = Step(
        wording.command("task=inspect", ("path", place), "inspect.verify=true"),
        "check it against the records of its runs",
    )
    return [gate, verify] if Verdict.BETTER in found else [verify]


def headline(record: Comparison) -> str:
    """Summarize each arm's result on the primary KPI in one sentence."""
    said = []
    for one in record.contrasts:
        kpi = one["kpis"][record.primary]
        marks = "".join(f" ({mark})" for mark in _marks(record, one))
        said.append(f"{one['arm']}: {kpi['verdict']}{marks}, {_interval(kpi)}.")
    start = f"{record.primary} {about(record)}, against {record.reference}"
    return f"{start}. {' '.join(said)}"


def hypothesis(record: Comparison, study: Mapping[str, Any]) -> Iterator[Note]:
    """Yield one note per arm on the hypothesis of the study.

    Args:
        record: the comparison.
        study: the settings of the study, from the record of its sweep.
    """
    for one in record.contrasts:
        kpi = one["kpis"][record.primary]
        sign = 1 if study["direction"] == "higher" else -1
        bounds = [sign * bound for bound in (kpi["low"], kpi["high"]) if bound is not None]
        answer = "stays open"
        is_known = None not in (kpi["low"], kpi["high"]) and not one["confounded_by"]
        if is_known and not _too_few_seeds(record, kpi):
            if min(bounds) > study["margin"]:
                answer = "holds"
            elif max(bounds) < study["margin"]:
                answer = "is refuted"
        more = " (confounded)" if one["confounded_by"] else ""
        claim = f"{record.primary} is {_claim(study['direction'], study['margin'])}"
        yield Note(
            f"The hypothesis {answer} for {one['arm']}{more}. Claimed: {claim}. Measured: "
            f"{_interval(kpi)}."
        )


def _too_few_seeds(record: Comparison, kpi: KpiRecord) -> bool:
    """Return whether the bounds rest on too few seeds for the stated confidence.

    Equal differences have no spread, so their interval is a point. Then as many seeds are needed
    as for a sign test.
    """
    if kpi["verdict"] == Verdict.NOT_REACHABLE:
        return True
    if kpi["low"] != kpi["high"] or kpi["level"] is None:
        return False
    from mens_exp.evals import sequential, statistics

    alpha = 1 - kpi["level"]
    is_sequential = record.sequential != "none"
    needed = sequential.seeds_of_equal_signs if is_sequential else statistics.seeds_for_sign_flip
    return len(kpi["seeds"]) < needed(alpha)


def registered(study: StudyConfig, first: str) -> list[Part]:
    """Return the settings fixed by the registration of a study.

    Args:
        study: its settings.
        first: the default reference arm.
    """
    claim = f"{study.primary} is {_claim(study.direction.value, study.margin)}"
    cells = [
        Cell(study.hypothesis, label="Hypothesis"),
        Cell(f"{claim}, against {study.reference or first}", label="Claim"),
        Cell(", ".join(map(str, study.seeds)), label="Seeds"),
        Cell(f"{study.test.value}, α {study.alpha:g}", label="Test"),
        Cell(study.stopping.value.replace("_", " "), label="Stopping rule"),
    ]
    return [Section("Registered before any run, and fixed from then on", [Facts(cells)])]


def _claim(direction: str, margin: float) -> str:
    """Return the claim about an arm; a negative margin claims non-inferiority."""
    if margin >= 0:
        return f"{direction} by more than {margin:g}"
    worse = {"lower": "higher", "higher": "lower"}[direction]
    return f"{worse} by less than {-margin:g}"


def about(record: Comparison) -> str:
    """State the items that the verdicts cover; KPIs of whole runs have none."""
    if all(one["kpis"][record.primary]["items"] is None for one in record.contrasts):
        return "of whole runs"
    return f"on {record.target.replace('_', ' ')}"


def verdicts(record: Comparison) -> Section:
    """Return the verdicts on the primary KPI, and objections to them as evidence."""
    title = f"{record.primary} {about(record)}: each arm minus {record.reference}"
    return Section(title, [verdict_table(record), *findings(record)], name="verdicts")


def verdict_table(record: Comparison) -> Table:
    """Return the verdicts, one row per arm."""
    percent = wording.level(1 - record.alpha)
    heads = ["arm", "difference", f"{percent} interval", "p (Holm)", "seeds"]
    heads += [f"found at {wording.level(record.power)}"]
    heads += ["× seed noise", "paired ÷ unpaired", *(["look"] if record.looks else []), "verdict"]
    rows: list[list[Cell | str]] = []
    for one in record.contrasts:
        kpi = one["kpis"][record.primary]
        marks = "".join(f" · {mark}" for mark in _marks(record, one))
        rows.append(
            [
                one["arm"],
                wording.figure(kpi["estimate"], signed=True),
                _bounds(kpi["low"], kpi["high"]),
                wording.figure(kpi["p_holm"]),
                str(len(kpi["seeds"])),
                _found(kpi),
                wording.figure(kpi["in_seed_noise"]),
                wording.figure(kpi["width_ratio"]),
                *([_look(record, one["arm"])] if record.looks else []),
                Cell(
                    f"{kpi['verdict']}{marks}", tone=_TONES.get(Verdict(kpi["verdict"]), Tone.PLAIN)
                ),
            ]
        )
    return Table(heads, rows)


def kpis_table(contrast: ContrastRecord) -> Table:
    """Return every KPI of one contrast; simultaneous intervals are marked."""
    alone = min((k["level"] for k in contrast["kpis"].values() if k["level"]), default=1)
    heads = ["KPI", "group", "unit", "arm", "reference", "difference"]
    heads += ["interval (each alone)", "× seed noise"]
    rows = [
        [
            name,
            kpi["group"],
            kpi["unit"] if kpi["unit"] != "1" else "" if kpi["group"] == "other" else "share",
            wording.figure(kpi["arm_mean"]),
            wording.figure(kpi["reference_mean"]),
            wording.figure(kpi["estimate"], signed=True),
            f"{_bounds(kpi['low'], kpi['high'])}{_at_level(kpi, alone)}",
            wording.figure(kpi["in_seed_noise"]),
        ]
        for name, kpi in contrast["kpis"].items()
    ]
    return Table(heads, rows)


def seeds_table(record: Comparison) -> Table:
    """Return the difference in the primary KPI for each seed, one column per arm."""
    kpis = {one["arm"]: one["kpis"][record.primary] for one in record.contrasts}
    found = {
        arm: dict(zip(kpi["seeds"], kpi["differences"], strict=True)) for arm, kpi in kpis.items()
    }
    seeds = sorted({seed for values in found.values() for seed in values})
    rows = [
        [str(seed), *(wording.figure(values.get(seed), signed=True) for values in found.values())]
        for seed in seeds
    ]
    return Table(["seed", *kpis], rows)


def arms_table(record: Comparison) -> Table:
    """Return the arms side by side: seeds, primary KPI and budget."""
    columns = [record.primary, *(name for name in _BUDGET if name != record.primary)]
    heads = ["arm", "seeds", "runs", *(name.replace("_", " ") for name in columns)]
    rows = [
        [
            arm["name"],
            ", ".join(map(str, arm["seeds"])),
            str(arm["runs"]),
            *(wording.figure(arm["kpis"].get(name)) for name in columns),
        ]
        for arm in record.arms
    ]
    return Table(heads, rows)


def noise_table(record: Comparison) -> Table:
    """Return the spread of each KPI between seeds, and between runs with the same seed."""
    rows = [
        [name, wording.figure(noise["seed"]), wording.figure(noise["rerun"])]
        for name, noise in record.noise.items()
    ]
    return Table(["KPI", "sd between seeds", "sd between reruns"], rows)


def _runs(record: Comparison) -> Table:
    rows: list[list[Cell | str]] = [
        [
            run["run_id"],
            run["arm"],
            str(run["seed"]),
            Cell(run["contract"][:12], code=True),
            Cell((run["scorecard_sha256"] or "none")[:12], code=True),
        ]
        for run in record.runs
    ]
    heads = ["run", "arm", "seed", "contract", "scorecard"]
    return Table(heads, rows)


def findings(record: Comparison) -> Iterator[Note]:
    """Yield remarks that a reader needs to interpret the verdicts."""
    for one in record.contrasts:
        kpi = one["kpis"][record.primary]
        yield Note(f"{one['arm']}: {kpi['verdict']}, {kpi['why']}{_more(kpi)}", item=True)
        if Verdict(kpi["verdict"]) in _TONES and len(kpi["seeds"]) < _FEWEST:
            yield Note(f"{one['arm']}: {_FEW}", Tone.WARN, item=True)
        yield from _fairness(record, one)
        if one["moved_inputs"]:
            text = f"{one['arm']}: the factor itself moves {', '.join(one['moved_inputs'])}."
            yield Note(text, item=True)
        if one["environment"]:
            text = f"{one['arm']}: other conditions: {'; '.join(one['environment'])}."
            yield Note(text, Tone.WARN, item=True)
        if one["arm"] in record.looks:
            yield _looked(record, one["arm"])
    if len(record.contrasts) > 1:
        yield Note(_simultaneous(record), item=True)
    if record.exploratory is not None:
        yield Note(f"Exploratory: {record.exploratory}.", Tone.WARN, item=True)
    for path, why in record.left_out.items():
        yield Note(f"Left out: {path}: {why}.", Tone.WARN, item=True)
    for note in record.notes:
        yield Note(note, item=True)


def _fairness(record: Comparison, one: ContrastRecord) -> Iterator[Note]:
    """Yield notes on differences between the arms other than the factors."""
    if one["confounded_by"]:
        causes = "; ".join(one["confounded_by"])
        text = f"{one['arm']}: confounded by {causes}. This cannot support a promotion."
        yield Note(text, Tone.WARN, item=True)
    elif record.factors:
        text = f"{one['arm']}: a clean comparison, in which the arms differ only in "
        yield Note(f"{text}{', '.join(record.factors)}.", item=True)


def _interval(kpi: KpiRecord) -> str:
    if kpi["estimate"] is None:
        return kpi["why"]
    count, said = len(kpi["seeds"]), wording.figure(kpi["estimate"], signed=True)
    if count == 1:
        return f"{said} in 1 seed, which gives no interval"
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
        return "; run the arms with more seeds, and compare all runs together"
    low, high = kpi["seeds_needed_low"], kpi["seeds_needed_high"]
    if low is None:  # equal differences, or a record of an older version
        return f"; an effect of the observed size would take {needed} seeds"
    count = f"{low} seeds or more" if high is None else f"{low} to {high} seeds"
    return f"; an effect of the observed size would take {count}"


def _marks(record: Comparison, one: ContrastRecord) -> list[str]:
    """Return the caveats of a verdict."""
    is_chosen = record.cycle is None and bool(record.seeds_left_out(one["arm"]))
    marks = {"confounded": bool(one["confounded_by"]), "seeds left out": is_chosen}
    return [mark for mark, holds in marks.items() if holds]


def _looked(record: Comparison, arm: str) -> Note:
    """State the number of recorded looks at an arm, and their effect on the verdict."""
    looks, left_out = record.looks[arm], len(record.seeds_left_out(arm))
    counts = ", ".join(str(len(one["seeds"])) for one in looks["others"])
    number = len(looks["others"]) + 1
    seen = f"{arm}: look {number} at these runs, as far as there are records here"
    seen = f"{seen} (the others had {counts} seeds)"
    if record.sequential != "none" and not left_out:
        return Note(f"{seen}; the always-valid p-value allows for any number of looks.", item=True)
    if record.cycle is not None:
        text = f"{seen}; cycle {record.cycle} registered these seeds before any run."
        return Note(text, item=True)
    if record.sequential != "none":
        text = (
            f"{seen}; it leaves out {left_out} of their seeds, and the always-valid p-value does "
            "not hold for seeds that are chosen after a look. This cannot support a promotion; "
            "compare all seeds together."
        )
        return Note(text, Tone.WARN, item=True)
    return _of_single_looks(record, arm, seen)


def _of_single_looks(record: Comparison, arm: str, seen: str) -> Note:
    """State the effect of several looks on a test that allows for one."""
    false, adds = record.looks[arm]["false"], record.only_adds_seeds(arm)
    said = f"{seen}; the p-value is that of a single look"
    if not adds:
        said += ", and the looks do not only add seeds: some leave out seeds that others had"
    if false is not None:
        bound = "up to " if len(record.contrasts) > 1 else ""
        rate = f"is wrong in {bound}{100 * false:.2g}% of studies without a difference"
        if adds:
            sizes = ", ".join(map(str, record.sizes_of_looks(arm)))
            said += f", and whoever looks at {sizes} seeds and stops at the first verdict {rate}"
        else:
            said += (
                f". Whoever looks at these sets of seeds and stops at the first verdict {rate}, "
                "and more often if seeds were left out because of their results"
            )
    if adds and false is not None and false <= record.alpha:
        return Note(f"{said}, which α allows.", item=True)
    remedy = "fix the seeds before the first look, "
    remedy += "or use compare.sequential=always_valid" if adds else "and leave none of them out"
    return Note(f"{said}; {remedy}.", Tone.WARN, item=True)


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
    return (
        "no spread"
        if low == high
        else f"[{wording.figure(low, signed=True)}, {wording.figure(high, signed=True)}]"
    )


def _found(kpi: KpiRecord) -> str:
    """Return the range of detectable differences; older records contain only its middle."""
    low, high = kpi["mde_low"], kpi["mde_high"]
    if low is None or high is None:
        return _UNKNOWN if kpi["mde"] is None else f"about {wording.figure(kpi['mde'])}"
    return f"{low:.2g} to {high:.2g}"
