"""Verdicts keep their level and power on resampled real scores."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "calibration.py"


@pytest.fixture(scope="module")
def bench():
    return runpy.run_path(str(BENCHMARK))


@pytest.fixture(scope="module")
def scores(bench):
    return bench["scores_in"](bench["SCORES"])


NAMES = [
    "SmolLM2-135M tuned, parses",
    "SmolLM2-135M base, parses",
    "tiny_llama, validation loss",
]


def test_the_file_holds_what_is_simulated(scores):
    """The file has three kinds of real scores: rare failures, rare successes and a loss."""
    assert list(scores) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seeds", [5, 6])
def test_verdicts_hold_level_and_power(bench, scores, name, seeds):
    """At most 6.5 % of 1,000 null studies get a verdict; the stated effect is found in 75-85 %."""
    rates = bench["calibrated"](scores[name], seeds)
    assert rates.false <= 0.065
    assert 0.75 <= rates.found <= 0.85
    # Why the percentile bootstrap is not the default: over five seeds it errs far more often.
    assert rates.bootstrap_false > rates.false


def test_items_of_a_run_are_read_from_its_events(bench, tmp_path):
    """Booleans are read per condition; a score that never varies is left out."""
    lines = [
        {"condition": "tuned", "item_id": str(i), "parses": i > 0, "finished": True, "tokens_in": 3}
        for i in range(3)
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert bench["scores_in"](path) == {"tuned parses": [[0.0, 1.0, 1.0]]}
