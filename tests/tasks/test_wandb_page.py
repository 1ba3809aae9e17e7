"""The table in docs/how-to/wandb.md of what the browser shows matches what a mirror sends."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import fork_server
import pytest

from mens_exp import cli

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "wandb.md"
SUITE = ("suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=40")
DRAWN = ("callbacks.scorecard.every_n_steps=2", "trainer.val_check_interval=4")


def fields(of):
    """Return the names in the table below a heading, by place; `<kpi>` and `…` match many."""
    _, _, rest = PAGE.read_text("utf-8").partition(f"**{of}**\n")
    table = rest.partition("\n\n**")[0].partition("\n## ")[0]
    found = {}
    for line in table.splitlines():
        if line.startswith("| ") and not line.startswith(("| in the", "|---")):
            place, names, _ = (cell.strip() for cell in line.strip("|").split(" | "))
            found.setdefault(place, []).extend(re.findall(r"`([^`]+)`", names))
    return found


def is_told(name, told):
    patterns = (re.escape(one).replace("<kpi>", r"\w+").replace("…", r".+") for one in told)
    return any(re.fullmatch(pattern, name) for pattern in patterns)


@pytest.fixture(scope="module")
def mirrored(finished_with):
    """Return the records of a run's offline mirror by kind, and its summary."""
    run = finished_with("logger=wandb", *SUITE, *DRAWN)
    records = {}
    for line in _leet(run.wandb, "--json").splitlines():
        one = json.loads(line)
        records.setdefault(one["type"], []).append(one[one["type"]])
    return records, json.loads(_leet(run.wandb, "--json", "--summary"))


def _leet(path, *options):
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *options, str(path)]
    return fork_server.run(command, check=True, capture_output=True, text=True).stdout


def _found(mirrored, place):
    records, summary = mirrored
    in_rows = {name for row in records["history"] for name in row["item"]}
    roots = {name.partition(".")[0] for name in in_rows}
    is_plot = {name for name in roots if name.startswith("plots/")}
    is_table = {name.partition(".")[0] for name in in_rows if "._type" in name} - is_plot
    own = {name for name in summary["summary"] if not name.startswith("_")}
    charts = {name for name in roots - is_plot - is_table if not name.startswith("_")}
    return {
        "Overview": {name for name, value in records["run"][0].items() if value},
        "Config": set(summary["config"]),
        "Charts": charts,
        "Summary": own - is_plot - is_table - charts,
        "Tables": is_table,
        "Panels": {name.removesuffix("_table") for name in is_plot},
        "Artifacts": {one["type"] for one in records["artifact"]} - {"run_table"},
    }[place]


@pytest.mark.parametrize("place", ["Config", "Charts", "Summary", "Tables", "Panels", "Artifacts"])
def test_what_a_run_sends_is_in_the_table(mirrored, place):
    """Every section, curve, value, table and artifact of an offline run is in the table."""
    told, found = fields("A training run")[place], _found(mirrored, place)
    assert found
    assert sorted(name for name in found if not is_told(name, told)) == []


@pytest.mark.parametrize(
    "place", ["Overview", "Config", "Tables", "Panels", "Artifacts", "Summary"]
)
def test_what_the_table_names_is_sent(mirrored, place):
    """Every row of the table is sent; only a study has notes and a group."""
    of_study = {"notes", "run_group"} if place == "Overview" else set()
    found = _found(mirrored, place) | of_study
    for name in fields("A training run")[place]:
        assert any(is_told(one, [name]) for one in found), name


def test_sections_of_other_tasks_are_in_no_row():
    """Sections of the configuration that is not sent are in no row."""
    assert not {"chat", "serve", "push", "corpus"} & set(fields("A training run")["Config"])


def test_what_the_run_of_a_sweep_holds_is_in_the_table(study, sweep_over, wandb_service, tmp_path):
    """Settings, tables, panels and drawings, as the service has them after task=sync."""
    root = study(seeds=[1, 2])
    sweep_over(root, 2)
    assert cli.main(["task=sync", f"path={root}", f"hydra.run.dir={tmp_path}/sync"]) == 0
    run = wandb_service.runs["runs_sweep"]
    told = fields("The run of a study or sweep")
    (row,) = run.history
    names = {name for name in row if isinstance(row[name], dict)}
    shown = {name.removesuffix("_table") for name in names}
    assert shown >= {"cells", "verdicts", "forest", "plots/arms"}
    every = [*told["Tables"], *told["Panels"], *told["Drawings"]]
    assert sorted(name for name in shown if not is_told(name, every)) == []
    for name in every:
        assert any(is_told(one, [name]) for one in shown), name
    assert set(run.settings) == set(told["Config"])
