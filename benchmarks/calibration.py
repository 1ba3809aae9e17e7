"""How often verdicts are wrong, over simulated studies whose scores are real ones, resampled.

    python benchmarks/calibration.py                       # benchmarks/scores.json
    python benchmarks/calibration.py <run>/events.jsonl    # what the items of a run came to

A study is two arms of some seeds. A seed of an arm is a run's row of scores, drawn with
replacement, and its items, drawn with replacement. Both arms are drawn from the same rows, so that
every verdict is a false one; then the effect that the formula says is found in 80 % of studies is
added to one arm. Prints, for each kind of score and number of seeds, the rates beside those of a
percentile bootstrap over the seeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mens_exp.evals.statistics import minimum_detectable, paired

SCORES = Path(__file__).with_name("scores.json")
REPLICATES, DRAWS = 1000, 500
ALPHA, POWER = 0.05, 0.8
LOWEST = 2  # values; rows of one value have no differences


class Rates(NamedTuple):
    """What came of a thousand studies of each kind."""

    false: float
    bootstrap_false: float
    effect: float
    found: float


def calibrated(rows: list[list[float]], seeds: int, draw_seed: int = 0) -> Rates:
    """Simulate studies of two equal arms, and of two that differ by the stated effect."""
    generator = np.random.default_rng(draw_seed)
    nulls = differences(rows, seeds, generator)
    sd = float(differences(rows, seeds, generator).std())  # the true one, of 1,000 studies
    effect = minimum_detectable(sd, seeds, ALPHA, POWER)
    assert effect is not None, "two seeds have a spread"
    planted = differences(rows, seeds, generator) + effect
    return Rates(
        false=float(np.mean([is_significant(study) for study in nulls])),
        bootstrap_false=float(np.mean([excludes_zero(study, generator) for study in nulls])),
        effect=effect,
        found=float(np.mean([is_significant(study) and study.mean() > 0 for study in planted])),
    )


def differences(rows: list[list[float]], seeds: int, generator: np.random.Generator) -> np.ndarray:
    """Return [study, seed] differences of two arms that are one."""
    table = np.asarray(rows, float)
    runs, items = table.shape

    def arm() -> np.ndarray:
        run = generator.integers(0, runs, (REPLICATES, seeds, 1))
        item = generator.integers(0, items, (REPLICATES, seeds, items))
        return np.asarray(table[run, item].mean(axis=2))

    return arm() - arm()


def is_significant(study: np.ndarray) -> bool:
    """Tell whether a study gets a verdict of better or worse."""
    p = paired(study.tolist(), ALPHA).p
    return p is not None and p < ALPHA


def excludes_zero(study: np.ndarray, generator: np.random.Generator) -> bool:
    """Tell the same of the percentile bootstrap over the seeds."""
    drawn = generator.integers(0, len(study), (DRAWS, len(study)))
    low, high = np.quantile(study[drawn].mean(axis=1), [ALPHA / 2, 1 - ALPHA / 2])
    return bool(low > 0 or high < 0)


def scores_in(path: Path) -> dict[str, list[list[float]]]:
    """Read rows of scores by name: our own file, or the items of an events.jsonl by condition."""
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        return {name: one["rows"] for name, one in json.loads(text)["scores"].items()}
    found: dict[str, list[float]] = {}
    for line in map(json.loads, text.splitlines()):
        for name, value in line.items():
            if isinstance(value, bool):
                found.setdefault(f"{line['condition']} {name}", []).append(float(value))
    return {name: [values] for name, values in found.items() if len(set(values)) >= LOWEST}


def main() -> None:
    """Print one line for each kind of score and number of seeds."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SCORES
    print(f"{'scores':<34}{'seeds':>6}{'false':>8}{'bootstrap':>11}{'effect':>10}{'found':>8}")
    for name, rows in scores_in(path).items():
        for seeds in (3, 5, 6, 10):
            rates = calibrated(rows, seeds)
            print(
                f"{name:<34}{seeds:>6}{rates.false:>8.1%}{rates.bootstrap_false:>11.1%}"
                f"{rates.effect:>10.4g}{rates.found:>8.1%}"
            )


if __name__ == "__main__":
    main()
