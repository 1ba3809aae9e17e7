"""Time to compose the cells of a sweep, beside Hydra's own compose API on the same overrides.

    python benchmarks/composing.py

Prints milliseconds a cell, the median of five turns each, and their ratio; both run in one
process, in turns, each with what Hydra hands out: the whole configuration with its own node.
"""

from __future__ import annotations

import itertools
import statistics
import time

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from mens_exp.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    compose,
    config_directory,
    prepare_hydra,
)

ROUNDS = 5
CELLS = [
    [f"lora.r={rank}", f"optim.lr={rate}", f"seed={seed}", f"quant.double_quant={double}"]
    for rank, rate, seed, double in itertools.product(
        (4, 8), (1e-4, 3e-4), (1, 2, 3), (True, False)
    )
]


def of_hydra() -> None:
    """Compose each cell as Hydra does."""
    prepare_hydra()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_directory()), version_base=VERSION_BASE):
        for cell in CELLS:
            hydra_compose(CONFIG_NAME, cell, return_hydra_config=True)


def main() -> None:
    """Measure in turns, so that a busy moment falls on both."""
    ways = {"Hydra's compose": of_hydra, "mens_exp": lambda: compose(CELLS)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            taken[name].append((time.perf_counter() - began) / len(CELLS))
    theirs, ours = (statistics.median(times) for times in taken.values())
    for name, seconds in zip(taken, (theirs, ours), strict=True):
        print(f"{name:<16}{seconds * 1000:8.1f} ms a cell, {len(CELLS)} cells")
    print(f"{'ratio':<16}{theirs / ours:8.1f}")


if __name__ == "__main__":
    main()
