"""Rate of wrong verdicts of a study that is looked at again and again; what its seeds find.

    python benchmarks/looks.py

A study is two equal arms that get one further seed at a time. It is wrong where any of the looks
finds a difference. The studies are of normal differences, and of real scores, resampled as
benchmarks/calibration.py does. The test that allows for looks is compared with Student's t, which
allows for one.

The power is that of scipy's noncentral t at the difference that a study says it finds in 80 % of
studies: with the standard deviation that its own seeds have, and at the upper bound of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import record
from calibration import ALPHA, POWER, SCORES, differences, scores_in
from scipy import stats

from mens_exp.evals import sequential
from mens_exp.evals.statistics import minimum_detectable, sd_factors, student

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTION = "How often is a study wrong that is looked at again, and what do its seeds find?"
SCHEDULES = {
    "3, 5, 10 and 20 seeds": (3, 5, 10, 20),
    "5 looks, 3 to 7 seeds": tuple(range(3, 8)),
    "20 looks, 3 to 22 seeds": tuple(range(3, 23)),
    "48 looks, 3 to 50 seeds": tuple(range(3, 51)),
}
STUDIES, RESAMPLED = 100_000, 4000
SEEDS = (3, 5, 10)


def rates(studies: np.ndarray, looks: Sequence[int]) -> tuple[float, float]:
    """Return the fractions of studies with a verdict at any look: always-valid test, and t."""
    always_valid, fixed = np.zeros(len(studies), bool), np.zeros(len(studies), bool)
    for count in looks:
        seen = studies[:, :count]
        sd = seen.std(axis=1, ddof=1)
        safe = np.where(sd > 0, sd, np.inf)  # equal differences: neither test uses t then
        t = np.abs(seen.mean(axis=1)) / safe * np.sqrt(count)
        always_valid |= t > sequential.critical(count, ALPHA)
        fixed |= t > student(count, ALPHA)
    return float(always_valid.mean()), float(fixed.mean())


def powers(seeds: int, studies: int) -> tuple[float, float]:
    """Return the fraction of studies with `POWER` at the upper bound, and mean power without."""
    unit = minimum_detectable(1.0, seeds, ALPHA, POWER)
    assert unit is not None, "two seeds have a spread"
    draws = np.random.default_rng(seeds).standard_normal((studies, seeds))
    stated = unit * draws.std(axis=1, ddof=1)
    bound = stats.t.ppf(1 - ALPHA / 2, seeds - 1)

    def power(effect: np.ndarray) -> np.ndarray:
        shift = effect * np.sqrt(seeds)
        tails = [stats.nct.sf(bound, seeds - 1, side) for side in (shift, -shift)]
        return np.asarray(sum(np.nan_to_num(tail) for tail in tails))

    upper = power(stated * sd_factors(seeds)[1])
    return float((upper >= POWER).mean()), float(power(stated).mean())


def main() -> None:
    """Simulate each schedule of looks, and the power of each number of seeds."""
    parser = record.command_line(__file__, __doc__)
    given = record.begin(parser)
    resampled, studies = (50, 200) if given.smallest else (RESAMPLED, STUDIES)
    generator = np.random.default_rng(0)
    drawn = {"normal": generator.standard_normal((studies, 50))}
    for name, rows in scores_in(SCORES).items():
        drawn[name] = differences(rows, 50, generator, resampled)
    figures = []
    for name, values in drawn.items():
        for schedule, looks in SCHEDULES.items():
            always_valid, fixed = rates(values, looks)
            beside = ("t at each look", fixed)
            which = f"{name}, {schedule}: false"
            figures.append(record.figure(which, always_valid, "frac", record.Better.LOWER, beside))
    for seeds in SEEDS:
        at_bound, plain = powers(seeds, min(studies, 10_000))
        beside = ("mean power at the estimate", plain)
        which = f"{seeds} seeds: upper bound has the power"
        figures.append(record.figure(which, at_bound, "frac", record.Better.HIGHER, beside))
    for seeds in (5, 6, 10, 20):
        valid = minimum_detectable(1.0, seeds, ALPHA, POWER, power_at=sequential.power_of)
        fixed_effect = minimum_detectable(1.0, seeds, ALPHA, POWER)
        assert valid is not None, "five seeds find something"
        assert fixed_effect is not None, "five seeds find something"
        beside = ("t of one look", fixed_effect)
        which = f"{seeds} seeds: found in 80 %"
        figures.append(record.figure(which, valid, "sd", record.Better.LOWER, beside))
    record.finish(QUESTION, figures, given)


if __name__ == "__main__":
    main()
