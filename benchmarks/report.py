"""Wall time of experiment=smoke, and of drawing the report of its run.

    python benchmarks/report.py [--pairs 5] [--against DIRECTORY]

`--against` names a checkout of another commit; the two then run in pairs whose order alternates, in
fresh processes that differ in nothing but the code, and the other commit is the reference. Without
it the reference is to import the libraries alone. Both run once before anything is timed, so that
rows and weights are cached. A report is drawn again in this process, from the last run's records;
its reference is that whole run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import record
from processes import timed

import mens_exp
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.report.write import write_report

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable

    from processes import Took

QUESTION = "How long does experiment=smoke take, and how much of that is its report?"
PAIRS, DRAWN = 5, 5
LIBRARIES = "import bitsandbytes, lightning, peft, torch, transformers"
SMALLEST = ("data=synthetic", "data.rows=40", "data.seq_len=1024", "trainer.max_steps=1")
LOWER = record.Better.LOWER


def main() -> None:
    """Run in pairs, then time the report."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("--pairs", type=int, help=f"default: {PAIRS}")
    parser.add_argument("--against", type=Path, metavar="DIRECTORY", help="another checkout")
    given = record.begin(parser)
    pairs = given.pairs or (1 if given.smallest else PAIRS)
    overrides = SMALLEST if given.smallest else ()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        reference = "importing the libraries"
        arms: dict[str, Callable[[], Took]]
        if given.against is None:
            arms = {
                "ours": smoke(place / "ours", overrides, None),
                reference: lambda: timed(["-c", LIBRARIES], cwd=place),
            }
        else:
            theirs, reference = checkout(parser, given.against)
            ours = Path(mens_exp.__file__).parents[1]
            arms = {
                "ours": smoke(place / "ours", overrides, ours),
                reference: smoke(place / "theirs", overrides, theirs),
            }
        if not given.smallest:
            for run in arms.values():
                run()
        took: dict[str, list[Took]] = {name: [] for name in arms}
        for pair in range(pairs):
            for name in list(arms)[:: 1 if pair % 2 == 0 else -1]:
                took[name].append(arms[name]())
        drawn = drawing(RunDir(place / "ours"), 1 if given.smallest else DRAWN)
    whole = [one.seconds for one in took["ours"]]
    figures = [record.figure("drawing its report", drawn, "s", LOWER, ("the whole run", whole[-1]))]
    for name, field in (("", "seconds"), (", processor time", "cpu_seconds")):
        ours_s, others_s = ([getattr(one, field) for one in took[arm]] for arm in arms)
        beside = (reference, others_s)
        figures.append(record.figure(f"experiment=smoke{name}", ours_s, "s", LOWER, beside))
    record.finish(QUESTION, figures, given)


def smoke(run: Path, overrides: tuple[str, ...], source: Path | None) -> Callable[[], Took]:
    """Return a function that runs experiment=smoke from scratch in one directory."""
    command = ["-m", "mens_exp", "experiment=smoke", *overrides, f"hydra.run.dir={run}"]

    def once() -> Took:
        shutil.rmtree(run, ignore_errors=True)
        return timed(command, cwd=run.parent, source=source)

    return once


def checkout(parser: ArgumentParser, directory: Path) -> tuple[Path, str]:
    """Return the source directory of another checkout, and a name with its commit."""
    source = directory.resolve() / "src"
    if not (source / "mens_exp" / "__main__.py").is_file():
        parser.error(f"--against must name a checkout of mens_exp (got {directory})")
    done = subprocess.run(  # noqa: S603  # fixed arguments
        ["git", "-C", str(source), "rev-parse", "HEAD"],  # noqa: S607  # the user's git
        env={name: text for name, text in os.environ.items() if not name.startswith("GIT_")},
        capture_output=True,
        text=True,
        check=True,
    )
    return source, f"commit {done.stdout.strip()}"


def drawing(run: RunDir, rounds: int) -> list[float]:
    """Return the seconds to render a report, without imports."""
    write_report(run)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        write_report(run)
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
