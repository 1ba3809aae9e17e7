"""The page sweep.html: what is read from a sweep, what the page has, and the page in a browser."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import shutil
from html import unescape

import pytest

from mens_exp.artifacts.host import run_lock
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState, SweepRecord
from mens_exp.errors import DataError
from mens_exp.report import html, sweep_view
from mens_exp.tasks.study_runs import read_sweep, write_sweep_page

SEEDS = 3


def page(review):
    return html.page(sweep_view.document(review))


@pytest.fixture
def sweep(study, sweep_over):
    """Three seeds of two arms that succeeded, and a job that was killed."""
    how = {"seeds": range(1, SEEDS + 1), "passes": lambda arm, seed: 1 + arm + (seed > 2)}
    return sweep_over(study(**how), SEEDS)


def test_cells_have_what_their_runs_measured(sweep):
    """Factors are from the command, KPIs and costs from the runs; the seed is the last column."""
    review = read_sweep(sweep)
    assert review.factors == ["quant.double_quant", "seed"]
    cell = review.cells[3]
    assert (cell.number, cell.arm) == (3, "quant.double_quant=false")
    assert cell.values["val_loss"] == pytest.approx(2 + 2 / 100 - 1 / 10)
    assert cell.values["parse_rate"] == 0.5
    assert cell.values["train_s"] == 11.0
    assert [(kpi.name, kpi.unit) for kpi in review.kpis[:2]] == [
        ("val_loss", "nats/token"),
        ("parse_rate", "1"),
    ]
    assert [cost.name for cost in review.costs[:2]] == ["train_s", "peak_bytes"]


def test_a_job_without_a_run_has_no_values_and_its_reason(sweep):
    """Unknown values are null with a reason, not zero."""
    cell = read_sweep(sweep).cells[-1]
    assert (cell.state, cell.values, cell.has_report) == ("failed", {}, False)
    assert cell.reason == "killed by <b>SIGKILL</b>"


def test_a_job_whose_process_was_killed_is_interrupted(sweep):
    """Its record says running until it is resumed, but only a living process is running."""
    record = SweepRecord.read(sweep.record)
    record.jobs[0]["state"] = JobState.RUNNING
    record.write(sweep.record)
    run = RunDir(sweep.path / record.jobs[0]["directory"])
    with run_lock(run.lock):
        assert read_sweep(sweep).cells[0].state == "running"
        taken = json.loads(run.lock.read_text("utf-8"))
    run.lock.write_text(json.dumps(taken | {"started": 1.0}), "utf-8")
    review = read_sweep(sweep)
    assert review.cells[0].state == "interrupted"
    assert "sweep.resume" in review.cells[0].reason
    assert "1 interrupted" in page(review)


def test_arms_are_compared_as_task_compare_does(sweep):
    """They are paired by seed, over the runs that succeeded."""
    compared = read_sweep(sweep).comparison
    assert compared is not None
    assert [arm["seeds"] for arm in compared.arms] == [[1, 2, 3], [1, 2, 3]]
    assert compared.contrasts[0]["kpis"]["parse_rate"]["differences"] == [0.25] * SEEDS


def test_a_sweep_without_a_run_says_why_nothing_is_compared(tmp_path, sweep_over):
    """A sweep whose jobs all failed has a page too."""
    sweep = sweep_over(tmp_path / "none", 0)
    review = read_sweep(sweep)
    assert review.comparison is None
    assert "no training run of this sweep has ended well" in review.why_not_compared
    assert review.why_not_compared in page(review)


def test_a_damaged_record_costs_its_cell_the_values_alone(sweep):
    """The cell says what cannot be read, and nothing is compared without it."""
    (sweep.path / "2_runs" / "manifest.json").write_text("{", encoding="utf-8")
    review = read_sweep(sweep)
    assert review.cells[2].values == {}
    assert "manifest.json" in str(review.cells[2].why_unknown)
    assert review.cells[1].values["parse_rate"] == 0.5
    assert "manifest.json" in review.why_not_compared


def test_a_damaged_sweep_is_refused(sweep):
    """Without the sweep's own record there is nothing to show."""
    sweep.record.write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"sweep\.json"):
        write_sweep_page(sweep)


def test_the_page_is_the_same_for_the_same_records(sweep):
    """Rendered twice, the page has the same bytes."""
    assert page(read_sweep(sweep)) == page(read_sweep(sweep))


def test_texts_are_escaped_and_only_our_script_may_run(sweep):
    """A reason, a completion or a cell is escaped; the policy allows scripts by hash."""
    events = sweep.path / "0_runs" / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["completion"] = "</pre><script>alert(1)</script>"
    events.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    text = page(read_sweep(sweep))
    assert "<b>SIGKILL" not in text
    assert "invalid: &lt;r&gt;" in text
    assert text.count("<script>") == 1
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    allowed = [part.split() for part in unescape(policy).split(";")]
    assert ["script-src", f"'sha256-{digest}'"] in allowed
    assert ["default-src", "'none'"] in allowed


def test_equal_answers_of_several_cells_stand_there_once(sweep):
    """Item 0 parses in every cell: one answer of the base and one of the tuned models."""
    text = page(read_sweep(sweep))
    assert "base · cells 0, 1, 2, 3, 4, 5" in text
    assert "tuned · cells 0, 1, 2, 3, 4, 5" in text
    assert "tuned · cells 1, 3, 4, 5" in text  # item 1, which needs two passes


def test_items_beyond_the_first_are_counted(sweep, monkeypatch):
    """The page stays small and says how many it leaves out."""
    monkeypatch.setattr("mens_exp.tasks.study_runs._MOST_ITEMS", 1)
    review = read_sweep(sweep)
    assert len(review.predictions) == 6
    assert review.more_predictions == 6 * 3
    assert "18 more are in the runs" in page(review)


# The page in a browser.


@pytest.fixture(scope="module")
def browser_path():
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is missing: pip install 'mens-exp[dev]'")
    return found


@pytest.fixture
def opened(sweep, browser_path):
    """The page in headless Chromium, loaded from its file; a script error fails the test."""
    from playwright.sync_api import sync_playwright

    write_sweep_page(sweep)
    errors = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda message: errors.append(message.text))
        tab.goto(sweep.page.absolute().as_uri())
        yield tab
        browser.close()
    assert errors == []


def cells(tab):
    """Numbers of the visible rows, in their order."""
    rows = tab.locator("#cells tbody tr:visible th")
    return rows.all_inner_texts()


def chooser(tab, place):
    """Return a list box by its position: those of the factors in order, then the state's."""
    return tab.locator("#filters select").nth(place)


def test_a_click_sorts_and_a_second_one_turns_it_round(opened):
    """Rows are sorted by value, not by text; the cell without a value is always last."""
    head = opened.locator("#cells thead button", has_text="val_loss")
    head.click()
    assert cells(opened) == ["1", "3", "5", "0", "2", "4", "6"]
    head.click()
    assert cells(opened) == ["4", "2", "0", "5", "3", "1", "6"]
    assert opened.locator("th[aria-sort]").all_inner_texts() == ["val_loss (nats/token)"]


def test_a_factor_filters_rows_lines_and_answers(opened):
    """The state is a filter beside the factors."""
    chooser(opened, 0).select_option("false")
    assert cells(opened) == ["1", "3", "5", "6"]
    lit = opened.locator("path.cell:not(.dim)")
    assert sorted(lit.nth(i).get_attribute("data-cell") for i in range(lit.count())) == [
        *("1", "3", "5", "6")
    ]
    assert opened.locator("#shown").inner_text() == "4 of 7 cells"
    chooser(opened, 2).select_option("failed")
    assert cells(opened) == ["6"]
    assert opened.locator("details.item:visible").count() == 0
    chooser(opened, 2).select_option("")
    chooser(opened, 0).select_option("")
    assert len(cells(opened)) == 7


def test_a_run_is_opened_from_its_row(opened):
    """The link leads to the run's own report; a job without a run has no link."""
    row = opened.locator('tr[data-cell="3"]')
    row.get_by_role("link").click()
    opened.wait_for_url("**/3_runs/report.html")
    assert "mens_exp" in opened.content()
    opened.go_back()
    assert opened.locator('tr[data-cell="6"] a').count() == 0
    assert opened.locator('tr[data-cell="6"]').get_by_text("no report").is_visible()


def test_further_kpis_come_on_request(opened):
    """The table begins with few columns."""
    head = opened.locator("#cells thead th", has_text="trainable_parameters")
    assert not head.is_visible()
    opened.get_by_label("all KPIs and costs").check()
    assert head.is_visible()


def test_pointing_at_a_row_sets_off_its_line(opened):
    """The line of a row is highlighted among all lines of the figure."""
    opened.locator('tr[data-cell="2"]').hover()
    lit = opened.locator("path.cell.lit")
    assert lit.count() == 1
    assert lit.get_attribute("data-cell") == "2"


def test_the_sweep_record_is_not_touched(sweep):
    """Only the launcher writes the sweep's record."""
    before = sweep.record.read_bytes()
    write_sweep_page(sweep)
    assert sweep.record.read_bytes() == before
    assert SweepRecord.read(sweep.record).sweep_id == "runs"
