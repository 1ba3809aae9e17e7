from __future__ import annotations

import re
import shlex
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from mens_exp.artifacts.attribution import Attribution
from mens_exp.report import run_page, terminal, write
from mens_exp.report.attribution_view import Grid, headline, heat_map, sections
from mens_exp.report.document import Plot
from mens_exp.report.summary import load

GOLDEN = Path(__file__).parents[1] / "golden" / "attribution_v1.json"


@pytest.fixture
def record():
    """Return the record of golden/attribution_v1.json: two modules in each of four layers."""
    return Attribution.read(GOLDEN)


def cells(svg):
    """Return the label and opacity of each cell."""
    found = []
    for rect in ET.fromstring(svg).iter("rect"):
        title = rect.find("title")
        if title is not None:
            found.append((title.text or "", float(rect.attrib["fill-opacity"])))
    return found


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_table_fits(record, width):
    """The most expensive module is first, and nothing is truncated."""
    lines = [line.plain for line in terminal.lines(sections(record)[:1], width, is_plain=False)]
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert text.index("l0.v") < text.index("l3.up")
    assert "…" not in text
    assert "leaves out 75.0% of the summed KL" in " ".join(text.split())


def test_suggestion_is_a_command_for_a_shell(record, write_run):
    """Parsed by a shell, the command has the suggested overrides and those of the model."""
    given = ["task=attribute", "attribute.tokens=64", "model=gpt2", "quant.skip=[mlp]"]
    run = write_run(task="attribute", overrides=given)
    shutil.copy(GOLDEN, run.attribution)
    (step,) = run_page.steps(load(run))
    words = shlex.split(step.command)
    assert words == ["python", "-m", "mens_exp", "model=gpt2", *record.suggestion["overrides"]]


def test_headline_puts_the_whole_beside_the_sum_of_its_parts(record):
    """The headline has both numbers in nats."""
    text = headline(record)
    assert "All 2 modules in nf4_double: KL 0.005" in text
    assert "summed: KL 0.004" in text


def test_page_shows_maps_tables_and_parity(record, write_run):
    """They replace the sections that only training has."""
    run = write_run(task="attribute")
    shutil.copy(GOLDEN, run.attribution)
    text = write.render_page(load(run))
    shown = (
        headline(record),
        "Weight SQNR",
        "Activation-weighted error",
        "Loss change, each module alone",
        "v, layer 0: 0.003",
        "l3.up",
        "4 bits against f32",
        "95.5%",
        "16 and on",
        "sum of the modules alone",
        "lora.targets=[self_attn.v_proj]",
    )
    assert [part for part in shown if part not in text] == []
    assert "Held-out completions" not in text


@pytest.mark.parametrize(
    ("overrides", "said", "commands"),
    [
        (
            ["quant.type_pattern={mlp.up_proj:fp4,0.mlp.up_proj:nf4}"],
            "quant.type_pattern={mlp.up_proj:fp4,0.mlp.up_proj:nf4}",
            2,
        ),
        ([], "Every module keeps nf4_double", 1),
    ],
)
def test_page_shows_the_suggested_mixture(record, write_run, overrides, said, commands):
    """The page has a map, the joint cost and the command; nothing if nothing would change."""
    record.suggestion["mixture"] = {
        "variants": {one["path"]: "fp4_double" for one in record.modules},
        "overrides": overrides,
        "rule": "the least of all",
        "budget_bits": 4.127,
        "kl_of_parts": 0.002,
        "whole": {**record.whole["nf4"], "kl": 0.00123},
    }
    run = write_run(task="attribute", overrides=["task=attribute", "attribute.quant_types=[fp4]"])
    record.write(run.attribution)
    found = load(run)
    text = re.sub("<[^>]*>", "", write.render_page(found))
    shown = ("2 modules in fp4_double", "0.0012", "Rule: the least of all.", said)
    assert [part for part in shown if part not in text] == []
    plots = {plot.name for one in sections(record) for plot in one.parts if isinstance(plot, Plot)}
    assert "bits" in plots
    first, *others = run_page.steps(found)
    assert 1 + len(others) == commands
    assert (said in shlex.split(first.command)) == bool(overrides)
    assert "attribute.quant_types=[fp4]" not in first.command


def test_a_run_without_attribution_has_no_such_part(write_run):
    """The page of a training run is unchanged."""
    text = write.render_page(load(write_run()))
    assert "4 bits against f32" not in text
    assert "Held-out completions" in text


def test_map_has_a_cell_for_each_known_value(record):
    """The SQNR of both modules is known for the configured variant."""
    plots = [part for part in sections(record)[1].parts if isinstance(part, Plot)]
    maps = {plot.name: cells(plot.svg) for plot in plots}
    assert [len(found) for found in maps.values()] == [2, 2, 2, 2]
    assert [said for said, _ in maps["sqnr"]] == ["v, layer 0: 20.5 dB", "up, layer 3: 20.5 dB"]


@pytest.mark.parametrize(("high_is_dark", "darkest"), [(True, "b, layer 1"), (False, "a, layer 0")])
def test_bad_values_are_dark(high_is_dark, darkest):
    """The worst cell is opaque, the best is still visible, and an unknown one is empty."""
    values = {("a", 0): 1.0, ("a", 1): 2.0, ("b", 1): 3.0, ("b", 0): None}
    grid = Grid(kinds=("a", "b"), layers=2, values=values)
    plot = heat_map("m", "M", "", grid, spell=str, high_is_dark=high_is_dark)
    found = sorted(cells(plot.svg), key=lambda cell: cell[1])
    assert len(found) == 3
    assert found[-1][0].startswith(darkest)
    assert found[-1][1] == 1
    assert found[1][1] == pytest.approx(0.53)
    assert 0 < found[0][1] < 0.1


def test_map_without_values_says_so():
    """The reason is shown instead of a drawing."""
    grid = Grid(kinds=("a",), layers=1, values={("a", 0): None})
    assert heat_map("m", "M", "", grid, spell=str).absent == "no value is known"


def test_names_from_a_model_are_escaped():
    """Module names come from the checkpoint and are not trusted."""
    grid = Grid(kinds=("<b>&",), layers=1, values={("<b>&", 0): 1.0})
    plot = heat_map("m", "M", "", grid, spell=str)
    assert "<b>" not in plot.svg
    assert cells(plot.svg) == [("<b>&, layer 0: 1.0", 1.0)]
