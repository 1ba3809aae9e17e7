"""Wall time of the commands that answer at once, each in a fresh process, from start to exit.

    python benchmarks/planning.py

`--cfg job` composes the configuration and prints it, so it is the reference of the others; its own
is an interpreter that does nothing. `--help` should take at most 1.2 times as long.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import record
from processes import timed

QUESTION = "How long do --help, --cfg job and task=plan take to answer?"
ROUNDS = 5
ALONE, COMPOSE = "python alone", "--cfg job"
COMMANDS = {
    ALONE: ["-c", "pass"],
    COMPOSE: ["-m", "mens_exp", "--cfg", "job"],
    "--help": ["-m", "mens_exp", "--help"],
    "task=plan": ["-m", "mens_exp", "task=plan"],
    "task=plan model=llama3_8b": ["-m", "mens_exp", "task=plan", "model=llama3_8b"],
}


def main() -> None:
    """Measure in turns, so that load on the machine affects all."""
    given = record.begin(record.command_line(__file__, __doc__))
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(1 if given.smallest else ROUNDS):
            for name, command in COMMANDS.items():
                taken[name].append(timed(command, cwd=Path(directory)).seconds)
    beside = dict.fromkeys(COMMANDS, COMPOSE) | {COMPOSE: ALONE}
    figures = [
        record.figure(name, times, "s", record.Better.LOWER, (beside[name], taken[beside[name]]))
        for name, times in taken.items()
        if name != ALONE
    ]
    record.finish(QUESTION, figures, given)


if __name__ == "__main__":
    main()
