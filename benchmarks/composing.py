"""Time to compose the cells of a sweep, compared with Hydra's own compose API.

    python benchmarks/composing.py

Both compose the same overrides in one process, in turns, and each returns the whole configuration
with Hydra's own node.
"""

from __future__ import annotations

import itertools
import time

import record
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from mens_exp.config.compose import VERSION_BASE, compose, prepare_hydra
from mens_exp.config.option_files import config_directory, primary_config

QUESTION = "How long does it take to compose one cell of a sweep?"
ROUNDS = 5
CELLS = [
    [f"lora.r={rank}", f"optim.lr={rate}", f"seed={seed}", f"quant.double_quant={double}"]
    for rank, rate, seed, double in itertools.product(
        (4, 8), (1e-4, 3e-4), (1, 2, 3), (True, False)
    )
]


def main() -> None:
    """Measure in turns, so that load on the machine affects both."""
    given = record.begin(record.command_line(__file__, __doc__))
    cells, rounds = (CELLS[:1], 1) if given.smallest else (CELLS, ROUNDS)
    theirs, ours = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        of_hydra(cells)
        between = time.perf_counter()
        compose(cells)
        theirs.append(1000 * (between - began) / len(cells))
        ours.append(1000 * (time.perf_counter() - between) / len(cells))
    cell = record.figure("one cell", ours, "ms", record.Better.LOWER, ("Hydra's compose", theirs))
    record.finish(QUESTION, [cell], given)


def of_hydra(cells: list[list[str]]) -> None:
    """Compose each cell with Hydra's compose API."""
    prepare_hydra()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_directory()), version_base=VERSION_BASE):
        for cell in cells:
            hydra_compose(primary_config(), cell, return_hydra_config=True)


if __name__ == "__main__":
    main()
