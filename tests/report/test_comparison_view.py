from __future__ import annotations

import re
from pathlib import Path

import pytest

from mens_exp.artifacts.comparison import Comparison
from mens_exp.report import comparison_view, html, terminal
from mens_exp.report.comparison_view import findings, verdict_table
from mens_exp.report.document import Note, Section, Table, Tone, as_cell
from mens_exp.report.study_plots import comparison_drawings

pytestmark = pytest.mark.draws

SHIPPED = Path(__file__).parents[2] / "notebooks" / "records" / "comparison" / "compare.json"


def in_80_columns(record):
    lines = terminal.lines(comparison_view.brief(record), 80, is_plain=False)
    texts = [line.plain for line in lines]
    assert max(map(len, texts)) <= 80
    return "\n".join(texts)


def test_no_word_of_the_verdicts_is_broken_in_a_terminal_of_80_columns():
    """The terminal omits two columns of the page, so that verdicts are not wrapped."""
    record = Comparison.read(SHIPPED)
    shown = in_80_columns(record)
    table = verdict_table(record)
    assert len(table.heads) == len(table.rows[0]) == 9
    for row in table.rows:
        assert all(word in shown for word in row[-1].text.split())
        assert row[1] in shown
    assert "seed noise" not in shown


def test_looks_are_a_column_of_the_page_and_a_sentence_in_the_terminal():
    """Ranges and looks leave verdicts unbroken at 80 columns."""
    record = Comparison.read(SHIPPED)
    (contrast,) = record.contrasts
    kpi = contrast["kpis"][record.primary]
    kpi.update(mde_low=0.2512, mde_high=0.5934)
    others = [{"path": "a", "seeds": [1, 2]}, {"path": "b", "seeds": [1, 2, 3]}]
    record.looks = {contrast["arm"]: {"others": others, "false": 0.119}}
    table = verdict_table(record)
    heads, row = table.heads, [as_cell(value).text for value in table.rows[0]]
    assert row[heads.index("look")] == "3"
    assert row[heads.index("found at 80%")] == "0.25 to 0.59"
    shown = in_80_columns(record)
    assert all(word in shown for word in (*row[-1].split(), "difference", "interval"))
    said = " ".join(shown.split())
    assert "look 3 at these runs, as far as there are records here" in said
    assert "is wrong in 12% of studies without a difference" in said
    assert "compare.sequential=always_valid" in said
    record.looks[contrast["arm"]]["false"] = 0.049
    (safe,) = [note for note in findings(record) if "look 3" in note.text]
    assert safe.text.endswith("is wrong in 4.9% of studies without a difference, which α allows.")
    assert safe.tone == ""
    record.cycle = "one"
    (said,) = [note.text for note in findings(record) if "look 3" in note.text]
    assert said.endswith("cycle one registered these seeds before any run.")


def looked(*others, false=0.161, **fields):
    """Return the shipped record with looks at other seeds, and the statement about them."""
    record = Comparison.read(SHIPPED)
    (contrast,) = record.contrasts
    looks = [{"path": f"{n}", "seeds": seeds} for n, seeds in enumerate(others)]
    contrast["kpis"][record.primary]["seeds"] = [2, 3, 4]
    record.looks = {contrast["arm"]: {"others": looks, "false": false}}
    for name, value in fields.items():
        setattr(record, name, value)
    number = len(others) + 1
    (note,) = [one for one in findings(record) if f"look {number} at these runs" in one.text]
    return record, note


def test_looks_that_leave_out_seeds_are_never_called_allowed():
    """Neither the single-look rate nor the always-valid test covers chosen seeds."""
    subsets = [1, 2, 3], [1, 2, 4], [1, 3, 4]
    record, note = looked(*subsets)
    assert note.tone == Tone.WARN
    assert "some leave out seeds that others had" in note.text
    assert "is wrong in 16% of studies without a difference, and more often if" in note.text
    assert note.text.endswith("fix the seeds before the first look, and leave none of them out.")
    assert "(seeds left out)" in comparison_view.headline(record)
    assert "seeds left out" in in_80_columns(record)
    _, low = looked(*subsets, false=0.049)
    assert low.tone == Tone.WARN
    assert "allows" not in low.text
    _, signs = looked(*subsets, false=None, test="sign_flip")
    assert signs.text.endswith(
        "others had; fix the seeds before the first look, and leave none of them out."
    )
    always, note = looked(*subsets, false=None, sequential="always_valid")
    assert note.tone == Tone.WARN
    assert "it leaves out 1 of their seeds, and the always-valid p-value does not hold" in note.text
    assert "This cannot support a promotion; compare all seeds together." in note.text
    assert "(seeds left out)" in comparison_view.headline(always)
    _, smaller = looked([1, 2, 3, 4, 5], false=None, sequential="always_valid")
    assert "it leaves out 2 of their seeds" in smaller.text


def test_looks_that_only_add_seeds_are_as_they_were():
    """Nested sets are allowed, and for the always-valid test any subsets of the present seeds."""
    record, note = looked([2, 3])
    assert "whoever looks at 2, 3 seeds and stops at the first verdict is wrong in 16%" in note.text
    assert note.text.endswith("or use compare.sequential=always_valid.")
    assert "left out" not in comparison_view.headline(record)
    for others in ([[2, 3]], [[2, 3], [2, 4]]):
        _, note = looked(*others, false=None, sequential="always_valid")
        assert note.text.endswith("the always-valid p-value allows for any number of looks.")
        assert note.tone == Tone.PLAIN
    _, note = looked([2, 3], [2, 4])
    assert "some leave out seeds that others had" in note.text
    record, note = looked([1, 2, 3], cycle="one")
    assert note.text.endswith("cycle one registered these seeds before any run.")
    assert "left out" not in comparison_view.headline(record)


@pytest.mark.parametrize(
    ("backends", "factor", "proposed"),
    [
        (("qlora", "burn"), "backend", True),
        (("qlora", "lora"), "backend", False),
        (("burn", "qlora"), "backend", False),
        (("qlora", "qlora"), "lora", False),
    ],
)
def test_a_policy_on_burn_is_proposed_only_if_burn_was_better_than_qlora(
    backends, factor, proposed
):
    """After any other verdict, factor or backend only the check is proposed."""
    record = Comparison.read(SHIPPED)
    record.factors = [factor]
    for arm, backend in zip(record.arms, backends, strict=True):
        arm["backend"] = backend
    (contrast,) = record.contrasts
    contrast["kpis"][record.primary].update(verdict="better")

    def promotes():
        steps = comparison_view.document(record, "verdict").steps
        return ["policy=burn_rnd" in one.command for one in steps]

    assert promotes() == ([True, False] if proposed else [False])
    contrast["confounded_by"] = ["optim.lr"]
    assert promotes() == [False]


@pytest.mark.parametrize(
    ("verdict", "seeds", "noted"),
    [
        ("better", [1, 2], True),
        ("worse", [1, 2], True),
        ("better", [1, 2, 3], False),
        ("no difference found", [1, 2], False),
    ],
)
def test_a_verdict_of_two_seeds_carries_a_note(verdict, seeds, noted):
    """Error rates were measured for three seeds or more."""
    record = Comparison.read(SHIPPED)
    record.contrasts[0]["kpis"][record.primary].update(verdict=verdict, seeds=seeds)
    assert any("Confirm it with more seeds" in one.text for one in findings(record)) is noted


def test_times_are_labelled_as_wall_clock_figures():
    """On a shared machine other work affects them."""
    made = comparison_view.document(Comparison.read(SHIPPED))
    (arms,) = [part for part in made.parts if isinstance(part, Section) and "spent" in part.title]
    assert "on a shared machine" in arms.parts[-1].text


def _tables(parts):
    for part in parts:
        if isinstance(part, Table):
            yield part
        elif isinstance(part, Section):
            yield from _tables(part.parts)


def test_every_head_of_a_column_and_every_label_is_explained():
    """Names of arms are excepted; terms used only as headers are not linked in sentences."""
    record = Comparison.read(SHIPPED)
    made = comparison_view.document(record)
    heads = {head for table in _tables(made.parts) for head in table.heads} - {
        arm["name"] for arm in record.arms
    }
    assert {"found at 80%", "paired ÷ unpaired", "sd between reruns", "unit"} <= heads
    scorecard = {"KPI", "base", "tuned"}
    for head in heads | scorecard | {"look"}:
        assert "<abbr title=" in html.fragment(Table([head], [["x"]])), head
    page = html.page(made)
    labels = [cell.label for cell in made.meta]
    assert labels == ["Primary KPI", "Reference", "Factors", "Test", "Condition"]
    for word in ("kpi", "reference", "factor", "test", "condition"):
        assert f'<dt id="word-{word}">' in page
    assert "<abbr" not in html.fragment(Note("Look at this unit; the difference is a test."))


def test_forests_say_their_level_and_which_way_is_better():
    """At alpha 0.001 the level is not rounded to 100 %."""
    record = Comparison.read(SHIPPED)
    record.alpha = 0.001
    kpi = record.contrasts[0]["kpis"][record.primary]
    kpi["direction"] = "min"
    forest = comparison_drawings(record)[0]
    assert "99.9% interval" in forest.caption
    assert forest.caption.endswith("Lower is better.")
    assert verdict_table(record).heads[2] == "99.9% interval"


def of_noise(record, estimate, seeds=(1, 2, 3)):
    """Return the plot of all KPIs with the first difference set to a multiple of the noise."""
    (contrast,) = record.contrasts
    known = {n: k for n, k in contrast["kpis"].items() if k["estimate"] is not None}
    contrast["kpis"] = {record.primary: known[record.primary]} | dict(list(known.items())[:6])
    for name, kpi in contrast["kpis"].items():
        record.noise[name] = {"seed": 1.0, "rerun": None}
        kpi.update(low=-0.5, estimate=0.5, high=1.5, seeds=[1, 2, 3], differences=[0.5] * 3)
        if name == record.primary:
            kpi.update(low=estimate - 1, estimate=estimate, high=estimate + 1)
            kpi.update(seeds=list(seeds), differences=[estimate] * len(seeds))
    return next(plot for plot in comparison_drawings(record) if plot.name == "forest_noise")


def test_one_difference_far_from_the_rest_does_not_flatten_them():
    """The axis ends near the others, and an arrow with a number marks the outlier."""
    far = of_noise(Comparison.read(SHIPPED), 236.0)
    assert widest(far) < 30
    assert "236" in far.svg
    assert "beyond the axis" in far.caption
    near = of_noise(Comparison.read(SHIPPED), 3.0)
    assert "beyond the axis" not in near.caption


def test_a_difference_of_one_seed_is_drawn_as_such():
    """It has no interval and is not a result."""
    record = Comparison.read(SHIPPED)
    plot = of_noise(record, 1.0, seeds=[1])
    assert f"{record.primary} (1 seed)" in plot.svg
    record.contrasts[0]["kpis"][record.primary].update(low=None, high=None)
    first = comparison_drawings(record)[0]
    assert "(1 seed)" in first.svg
    assert "hollow" in first.caption


def widest(plot):
    """Return the largest number on the axis."""
    found = re.findall(r">\s*[\u2212-]?(\d+(?:\.\d+)?)\s*</text>", plot.svg)
    return max(map(float, found))
