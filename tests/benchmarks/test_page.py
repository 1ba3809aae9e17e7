from __future__ import annotations

from pathlib import Path

import page
import pytest
from record import RESULTS, Better, Results, Size

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
LATER = "2026-02-03T04:05:06.789Z"
BARE = {"reference": None, "reference_value": None, "ratio": None}  # measured separately


@pytest.fixture
def drawn(tmp_path):
    """Return the page of runs of one script."""

    def draw(*runs):
        Results(name="throughput", question="How fast?", runs=[*runs]).write(
            tmp_path / "throughput.json"
        )
        return page.page(tmp_path)

    return draw


def row(text, name="speed"):
    """Return the cells of a figure's row."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("which", page.HEADS)
def test_the_page_is_current(which):
    """A run that was added to benchmarks/results requires make docs."""
    assert (MEASURED / f"{which}.md").read_text("utf-8") == page.page(RESULTS, which)


def test_every_script_has_a_run_of_full_size():
    """Figures of the smallest size are not meaningful."""
    found = {path.stem: Results.read(path) for path in RESULTS.glob("*.json")}
    assert sorted(found) == page.scripts()
    assert {path.suffix for path in RESULTS.iterdir()} == {".json"}
    for name, results in found.items():
        assert results.name == name
        assert {run["size"] for run in results.runs} == {Size.FULL}, name


def test_a_first_run_has_moved_nowhere(drawn, run_of):
    """The page says so, with the values, the machine and the commit."""
    text = drawn(run_of(note="busy"))
    assert "First run." in text
    assert "    python benchmarks/throughput.py\n" in text
    assert "Run on 2026-01-02 at commit `0123456789`." in text
    assert "EPYC, AVX512, 2 core(s), 2 thread(s), 24.0 GiB, Linux 6" in text
    assert "Note: busy." in text
    assert row(text) == ["speed", "100 tokens/s", "", "0.5 × GEMM (200)"]


def test_a_second_run_says_how_each_figure_moved(drawn, run_of, figure_of):
    """By hand: 100 to 120 is +20 %, and so is 0.5 to 0.6; a share changes by points."""
    before = run_of(
        figures=[
            figure_of(),
            figure_of(name="full", value=0.9, unit="frac", **BARE),
            figure_of(name="gone"),
        ]
    )
    now = run_of(
        utc=LATER,
        figures=[
            figure_of(value=120, ratio=0.6),
            figure_of(name="full", value=0.875, unit="frac", **BARE),
            figure_of(name="fresh"),
        ],
        versions={"torch": "2.14.0"},
    )
    text = drawn(before, now)
    compared = "Compared with the run on 2026-01-02 at commit `0123456789` (load 0.1 at its start)"
    assert f"{compared}; since then torch 2.13.0 → 2.14.0." in text
    assert row(text)[-1] == "+20.0 %; ratio +20.0 %; better"
    assert row(text, "full")[1:] == ["87.5 %", "", "", "−2.5 points; worse"]
    assert row(text, "fresh")[-1] == "new"
    assert "No longer measured: gone." in text


def test_the_nearest_comparable_run_is_the_one_compared_with(drawn, run_of, figure_of, machine_of):
    """Later runs on another machine, with another command or of the smallest size are skipped."""
    text = drawn(
        run_of(figures=[figure_of(value=10)]),
        run_of(figures=[figure_of(value=50)]),
        run_of(figures=[figure_of(value=1)], machine=machine_of(cores=64)),
        run_of(figures=[figure_of(value=2)], command="python benchmarks/throughput.py lora.r=8"),
        run_of(figures=[figure_of(value=3)], size=Size.SMALLEST),
        run_of(figures=[figure_of(value=100)], utc=LATER),
    )
    first = text.partition("lora.r=8")[0]
    assert row(first)[-1].startswith("+100.0 %")
    assert text.count("First run.") == 1


@pytest.mark.parametrize(
    "change",
    [{"cpu": "Xeon"}, {"cores": 4}, {"threads": 1}, {"instruction_set": "AVX2"}, {"cpu": None}],
    ids=str,
)
def test_a_run_of_another_machine_is_not_compared_with(change, drawn, run_of, machine_of):
    """A run on an unknown machine is not compared either."""
    unknown = {"machine.cpu": "not stated"} if change == {"cpu": None} else {}
    text = drawn(run_of(machine=machine_of(**change), unknown=unknown), run_of(utc=LATER))
    assert "First run on this machine." in text
    assert "Moved |" not in text


@pytest.mark.parametrize(("threads", "is_compared"), [(2, True), (1, False)])
def test_threads_that_a_run_does_not_name_are_its_cores(
    threads, is_compared, drawn, run_of, machine_of
):
    """By default a script uses all cores; another number counts as another machine."""
    machine = machine_of(threads=None, instruction_set=None)
    unknown = dict.fromkeys(["machine.threads", "machine.instruction_set"], "not stated")
    now = run_of(utc=LATER, machine=machine_of(threads=threads))
    text = drawn(run_of(machine=machine, unknown=unknown), now)
    assert ("Moved |" in text) == is_compared


def test_what_is_unknown_of_a_run_is_said(drawn, run_of, machine_of):
    """Unknown values are shown with their reasons."""
    machine = machine_of(cpu=None)
    unknown = {"commit": "not stated", "machine.cpu": "not stated"}
    text = drawn(run_of(commit=None, machine=machine, unknown=unknown))
    assert "at commit unknown" in text
    assert "Unknown: commit, cpu (not stated)." in text


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        ({"value": 90, "ratio": 0.45}, {}, "−10.0 %; ratio −10.0 %; worse"),
        (
            {"value": 90, "ratio": 0.45, "better": Better.LOWER},
            {},
            "−10.0 %; ratio −10.0 %; better",
        ),
        ({"value": 90, "ratio": 0.45, "better": None}, {}, "−10.0 %; ratio −10.0 %"),
        ({"value": 90, "ratio": 0.55}, {}, "−10.0 %; ratio +10.0 %"),
        ({"value": 90, "reference": "bare loop"}, {}, "−10.0 %"),
        ({"value": 90}, {"reference": None, "ratio": None}, "−10.0 %"),
        ({"value": 90} | BARE, BARE, "−10.0 %; worse"),
        ({"value": 90}, {"unit": "s"}, "was in s"),
        ({}, {"value": 0}, "was 0; ratio unchanged"),
        (
            {"value": 90, "ratio": 0.45, "lowest": 80, "highest": 95},
            {"lowest": 95, "highest": 110},
            "−10.0 %; ratio −10.0 %; ranges overlap",
        ),
        (
            {"value": 90, "ratio": 0.45, "lowest": 80, "highest": 94},
            {"lowest": 95, "highest": 110},
            "−10.0 %; ratio −10.0 %; worse",
        ),
    ],
)
def test_a_change_is_judged_where_it_can_be(now, before, expected, figure_of):
    """Overlapping rounds are not judged, nor changes that a load may explain by the reference."""
    assert page.moved(figure_of(**now), figure_of(**before)) == expected


def test_a_bar_in_a_name_breaks_no_table(drawn, run_of, figure_of):
    """It is escaped."""
    assert r"| \|x\| | 100 tokens/s |" in drawn(run_of(figures=[figure_of(name="|x|")]))
