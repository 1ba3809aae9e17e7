"""The form of benchmark results, and the steps common to all scripts in benchmarks/.

A script creates its parser with `command_line`, adds its own options, parses them with `begin`,
measures, and ends with `finish`, which prints the figures and appends the run to
``<results>/<script>.json``. `Results` reads and writes that file strictly. benchmarks/page.py
generates docs/measured/speed.md from the committed files.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import mens_exp
from mens_exp.artifacts.manifest import utc_now
from mens_exp.artifacts.provenance import collect
from mens_exp.artifacts.record import StoredRecord
from mens_exp.errors import DataError, MensError
from mens_exp.planning.machine import cores, look

if TYPE_CHECKING:
    from collections.abc import Iterator

Measured = float | Sequence[float]

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "lightning", "hydra-core", "mens-exp")
# Widest first: the first one supported determines the speed of matrix products.
INSTRUCTION_SETS = {
    "amx_bf16": "AMX-BF16",
    "avx512_bf16": "AVX512-BF16",
    "avx512f": "AVX512",
    "avx2": "AVX2",
}
MADE_OF_RESULTS = (
    "benchmarks/results",
    "docs/measured/speed.md",
    "docs/measured/scale.md",
)  # not code: they do not affect figures
DIGITS = 6  # significant digits of a figure; no clock here is more precise


class Size(StrEnum):
    """The workload of a run."""

    FULL = "full"
    SMALLEST = "smallest"  # only tests the script; its figures are meaningless


class Better(StrEnum):
    """The direction in which a figure improves."""

    HIGHER = "higher"
    LOWER = "lower"


class Figure(TypedDict):
    """One figure of a run.

    ``value`` is the median of several rounds, with range ``lowest`` to ``highest``. ``reference``
    names a reference measured in the same run, and ``reference_value`` its value. ``ratio`` is the
    value divided by the reference: the median of the rounds' ratios if both were measured in the
    same rounds.
    """

    name: str
    value: float
    unit: str
    better: Better | None
    lowest: float | None
    highest: float | None
    reference: str | None
    reference_value: float | None
    ratio: float | None


class Machine(TypedDict):
    """The machine of a run; ``threads`` is OMP_NUM_THREADS if set, otherwise ``cores``."""

    cpu: str | None
    instruction_set: str | None
    cores: int | None
    threads: int | None
    memory_gib: float | None
    load_1min: float | None
    os: str | None


class Described(TypedDict):
    """The description of a run, without its figures.

    ``utc`` is the start time, and ``machine.load_1min`` the load average at that time. ``unknown``
    gives the reason for every null in ``commit``, ``dirty``, ``machine`` and ``versions`` by dotted
    name. Changes to results files do not make a checkout ``dirty``.
    """

    utc: str
    command: str
    commit: str | None
    dirty: bool | None
    machine: Machine
    versions: dict[str, str | None]
    unknown: dict[str, str]
    note: str


class Run(Described):
    """One run of a script."""

    size: Size
    figures: list[Figure]


@dataclass(kw_only=True, slots=True)
class Results(StoredRecord):
    """The runs of one script, oldest first.

    Attributes:
        format: always ``mens_exp_benchmark``.
        version: version of this layout.
        name: the script's name without suffix.
        question: the question that its figures answer.
        runs: all recorded runs.
    """

    format: str = "mens_exp_benchmark"
    version: int = 1
    name: str
    question: str
    runs: list[Run]

    def problems(self, where: str) -> list[DataError]:
        """Return problems other than wrong types."""
        found = [] if self.runs else [DataError("no run", where=f"{where}: runs")]
        for number, run in enumerate(self.runs):
            found += _problems_of_run(run, f"{where}: runs[{number}]")
        return found


def figure(
    name: str,
    measured: Measured,
    unit: str,
    better: Better | None = None,
    beside: tuple[str, Measured] | None = None,
) -> Figure:
    """Return a figure with its median, its range and its ratio to a reference.

    Args:
        name: unique in the run, and the same in every run of the same command.
        measured: one value, or one per round.
        unit: such as ``s`` or ``tokens/s``; ``frac`` is a fraction.
        better: the direction in which it improves; None if neither is better.
        beside: name and measurement of the reference, from the same run. There is no ratio to a
            reference of 0.
    """
    values = _rounds(measured)
    reference, against = beside or (None, ())
    others = _rounds(against)
    ratio = None
    if others and statistics.median(others):
        paired = len(values) == len(others) and all(others)
        ratio = (
            statistics.median(one / other for one, other in zip(values, others, strict=True))
            if paired
            else statistics.median(values) / statistics.median(others)
        )
    return Figure(
        name=name,
        value=_rounded(statistics.median(values)),
        unit=unit,
        better=better,
        lowest=_rounded(min(values)) if len(values) > 1 else None,
        highest=_rounded(max(values)) if len(values) > 1 else None,
        reference=reference,
        reference_value=_rounded(statistics.median(others)) if others else None,
        ratio=None if ratio is None else _rounded(ratio),
    )


def command_line(script: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options common to all scripts.

    Args:
        script: the script's ``__file__``.
        description: its docstring.
    """
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/{Path(script).name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="do seconds of work, to see that the script works; the figures mean nothing",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIRECTORY",
        help="directory whose <script>.json gets the run (default: benchmarks/results)",
    )
    parser.add_argument(
        "--note", default="", help="what else a reader of the figures should know of this run"
    )
    parser.set_defaults(script=Path(script).stem)
    return parser


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and describe machine and code before the measurement.

    A results file that cannot be appended to ends the script here, not after its work.
    """
    given = parser.parse_args()
    try:
        _earlier(given)
        given.results.mkdir(parents=True, exist_ok=True)
    except (MensError, OSError) as error:
        parser.error(str(error))
    command = f"{parser.prog} {shlex.join(_public(sys.argv[1:]))}".rstrip()
    given.described = described(command=command, note=given.note)
    return given


def finish(question: str, figures: Sequence[Figure], given: argparse.Namespace) -> None:
    """Print the figures, and append the run to its file.

    Args:
        question: the question that the figures answer.
        figures: at least one.
        given: the result of `begin`.

    Raises:
        MensError: a figure is not finite, or two have the same name; nothing is written.
    """
    print(table(figures))
    facts: Described = given.described
    size = Size.SMALLEST if given.smallest else Size.FULL
    run = Run(**facts, size=size, figures=list(figures))
    Results(name=given.script, question=question, runs=[*_earlier(given), run]).write(_file(given))
    print(f"\nAdded to {_file(given)}")


def described(*, command: str, note: str) -> Described:
    """Describe a run that starts now."""
    facts = collect(Path(__file__).parent)
    processor, host = facts["cpu"], look("cpu")
    flags = processor["flags"]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    machine = Machine(
        cpu=processor["model"],
        instruction_set=next(
            (name for flag, name in INSTRUCTION_SETS.items() if flag in (flags or ())), None
        ),
        cores=cores(),
        threads=_threads(),
        memory_gib=None if host.total_bytes is None else round(host.total_bytes / 2**30, 1),
        load_1min=None if load is None else round(load, 2),
        os=f"{platform.system()} {platform.release()}",
    )
    versions = {"python": facts["python"]}
    versions |= {
        name.replace("mens-exp", "mens_exp"): facts["packages"].get(name) for name in PACKAGES
    }
    described: dict[str, Any] = {
        "utc": utc_now(),
        "command": command,
        "commit": facts["commit"],
        "dirty": facts["dirty"] and _has_changed_code(),
        "machine": machine,
        "versions": versions,
        "note": note,
    }
    reasons = {
        "commit": "the code is no git checkout",
        "dirty": "the code is no git checkout",
        "machine.cpu": "the system does not name the processor",
        "machine.instruction_set": "the processor lists none of " + ", ".join(INSTRUCTION_SETS),
        "machine.load_1min": "the system keeps no load average",
    }
    reasons |= {f"versions.{name}": "not installed" for name in versions}
    unknown = {name: reasons.get(name, "the system does not say") for name in _nulls(described)}
    return cast("Described", {**described, "unknown": unknown})


def table(figures: Sequence[Figure]) -> str:
    """Return figures as text, one per line."""
    rows = []
    for one in figures:
        spread = ratio = ""
        if one["lowest"] is not None:
            spread = f"{shown(one['lowest'])} to {shown(one['highest'])}"
        if one["reference"] is not None:
            ratio = "no ratio to" if one["ratio"] is None else f"{shown(one['ratio'])} ×"
            ratio += f" {one['reference']} ({shown(one['reference_value'])})"
        rows.append((one["name"], shown(one["value"]), one["unit"], spread, ratio))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{name:<{widths[0]}}  {value:>{widths[1]}} {unit:<{widths[2]}}  "
        f"{spread:<{widths[3]}}  {ratio}".rstrip()
        for name, value, unit, spread, ratio in rows
    )


def shown(value: float | None) -> str:
    """Format a number with three significant digits, or all integer digits."""
    if value is None:
        return "unknown"
    if float(value).is_integer() or abs(value) >= 1000:  # noqa: PLR2004  # beyond three digits
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _file(given: argparse.Namespace) -> Path:
    return Path(given.results) / f"{given.script}.json"


def _earlier(given: argparse.Namespace) -> list[Run]:
    path = _file(given)
    return Results.read(path).runs if path.exists() else []


def _public(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments that affect the measurement, without paths of this machine."""
    words = iter(arguments)
    for word in words:
        option, _, value = word.partition("=")
        if option in {"--results", "--note"}:
            if not value:
                next(words, None)
        else:
            yield re.sub(r"(?:^|(?<==))[~/].*", "PATH", word)


def _threads() -> int:
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() else cores()


def _has_changed_code() -> bool:
    """Return whether anything but results has changed since the commit of the running code."""
    package = str(Path(mens_exp.__file__).parent)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    excluded = [f":(top,exclude){place}" for place in MADE_OF_RESULTS]
    done = subprocess.run(  # noqa: S603  # fixed arguments
        ["git", "-C", package, "status", "--porcelain", "--", ":/", *excluded],  # noqa: S607  # the user's git
        env=environment | {"GIT_OPTIONAL_LOCKS": "0"},
        capture_output=True,
        check=True,
    )
    return bool(done.stdout)


def _rounds(measured: Measured) -> list[float]:
    return [*measured] if isinstance(measured, Sequence) else [measured]


def _rounded(value: float) -> float:
    return int(value) if float(value).is_integer() else float(f"{value:.{DIGITS}g}")


def _nulls(run: dict[str, Any]) -> list[str]:
    """Return the dotted names of null values in a run, except in its figures."""
    found = [name for name in ("commit", "dirty") if run[name] is None]
    for part in ("machine", "versions"):
        found += [f"{part}.{name}" for name, value in run[part].items() if value is None]
    return found


def _problems_of_run(run: Run, where: str) -> Iterator[DataError]:
    """Yield the problems of a run with valid types."""
    if run["commit"] is not None and not re.fullmatch("[0-9a-f]{40}", run["commit"]):
        yield _wrong(f"{where}.commit", run["commit"], "40 hexadecimal digits")
    nulls = set(_nulls({**run}))
    for name in sorted(nulls ^ set(run["unknown"])):
        expected = "a reason for each null, and for nothing else"
        yield _wrong(f"{where}.unknown", name, expected)
    if not run["figures"]:
        yield DataError("no figure", where=f"{where}.figures")
    counted = Counter(one["name"] for one in run["figures"])
    for name in (name for name, count in counted.items() if count > 1):
        yield _wrong(f"{where}.figures", name, "a name of its own for each figure")
    for number, one in enumerate(run["figures"]):
        yield from _problems_of_figure(one, f"{where}.figures[{number}]")


def _problems_of_figure(one: Figure, where: str) -> Iterator[DataError]:
    if (one["reference"] is None) != (one["reference_value"] is None):
        yield _wrong(where, one["name"], "reference and reference_value together")
    if (one["ratio"] is not None) != bool(one["reference_value"]):
        yield _wrong(where, one["name"], "a ratio where the reference is not 0, and only there")
    if (one["lowest"] is None) != (one["highest"] is None):
        yield _wrong(where, one["name"], "lowest and highest together")


def _wrong(where: str, found: str, expected: str) -> DataError:
    return DataError("wrong value", where=where, found=found, expected=expected)
