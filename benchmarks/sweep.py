"""What the local launcher of sweeps costs, and whether a sweep survives its processes' deaths.

    python benchmarks/sweep.py overhead [--pairs 3] [--steps 60]
    python benchmarks/sweep.py kill [--jobs 24] [--job-kills 10] [--launcher-kills 3] [--seed 0]

`overhead` runs the same two jobs by hand, one after the other, and as a sweep, in pairs whose order
alternates, and prints the seconds of each, and their processor time. The sweep's own start-up,
until its first job begins, is told apart.
`kill` runs one sweep undisturbed and one whose jobs and launcher are killed at random moments,
resumes it until nothing is left, and compares the adapters byte for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROWS = 60
SMALL = [
    *("model=tiny_llama", "trainer=cpu", "logger=none", "suite=none", "data=jsonl"),
    *("schedule=constant", "schedule.warmup_steps=0", "data.seq_len=192", "optim.lr=1e-3"),
    *("data.val_frac=0.1", "data.heldout_frac=0.1", "checkpoint.every_n_steps=2"),
]
MENS = [sys.executable, "-m", "mens_exp"]


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["overhead", "kill"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--job-kills", type=int, default=10)
    parser.add_argument("--launcher-kills", type=int, default=3)
    parser.add_argument("--n-jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        rows = place / "rows.jsonl"
        made = [
            {"prompt": f"Add {n}.", "response": f"def a(x):\n    return x + {n}\n"}
            for n in range(ROWS)
        ]
        rows.write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")
        if given.what == "overhead":
            overhead(place, given.pairs, given.steps or 60)
        else:
            kill(place, given, given.steps or 4)


def overhead(place: Path, pairs: int, steps: int) -> None:
    """Time the same jobs by hand and as a sweep, in turns."""
    by_hand, swept, startups = [], [], []
    worked: dict[Any, list[float]] = {_by_hand: [], _swept: []}
    for pair in range(pairs):
        order = [_by_hand, _swept] if pair % 2 == 0 else [_swept, _by_hand]
        for one in order:
            where = place / f"{one.__name__}_{pair}"
            began, before = time.time(), _processor_s()
            one(place, where, steps)
            taken = time.time() - began
            worked[one].append(_processor_s() - before)
            (by_hand if one is _by_hand else swept).append(taken)
            if one is _swept:
                startups.append(_first_start(where) - began)
        print(
            f"pair {pair}: by hand {by_hand[-1]:.1f} s, as a sweep {swept[-1]:.1f} s, of which "
            f"{startups[-1]:.1f} s before the first job"
        )
    rest = [s - u - h for s, u, h in zip(swept, startups, by_hand, strict=True)]
    share = statistics.median(rest) / statistics.median(by_hand)
    print(
        f"median: start-up {statistics.median(startups):.1f} s; beyond it {share:+.1%} of the jobs"
    )
    hand_s, sweep_s = (statistics.median(worked[one]) for one in (_by_hand, _swept))
    print(
        f"processor time, which a busy machine leaves alone: by hand {hand_s:.1f} s, "
        f"as a sweep {sweep_s:.1f} s, start-up included"
    )


def _processor_s() -> float:
    """Return the processor time of all processes that were waited for, and of theirs."""
    spent = os.times()
    return spent.children_user + spent.children_system


def _command(place: Path, steps: int, *more: str) -> list[str]:
    return [*MENS, *more, *SMALL, f"data.path={place / 'rows.jsonl'}", f"trainer.max_steps={steps}"]


def _by_hand(place: Path, where: Path, steps: int) -> None:
    for seed in (1, 2):
        command = [*_command(place, steps), f"seed={seed}", f"hydra.run.dir={where}/{seed}"]
        _quiet(command)


def _swept(place: Path, where: Path, steps: int) -> None:
    _quiet([*_command(place, steps, "-m"), "seed=1,2", f"hydra.sweep.dir={where}"])


def _quiet(command: list[str], **more: Any) -> None:
    subprocess.run(command, check=True, capture_output=True, **more)  # noqa: S603  # our own


def _first_start(sweep: Path) -> float:
    times = [one["started_utc"] for job in _record(sweep)["jobs"] for one in job["attempts"]]
    return datetime.fromisoformat(min(times)).timestamp()


def _record(sweep: Path) -> dict[str, Any]:
    return dict(json.loads((sweep / "sweep.json").read_text("utf-8")))


def kill(place: Path, given: argparse.Namespace, steps: int) -> None:
    """Disturb a sweep, resume it, and hold it against one that ran through."""
    seeds = ",".join(map(str, range(given.jobs)))
    command = [*_command(place, steps, "-m"), f"seed={seeds}"]
    command.append(f"hydra.launcher.n_jobs={given.n_jobs}")
    began = time.time()
    _quiet([*command, f"hydra.sweep.dir={place}/whole"])
    print(f"undisturbed: {time.time() - began:.0f} s", flush=True)
    torn, draw = place / "torn", random.Random(given.seed)  # noqa: S311  # no secret
    kills = ["job"] * given.job_kills + ["launcher"] * given.launcher_kills
    draw.shuffle(kills)
    done, launches, began = [], 0, time.time()
    while launches == 0 or _unfinished(torn):
        again = [*MENS, f"sweep.resume={torn}"]
        launches += 1
        with (place / "launcher.log").open("ab") as log:
            launcher = subprocess.Popen(  # noqa: S603  # our own
                again if (torn / "sweep.json").exists() else [*command, f"hydra.sweep.dir={torn}"],
                stdout=log,
                stderr=log,
            )
        while launcher.poll() is None:
            time.sleep(draw.uniform(1, 8))
            if kills and (torn / "sweep.json").exists() and _killed(torn, launcher, kills[0], draw):
                done.append(kills.pop(0))
        if launches > given.jobs:
            break
    print(f"disturbed: {time.time() - began:.0f} s, {launches} launches, killed {done}")
    states = [job["state"] for job in _record(torn)["jobs"]]
    whole, again_made = _adapters(place / "whole"), _adapters(torn)
    print(f"{states.count('succeeded')} of {len(states)} done; not killed as planned: {kills}")
    print(f"adapters byte-identical: {whole == again_made} ({len(whole)} files)")
    if kills or whole != again_made or states.count("succeeded") != given.jobs:
        print((place / "launcher.log").read_text("utf-8")[-6000:])
        sys.exit(1)


def _unfinished(sweep: Path) -> bool:
    return any(job["state"] != "succeeded" for job in _record(sweep)["jobs"])


def _killed(sweep: Path, launcher: subprocess.Popen[bytes], what: str, draw: random.Random) -> bool:
    """Kill a process with signal 9; tell whether there was one."""
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
    """Hash what every job made, by its path in the sweep."""
    files = sorted(sweep.glob("*/adapter/**/*.safetensors"))
    return {
        path.relative_to(sweep).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


if __name__ == "__main__":
    main()
