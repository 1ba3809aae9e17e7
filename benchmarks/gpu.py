"""Measurements of one CUDA machine: our GPU tests, an 8B QLoRA step beside TRL and Unsloth, NCCL.

    python benchmarks/gpu.py [slice …]
    python benchmarks/gpu.py --dry

It needs no network. It runs the slices that are not done yet, one after another, and ends within
``--minutes``. Each slice writes its result at once to ``gpu.json`` and ``gpu.md`` in ``--results``;
the same command goes on where the last one stopped, and ``--again`` measures anew. What the machine
lacks is named in the result and left out. ``--dry`` runs the same lines on the CPU with tiny
shapes, and writes ``gpu_dry.json`` and ``gpu_dry.md``, whose figures mean nothing.

The step of an 8B model is taken by mens_exp, by TRL and by Unsloth, each in a process of its own
(gpu_arms.py), in turns. The weights are random and drawn on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import record
from gpu_results import SLICES, Card, Found, GpuResults, Slice, State, drawn, state_of
from gpu_slices import WORK, Job
from record import Size

from mens_exp.artifacts import atomic
from mens_exp.errors import MensError

RESULTS = Path(__file__).parents[1] / "outputs" / "gpu"
MINUTES = 8.0
LEAST_S = 150  # minimum time to start a slice; loading 8B takes about a minute
PEERS = ("trl", "unsloth")


def main() -> None:
    """Run the unfinished slices."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # with its processes
    parser = command_line()
    given = checked(parser)
    end = time.monotonic() + 60 * given.minutes
    device = "cpu" if given.dry else "cuda"
    path = Path(given.results) / f"{'gpu_dry' if given.dry else 'gpu'}.json"
    size = Size.SMALLEST if given.dry else Size.FULL
    try:
        slices = GpuResults.read(path).slices if path.exists() else {}
    except MensError as error:
        parser.error(str(error))
    results = GpuResults(size=size, slices=slices)
    for name in given.slices or SLICES:
        earlier = None if given.again else results.slices.get(name)
        if earlier and earlier["state"] == State.DONE:
            print(f"{name}: done already; --again measures it anew")
            continue
        if end - time.monotonic() < (0 if given.dry else LEAST_S):
            continue
        results.slices[name] = measured(name, given, device, end, earlier)
        results.write(path)
        atomic.write_text(path.with_suffix(".md"), drawn(results))
        print(_told(name, results.slices[name]), flush=True)
    left = [
        name
        for name in given.slices or SLICES
        if name not in results.slices or results.slices[name]["state"] == State.STOPPED
    ]
    again = f"run the command again for {', '.join(left)}" if left else "nothing is left"
    print(f"\nResults: {path.with_suffix('.md')}; {again}")


def command_line() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("slices", nargs="*", metavar="slice", help=f"of {', '.join(SLICES)}")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, a minute or so")
    parser.add_argument("--again", action="store_true", help="measure anew what is done")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="limit of this call (default: %(default)g)"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIRECTORY", help="default: outputs/gpu"
    )
    parser.add_argument("--commit", help="40 digits, where the code is no git checkout")
    parser.add_argument("--note", default="", help="what a reader should know of this run")
    return parser


def checked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; exit if a slice is unknown."""
    given = parser.parse_args()
    unknown = [name for name in given.slices if name not in SLICES]
    if unknown:
        parser.error(f"slice must be one of {', '.join(SLICES)} (got {', '.join(unknown)})")
    if given.minutes <= 0:
        parser.error(f"--minutes must be more than 0 (got {given.minutes:g})")
    if given.commit and not re.fullmatch("[0-9a-f]{40}", given.commit):
        parser.error(f"--commit must be 40 hexadecimal digits (got {given.commit})")
    return given


def measured(
    name: str, given: argparse.Namespace, device: str, end: float, earlier: Slice | None
) -> Slice:
    """Run one slice and describe it."""
    words = [name, *(["--dry"] if given.dry else [])]
    command = f"python benchmarks/gpu.py {shlex.join(words)}"
    facts = record.described(command=command, note=given.note)
    if facts["commit"] is None and given.commit:
        facts["commit"] = given.commit
        facts["unknown"].pop("commit", None)
    for peer in PEERS:
        with contextlib.suppress(metadata.PackageNotFoundError):  # the slice gives the reason
            facts["versions"][peer] = metadata.version(peer)
    card, why = look_at_card()
    if card is None:
        facts["unknown"]["card"] = why
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mens_exp_gpu_") as place:
        stopped = earlier if earlier and earlier["state"] == State.STOPPED else None
        job = Job(device=device, end=end, place=Path(place), earlier=stopped, card=card)
        if card is None and not given.dry:
            found = Found(state=State.SKIPPED, reason=why)
        else:
            found = _isolated(name, job)
    return Slice(
        **facts,
        state=found.state,
        reason=found.reason,
        seconds=round(time.monotonic() - began, 1),
        card=card,
        missing=found.missing,
        facts=found.facts,
        tests=found.tests,
        figures=found.figures,
        goals=found.goals,
    )


def _isolated(name: str, job: Job) -> Found:
    """Run a slice; an exception becomes its result, so that the others run."""
    try:
        return WORK[name](job)
    except Exception as error:  # noqa: BLE001  # as the docstring says
        return Found(state=State.FAILED, reason=f"{type(error).__name__}: {error}")


def look_at_card() -> tuple[Card | None, str]:
    """Return the first GPU, or the reason why none can be used."""
    import torch

    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} finds no CUDA device"
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
        asked += ["--format=csv,noheader,nounits", "--id=0"]
        told = subprocess.run(asked, capture_output=True, check=True, text=True, timeout=30)  # noqa: S603  # fixed arguments
        name, driver, mib = told.stdout.strip().split(", ")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, "nvidia-smi does not answer"
    memory = round(int(mib) / 1024, 1)
    card = Card(name=name, driver=driver, memory_gib=memory, cuda=torch.version.cuda)
    return card, ""


def _told(name: str, one: Slice) -> str:
    """Return the terminal line of a slice."""
    lines = [f"\n{name}: {state_of(one)} ({one['seconds']:.0f} s)"]
    lines += [f"{what}: {why}" for what, why in one["missing"].items()]
    if one["figures"]:
        lines.append(record.table(one["figures"]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
