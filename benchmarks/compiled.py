"""Compiled decoder layers compared with eager ones, in one process and in turns.

    python benchmarks/compiled.py [overrides …]

CPU seconds of whole optimizer steps on one thread, and the seconds until all graphs are made. The
arms have different dropout masks of the same share. The rates of `mens_exp.planning.compiling` come
from here.
"""

from __future__ import annotations

import time

import record
import torch
from throughput import SMALLEST, Arm

QUESTION = "What do compiled decoder layers save, and after how long?"
ROUNDS = 8
DROPOUT = 0.05


def main() -> None:
    """Measure both kinds of layers in turns."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("overrides", nargs="*", help="of the main job")
    given = record.begin(parser)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)  # as in training on a CPU
    smallest = (*SMALLEST, "model.num_hidden_layers=1") if given.smallest else ()
    overrides = ["trainer=cpu", *smallest, *given.overrides]
    overrides.append(f"lora.dropout={DROPOUT}")
    arms = {kind: Arm(overrides) for kind in ("eager", "compiled")}
    start = time.perf_counter()
    first = arms["compiled"].stream.batch(0)
    arms["compiled"].backend.compile_layers(first)  # type: ignore[attr-defined]
    compile_s = time.perf_counter() - start
    taken: dict[str, list[float]] = {kind: [] for kind in arms}
    for arm in arms.values():
        arm.step()
    for _ in range(1 if given.smallest else ROUNDS):
        for kind, arm in arms.items():
            began = time.process_time()
            arm.step()
            taken[kind].append(time.process_time() - began)
    lower = record.Better.LOWER
    eager = ("eager layers", taken["eager"])
    figures = [
        record.figure("a step, compiled layers", taken["compiled"], "CPU s", lower, eager),
        record.figure("making the graphs", compile_s, "s", lower),
    ]
    record.finish(QUESTION, figures, given)


if __name__ == "__main__":
    main()
