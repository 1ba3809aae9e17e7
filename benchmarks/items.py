"""Wrong verdicts about items like these, over simulated studies in which arms disagree on items.

    python benchmarks/items.py [studies]

The simulator is the definition of the model. The logit of an arm for a seed and an item is

    difficulty of the item + effect of the seed on the arm + preference of the arm for the item

each normal around 0, with standard deviations 1, SEED_SD and interaction / sqrt(2); the difference
of the two arms' preferences has the interaction as its standard deviation. The arms are
exchangeable, so over all seeds and all items neither is better, and every verdict is a false one.
A loss is the logit with normal noise of SD 1; an answer passes with the logit's probability.

A cell of the grid counts as good if the upper bound of its false rate is at most 6 %. The bounds
(Clopper and Pearson) hold together over the grid at 95 %. The reference is the t interval over
seeds, which speaks of these items alone.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import record
from scipy import stats

from mens_exp.evals.statistics import crossed, paired

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "How often does a study of two equal arms find one better on items like these?"
SEEDS, ITEMS, INTERACTIONS, KINDS = (3, 5, 10), (16, 64, 164), (0.0, 0.5, 1.0), ("loss", "pass")
SEED_SDS = (0.0, 0.3, 1.0)
STUDIES, ALPHA, CONFIDENCE = 40_000, 0.05, 0.95
AT_ONCE = 500  # studies per batch; with 10 seeds and 164 items they take 13 MB


def differences(
    generator: np.random.Generator,
    studies: int,
    seeds: int,
    items: int,
    interaction: float,
    seed_sd: float,
    kind: str,
) -> np.ndarray:
    """Return [study, seed, item] differences of two equally good arms."""
    difficulty = generator.normal(0, 1, (studies, 1, 1, items))
    of_seed = generator.normal(0, seed_sd, (studies, 2, seeds, 1))
    preference = generator.normal(0, interaction / math.sqrt(2), (studies, 2, 1, items))
    logit = difficulty + of_seed + preference
    if kind == "loss":
        score = logit + generator.normal(0, 1, logit.shape)
    else:
        score = (generator.random(logit.shape) < 1 / (1 + np.exp(-logit))).astype(float)
    return np.asarray(score[:, 0] - score[:, 1])


def in_portions(studies: int) -> Iterator[int]:
    """Yield the number of studies in each batch."""
    for done in range(0, studies, AT_ONCE):
        yield min(AT_ONCE, studies - done)


def upper_bound(false: int, studies: int, cells: int) -> float:
    """Return the simultaneous upper bound of one cell's rate."""
    level = (1 - CONFIDENCE) / cells
    return float(stats.beta.ppf(1 - level, false + 1, studies - false)) if false < studies else 1.0


def main() -> None:
    """Simulate every cell of the grid, once per standard deviation between seeds."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("studies", type=int, nargs="?", help=f"of a cell; default: {STUDIES}")
    given = record.begin(parser)
    grid = [*itertools.product(SEEDS, ITEMS, INTERACTIONS, KINDS, SEED_SDS)]
    grid = grid[:2] if given.smallest else grid
    studies = given.studies or (50 if given.smallest else STUDIES)
    generator = np.random.default_rng(0)
    figures, bounds = [], []
    for seeds, items, interaction, kind, seed_sd in grid:
        false = of_these = 0
        for some in in_portions(studies):
            drawn = differences(generator, some, seeds, items, interaction, seed_sd, kind)
            for study in drawn:
                p = crossed(study, ALPHA).p
                by_seed = paired(study.mean(axis=1).tolist(), ALPHA).p
                false += p is not None and p < ALPHA
                of_these += by_seed is not None and by_seed < ALPHA
        bounds.append(upper_bound(false, studies, len(grid)))
        name = f"{kind}, {seeds} seeds, {items} items, interaction {interaction:g}, "
        name += f"seeds' SD {seed_sd:g}: false"
        beside = ("t over seeds", of_these / studies)
        figures.append(record.figure(name, false / studies, "frac", record.Better.LOWER, beside))
    highest = max(bounds)
    figures.append(
        record.figure("highest upper bound of a cell", highest, "frac", record.Better.LOWER)
    )
    record.finish(QUESTION, figures, given)


if __name__ == "__main__":
    main()
