"""Rate of wrong verdicts over simulated studies whose scores are real ones, resampled.

    python benchmarks/calibration.py                       # benchmarks/scores.json
    python benchmarks/calibration.py <run>/events.jsonl    # what the items of a run came to

A study is two arms of some seeds. A seed of an arm is a run's row of scores, drawn with
replacement, and its items, drawn with replacement. Both arms are drawn from the same rows, so that
every verdict is a false one; then the effect that the formula says is found in 80 % of studies is
added to one arm. The reference is a percentile bootstrap over the seeds of the same studies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import record

from mens_exp.evals.statistics import minimum_detectable, paired

QUESTION = "How often is a verdict wrong, and how often is a difference of the stated size found?"
SCORES = Path(__file__).with_name("scores.json")
SEEDS = (3, 5, 6, 10)
REPLICATES, DRAWS = 1000, 500
ALPHA, POWER = 0.05, 0.8
LOWEST = 2  # distinct values; constant rows have no differences


class Rates(NamedTuple):
    """Fractions of simulated studies with each result, and the planted effect."""

    false: float
    bootstrap_false: float
    effect: float
    found: float


def calibrated(
    rows: list[list[float]], seeds: int, draw_seed: int = 0, studies: int = REPLICATES
) -> Rates:
    """Simulate studies of two equal arms, and of two arms with the planted effect."""
    generator = np.random.default_rng(draw_seed)
    nulls = differences(rows, seeds, generator, studies)
    sd = float(differences(rows, seeds, generator, studies).std())  # over all studies: the true SD
    effect = minimum_detectable(sd, seeds, ALPHA, POWER)
    assert effect is not None, "two seeds have a spread"
    planted = differences(rows, seeds, generator, studies) + effect
    return Rates(
        false=float(np.mean([is_significant(study) for study in nulls])),
        bootstrap_false=float(np.mean([excludes_zero(study, generator) for study in nulls])),
        effect=effect,
        found=float(np.mean([is_significant(study) and study.mean() > 0 for study in planted])),
    )


def differences(
    rows: list[list[float]], seeds: int, generator: np.random.Generator, studies: int
) -> np.ndarray:
    """Return [study, seed] differences of two identical arms."""
    table = np.asarray(rows, float)
    runs, items = table.shape

    def arm() -> np.ndarray:
        run = generator.integers(0, runs, (studies, seeds, 1))
        item = generator.integers(0, items, (studies, seeds, items))
        return np.asarray(table[run, item].mean(axis=2))

    differences: np.ndarray = arm() - arm()
    return differences


def is_significant(study: np.ndarray) -> bool:
    """Return whether a study gets a verdict of better or worse."""
    p = paired(study.tolist(), ALPHA).p
    return p is not None and p < ALPHA


def excludes_zero(study: np.ndarray, generator: np.random.Generator) -> bool:
    """Return whether the percentile bootstrap interval over seeds excludes zero."""
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
    """Simulate for each kind of score and number of seeds."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("scores", type=Path, nargs="?", default=SCORES, help="default: scores.json")
    given = record.begin(parser)
    seeds_of_a_study, studies = ((3,), 50) if given.smallest else (SEEDS, REPLICATES)
    figures = []
    for name, rows in scores_in(given.scores).items():
        for seeds in seeds_of_a_study:
            rates = calibrated(rows, seeds, studies=studies)
            which = f"{name}, {seeds} seeds"
            beside = ("percentile bootstrap", rates.bootstrap_false)
            figures += [
                record.figure(f"{which}: false", rates.false, "frac", record.Better.LOWER, beside),
                record.figure(f"{which}: found", rates.found, "frac", record.Better.HIGHER),
                record.figure(f"{which}: effect", rates.effect, "score"),
            ]
    record.finish(QUESTION, figures, given)


if __name__ == "__main__":
    main()
