from __future__ import annotations

from pathlib import Path

from mens_exp.config.backend import BACKEND_SPECS
from mens_exp.planning.capabilities import page
from mens_exp.planning.planner import available


def test_page_is_current():
    """Run `make docs` to write it again."""
    file = Path(__file__).parents[2] / "docs" / "reference" / "capabilities.md"
    assert file.read_text("utf-8") == page()


def test_page_answers_as_the_planner_does():
    """By hand: qlora needs 4 bits and the model's tokenizer; lora uses no quantization."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page().splitlines()]
    cells = {
        tuple(row[:2]): dict(zip(BACKEND_SPECS, row[2:], strict=True))
        for row in rows
        if len(row) == 2 + len(BACKEND_SPECS)
    }
    assert cells["nf4", "hf"]["qlora"] == "yes"
    assert cells["nf4", "vox"]["qlora"] == "no (2)"
    assert cells["none", "hf"]["qlora"] == "no (1)"
    assert cells["nf4", "hf"]["lora"] == "no (1)"
    assert cells["none", "vox"]["burn"] == "yes"


def test_page_says_what_is_here():
    """A backend that is not built yet is marked "not yet"."""
    (line,) = (line for line in page().splitlines() if line.startswith("| here "))
    here = [cell.strip() for cell in line.split("|")[2:-1]]
    assert here == ["yes" if name in available() else "not yet" for name in BACKEND_SPECS]
    assert "yes" in here


def test_page_finds_the_limits_of_mobile_edge():
    """The page gets these limits from the planner."""
    (line,) = (line for line in page().splitlines() if line.startswith("| mobile_edge "))
    assert line == "| mobile_edge | at most 512 | at most 32 | at most 1 | CPU |"
