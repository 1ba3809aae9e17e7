"""The cost of the local launcher of sweeps, and a sweep's survival of its processes' deaths.

    python benchmarks/sweep.py overhead [--pairs 3] [--steps 60]
    python benchmarks/sweep.py kill [--jobs 24] [--job-kills 10] [--launcher-kills 3] [--seed 0]

Without a word, both. `overhead` runs the same two jobs (one with --smallest) by hand, one after the
other, and as a sweep, in pairs whose order alternates; by hand is the reference. The sweep's own
start-up, until its first job begins, is measured apart. `kill` runs one sweep undisturbed, which is
the reference, and one whose jobs and launcher are killed at random moments, resumes it until
nothing is left, and compares the adapters byte for byte. It fails unless all are there and equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import record
from processes import timed

from mens_exp.artifacts.host import spawn_python

if TYPE_CHECKING:
    import argparse
    import subprocess
    from collections.abc import Iterator

QUESTION = "What does the launcher of sweeps cost, and what survives when its processes are killed?"
ROWS = 60
SMALL = (
    *(
        "model=tiny_llama",
        "trainer=cpu",
        "logger=none",
        "suite=none",
        "suite.items=0",
        "data=jsonl",
    ),
    *("schedule=constant", "schedule.warmup_steps=0", "data.seq_len=192", "optim.lr=1e-3"),
    *("data.val_frac=0.1", "data.heldout_frac=0.1", "checkpoint.every_n_steps=2"),
)
SMALLEST = {"pairs": 1, "jobs": 1, "job_kills": 1, "launcher_kills": 1, "steps": 2}
DEFAULTS = {"pairs": 3, "jobs": 24, "job_kills": 10, "launcher_kills": 3}
STEPS = {"overhead": 60, "kill": 4}
HIGHER, LOWER = record.Better.HIGHER, record.Better.LOWER


def main() -> None:
    """Parse the command line and measure."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("what", choices=["overhead", "kill", "both"], nargs="?", default="both")
    for name, default in DEFAULTS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help=f"default: {default}")
    parser.add_argument("--steps", type=int, help="of each job; default: 60 (overhead), 4 (kill)")
    parser.add_argument("--n-jobs", type=int, default=2, help="at a time (kill)")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    given = record.begin(parser)
    for name, default in (SMALLEST if given.smallest else DEFAULTS).items():
        if getattr(given, name) is None:
            setattr(given, name, default)
    figures: list[record.Figure] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        made = [
            {"prompt": f"Add {n}.", "response": f"def a(x):\n    return x + {n}\n"}
            for n in range(ROWS)
        ]
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")
        if given.what != "kill":
            seeds = (1,) if given.smallest else (1, 2)
            steps = given.steps or STEPS["overhead"]
            figures += overhead(place, given.pairs, steps, seeds)
        if given.what != "overhead":
            figures += kill(place, given, given.steps or STEPS["kill"])
    record.finish(QUESTION, figures, given)


def overhead(
    place: Path, pairs: int, steps: int, seeds: tuple[int, ...]
) -> Iterator[record.Figure]:
    """Time the same jobs, one per seed, run manually and as a sweep, in turns."""
    took: dict[str, list[tuple[float, float]]] = {"by hand": [], "as a sweep": []}
    startups = []
    for pair in range(pairs):
        for way in list(took)[:: 1 if pair % 2 == 0 else -1]:
            where = place / f"{way.replace(' ', '_')}_{pair}"
            began = time.time()
            commands = _commands(place, where, steps, seeds, as_sweep=way == "as a sweep")
            done = [timed(command) for command in commands]
            took[way].append(
                (sum(one.seconds for one in done), sum(one.cpu_seconds for one in done))
            )
            if way == "as a sweep":
                startups.append(_first_start(where) - began)
    (hand, hand_cpu), (swept, swept_cpu) = (
        ([one[0] for one in each], [one[1] for one in each]) for each in took.values()
    )
    beyond = [whole - startup for whole, startup in zip(swept, startups, strict=True)]
    by_hand = ("the same jobs by hand", hand)
    by_hand_cpu = ("the same jobs by hand", hand_cpu)
    yield record.figure(f"{len(seeds)} jobs as a sweep", swept, "s", LOWER, by_hand)
    yield record.figure("its start-up, before the first job", startups, "s", LOWER, by_hand)
    yield record.figure("the sweep beyond its start-up", beyond, "s", LOWER, by_hand)
    yield record.figure("its processor time", swept_cpu, "s", LOWER, by_hand_cpu)


def _commands(
    place: Path, where: Path, steps: int, seeds: tuple[int, ...], *, as_sweep: bool
) -> list[list[str]]:
    """Return the commands that run a job per seed: one for a sweep, otherwise one per seed."""
    if as_sweep:
        values = ",".join(map(str, seeds))
        return [[*_command(place, steps, "-m"), f"seed={values}", f"hydra.sweep.dir={where}"]]
    return [
        [*_command(place, steps), f"seed={seed}", f"hydra.run.dir={where}/{seed}"] for seed in seeds
    ]


def _command(place: Path, steps: int, *more: str) -> list[str]:
    rows = f"data.path={place / 'rows.jsonl'}"
    return ["-m", "mens_exp", *more, *SMALL, rows, f"trainer.max_steps={steps}"]


def _first_start(sweep: Path) -> float:
    times = [one["started_utc"] for job in _record(sweep)["jobs"] for one in job["attempts"]]
    return datetime.fromisoformat(min(times)).timestamp()


def _record(sweep: Path) -> dict[str, Any]:
    return dict(json.loads((sweep / "sweep.json").read_text("utf-8")))


def kill(place: Path, given: argparse.Namespace, steps: int) -> Iterator[record.Figure]:
    """Kill processes of a sweep, resume it, and compare it with an undisturbed one."""
    seeds = ",".join(map(str, range(given.jobs)))
    command = [*_command(place, steps, "-m"), f"seed={seeds}"]
    command.append(f"hydra.launcher.n_jobs={given.n_jobs}")
    undisturbed = timed([*command, f"hydra.sweep.dir={place}/whole"]).seconds
    torn, log = place / "torn", place / "launcher.log"
    began = time.perf_counter()
    launches, left = _disturbed([*command, f"hydra.sweep.dir={torn}"], torn, log, given)
    disturbed = time.perf_counter() - began
    states = [job["state"] for job in _record(torn)["jobs"]]
    whole, again = _adapters(place / "whole"), _adapters(torn)
    equal = sum(again.get(path) == digest for path, digest in whole.items())
    done = states.count("succeeded")
    if left or done < given.jobs or not whole or equal < len(whole):
        sys.exit(
            f"{log.read_text('utf-8')[-6000:]}\n{done} of {given.jobs} jobs succeeded, {equal} of "
            f"{len(whole)} adapter files are equal, kills that found no process: {left}"
        )
    beside = ("the same sweep undisturbed", undisturbed)
    kills = given.job_kills + given.launcher_kills
    yield record.figure(f"a sweep with {kills} kills", disturbed, "s", LOWER, beside)
    yield record.figure("launches until it was done", launches, "launches", LOWER)
    yield record.figure("jobs that succeeded", done / given.jobs, "frac", HIGHER)
    yield record.figure("adapters equal byte for byte", equal / len(whole), "frac", HIGHER)


def _disturbed(
    command: list[str], torn: Path, log: Path, given: argparse.Namespace
) -> tuple[int, list[str]]:
    """Launch a sweep and resume it until it is done, killing processes at random moments.

    Returns:
        The number of launches, and the planned kills that did not happen.
    """
    draw = random.Random(given.seed)  # noqa: S311  # no secret
    kills = ["job"] * given.job_kills + ["launcher"] * given.launcher_kills
    draw.shuffle(kills)
    pause_s = (0.1, 0.4) if given.smallest else (1, 8)
    launches = 0
    while launches == 0 or (_unfinished(torn) and launches <= given.jobs + given.launcher_kills):
        is_there = (torn / "sweep.json").exists()
        launches += 1
        with log.open("ab") as output:
            again = ["-m", "mens_exp", f"sweep.resume={torn}"] if is_there else command
            launcher = spawn_python(again, output=output)
        try:
            while launcher.poll() is None:
                time.sleep(draw.uniform(*pause_s))
                is_there = (torn / "sweep.json").exists()
                if kills and is_there and _killed(torn, launcher, kills[0], draw):
                    kills.pop(0)
        finally:
            launcher.kill()
            launcher.wait()
    return launches, kills


def _unfinished(sweep: Path) -> bool:
    return any(job["state"] != "succeeded" for job in _record(sweep)["jobs"])


def _killed(sweep: Path, launcher: subprocess.Popen[bytes], what: str, draw: random.Random) -> bool:
    """Kill a process with SIGKILL; return whether there was one."""
    if what == "launcher":
        launcher.kill()
        launcher.wait()
        return True
    running = [
        job["attempts"][-1]["pid"] for job in _record(sweep)["jobs"] if job["state"] == "running"
    ]
    if not running:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice(running), signal.SIGKILL)
        return True
    return False


def _adapters(sweep: Path) -> dict[str, str]:
    """Hash the adapter of every job, by its path in the sweep."""
    files = sorted(sweep.glob("*/adapter/**/*.safetensors"))
    return {
        path.relative_to(sweep).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


if __name__ == "__main__":
    main()
