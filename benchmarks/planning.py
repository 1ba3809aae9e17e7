"""Wall time of `task=plan`, in fresh processes: the default command and a small run beside it.

    python benchmarks/planning.py

Prints seconds from start to exit, the median of five, and what the interpreter alone takes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time

ROUNDS = 5


def seconds(command: list[str], directory: str) -> float:
    """Time one process."""
    began = time.perf_counter()
    subprocess.run(  # noqa: S603  # our own interpreter
        [sys.executable, *command], cwd=directory, check=True, capture_output=True
    )
    return time.perf_counter() - began


def main() -> None:
    """Measure in turns, so that a busy moment falls on all."""
    commands = {
        "python alone": ["-c", "pass"],
        "task=plan": ["-m", "mens_exp", "task=plan"],
        "task=plan model=llama3_8b": ["-m", "mens_exp", "task=plan", "model=llama3_8b"],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(ROUNDS):
            for name, command in commands.items():
                taken[name].append(seconds(command, directory))
    for name, times in taken.items():
        print(
            f"{name:<28}{statistics.median(times):6.2f} s   ({min(times):.2f} to {max(times):.2f})"
        )


if __name__ == "__main__":
    main()
