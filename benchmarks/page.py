"""docs/measured/speed.md and scale.md, drawn from the runs in benchmarks/results/.

    python benchmarks/page.py speed|scale

It prints the page; `make docs` writes it. For each command of a script, the page shows the newest
full-size run next to the newest earlier run of the same command on a comparable machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from record import RESULTS, Better, Results, Size, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from record import Described, Figure, Machine, Run

# Modules without measurements, and scripts with a separate record and page.
SHARED = {
    *("page", "processes", "record", "reference_trainer"),
    *("gpu_arms", "gpu_results", "gpu_slices"),
}
APART = {"gpu"}
FRAC = "frac"  # a fraction, shown as a percentage
SHORT = 10  # digits of a commit
SCALE = {
    "corpus_scale",
    "memory_model",
    "processes",
    "scaling",
    "sweep",
}  # on a separate page
READING = """
Every figure is measured next to a reference in the same run. The ratio of the two depends less on
the machine, and on what else runs there, than the figure does. A figure with a range is the median
of several rounds; one without a range was measured once. `make docs` draws this page from
`benchmarks/results/`; do not edit it.

    make bench                          # throughput; its run is added to benchmarks/results/
    make bench NAME=merge ARGS="2 3"    # another script and its arguments; ARGS=--help lists them
    make docs                           # draw this page again

The column "Moved" compares a figure with the previous run of the same command on a comparable
machine, which has the same processor and as many cores and threads. It calls a change
better or worse where the ranges of both do not overlap and the ratio has moved the same way.
"""
HEADS = {
    "speed": """# Speed

How fast training, encoding, merging, planning and the other parts are, on the machines that we had:
two CPU cores. Nothing on this page was measured on a GPU; `python benchmarks/gpu.py` measures on
one, with and without Liger-Kernel ([Install](../how-to/install.md)). Figures on size are under
[Scale](scale.md).
""",
    "scale": """# Scale

How memory and time grow with the size of the model, of the corpus and of the sweep. mens_exp itself
was never measured on a GPU; [scaling](#scaling) compares its formulas with runs of other programs
that were published, and extends them to 512 GPUs. How to plan such runs is under
[Several processes](../how-to/several_processes.md#planning). How the steps of a corpus divide over
many machines is under [Make a corpus](../how-to/corpus.md#many-machines).
""",
}


def main() -> None:
    """Print the page."""
    print(page(RESULTS, sys.argv[1]), end="")


def scripts() -> list[str]:
    """Return the names of all scripts, in page order."""
    names = {path.stem for path in Path(__file__).parent.glob("*.py")}
    return sorted(names - SHARED - APART)


def page(directory: Path, which: str = "speed") -> str:
    """Return a whole page; deterministic for given files.

    Args:
        directory: the directory of results files.
        which: a key of :data:`HEADS`.

    Raises:
        DataError: a results file is invalid.
        Problems: it has several problems.
    """
    read = {path.stem: Results.read(path) for path in sorted(directory.glob("*.json"))}
    names = [one for one in sorted({*scripts(), *read}) if (one in SCALE) == (which == "scale")]
    parts = [HEADS[which] + READING, "| Script | Question |", "|---|---|"]
    for name in names:
        question = read[name].question if name in read else "not measured yet"
        link = f"[{name}](#{name})" if name in read else f"`{name}`"
        parts.append(f"| {link} | {cell(question)} |")
    for name, results in ((one, read[one]) for one in names if one in read):
        parts += [f"\n## {name}\n", results.question, *_commands(results)]
    return "\n".join(parts).rstrip() + "\n"


def _commands(results: Results) -> Iterator[str]:
    """Yield the newest run of each command, ordered by the first run of the command."""
    full = [run for run in results.runs if run["size"] == Size.FULL]
    for command in dict.fromkeys(run["command"] for run in full):
        *earlier, newest = [run for run in full if run["command"] == command]
        yield f"\n    {command}\n"
        yield from _section(newest, earlier)


def _section(run: Run, earlier: Sequence[Run]) -> Iterator[str]:
    before = next(
        (one for one in reversed(earlier) if comparable(run["machine"], one["machine"])), None
    )
    yield ". ".join(facts_of(run)) + "."
    if run["note"]:
        yield f"Note: {cell(run['note'])}."
    yield from _unknown(run)
    yield _compared(run, before, is_first=not earlier)
    yield ""
    yield from table(run["figures"], before)
    if before is not None:
        names = {one["name"] for one in run["figures"]}
        gone = [one["name"] for one in before["figures"] if one["name"] not in names]
        if gone:
            yield f"\nNo longer measured: {cell('; '.join(gone))}."


def facts_of(run: Described) -> list[str]:
    """Return date, commit, machine and versions of a run."""
    facts = [f"Run on {_when(run)}", _machine(run["machine"]), _versions(run)]
    return [fact for fact in facts if fact]


def comparable(one: Machine, other: Machine) -> bool:
    """Return whether figures of two machines may be compared directly.

    Both runs must name the processor and its cores. If a run does not state its threads, they equal
    the cores, which is the default of every script.
    """
    if one["cpu"] is None or one["cores"] is None:
        return False
    sets = {one["instruction_set"], other["instruction_set"]} - {None}
    same = [(machine["cpu"], machine["cores"]) for machine in (one, other)]
    threads = [machine["threads"] or machine["cores"] for machine in (one, other)]
    return same[0] == same[1] and threads[0] == threads[1] and len(sets) <= 1


def moved(now: Figure, before: Figure | None) -> str:
    """Return the change of a figure since an earlier run, and of its ratio if both have one.

    A change is better or worse if the two ranges do not overlap and the ratio has moved the same
    way, because other load on a machine slows a figure and its reference alike. A figure with a
    reference is therefore not judged without it.
    """
    if before is None:
        return "new"
    if before["unit"] != now["unit"]:
        return f"was in {before['unit']}"
    gain = now["value"] - before["value"]
    text, ratio_gain = _change(now["value"], before["value"], now["unit"]), 0.0
    if now["reference"] is None and before["reference"] is None:
        ratio_gain = gain
    elif now["ratio"] and before["ratio"] and now["reference"] == before["reference"]:
        text += f"; ratio {_change(now['ratio'], before['ratio'], '')}"
        ratio_gain = now["ratio"] - before["ratio"]
    if gain and _overlap(now, before):
        return f"{text}; ranges overlap"
    if gain * ratio_gain > 0 and now["better"] is not None:
        text += "; better" if (gain > 0) == (now["better"] == Better.HIGHER) else "; worse"
    return text


def _change(now: float, before: float, unit: str) -> str:
    """Return a change in percent, or in points if the value is a percentage."""
    if now == before:
        return "unchanged"
    if unit == FRAC:
        return _signed(100 * (now - before), "points")
    return f"was {shown(before)}" if before == 0 else _signed(100 * (now / before - 1), "%")


def _signed(value: float, unit: str) -> str:
    return f"{value:+.1f} {unit}".replace("-", "−")


def _overlap(one: Figure, other: Figure) -> bool:
    """Return whether the ranges of two figures overlap; a single round has no range."""
    if one["lowest"] is None or other["lowest"] is None:
        return False
    assert one["highest"] is not None, "a range has both ends"
    assert other["highest"] is not None, "as above"
    return one["lowest"] <= other["highest"] and other["lowest"] <= one["highest"]


def table(figures: Sequence[Figure], before: Run | None) -> Iterator[str]:
    """Yield the lines of a table of figures, with changes since an earlier run."""
    then = {one["name"]: one for one in before["figures"]} if before else {}
    more = " Moved |" if before else ""
    yield f"| Figure | Value | Range | Ratio × reference |{more}"
    yield "|---|---:|---:|---|" + ("---|" if before else "")
    for one in figures:
        spread = ""
        if one["lowest"] is not None:
            spread = f"{_value(one['lowest'], one)} to {_value(one['highest'], one)}"
        value = _value(one["value"], one)
        unit = "" if one["unit"] == FRAC else f" {one['unit']}"
        cells = [one["name"], f"{value}{unit}", spread, _ratio(one)]
        if before:
            cells.append(moved(one, then.get(one["name"])))
        yield f"| {' | '.join(map(cell, cells))} |"


def _value(value: float | None, one: Figure) -> str:
    if value is not None and one["unit"] == FRAC:
        return f"{shown(100 * value)} %"
    return shown(value)


def _ratio(one: Figure) -> str:
    if one["reference"] is None:
        return ""
    beside = f"{one['reference']} ({_value(one['reference_value'], one)})"
    return f"no ratio to {beside}" if one["ratio"] is None else f"{shown(one['ratio'])} × {beside}"


def _when(run: Described) -> str:
    commit = "unknown" if run["commit"] is None else f"`{run['commit'][:SHORT]}`"
    changed = " with uncommitted changes" if run["dirty"] else ""
    return f"{run['utc'][:10]} at commit {commit}{changed}"


def _machine(machine: Machine) -> str:
    facts = [
        (machine["cpu"], "{}"),
        (machine["instruction_set"], "{}"),
        (machine["cores"], "{} core(s)"),
        (machine["threads"], "{} thread(s)"),
        (machine["memory_gib"], "{} GiB"),
        (machine["os"], "{}"),
        (machine["load_1min"], "load {} at its start"),
    ]
    return ", ".join(form.format(fact) for fact, form in facts if fact is not None)


def _versions(run: Described) -> str:
    return ", ".join(f"{name} {found}" for name, found in run["versions"].items() if found)


def _unknown(run: Described) -> Iterator[str]:
    """Yield the unknown values of a run, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in run["unknown"].items():
        by_reason.setdefault(reason, []).append(name.partition(".")[2] or name)
    for reason, names in by_reason.items():
        yield f"Unknown: {', '.join(names)} ({cell(reason)})."


def _compared(run: Run, before: Run | None, *, is_first: bool) -> str:
    """State the run that the column Moved compares with, and the versions changed since."""
    if before is None:
        return "First run." if is_first else "First run on this machine."
    changed = [
        f"{name} {before['versions'][name]} → {found}"
        for name, found in run["versions"].items()
        if found and before["versions"].get(name) not in (None, found)
    ]
    since = f"; since then {', '.join(changed)}" if changed else ""
    load = before["machine"]["load_1min"]
    remarks = [f"load {load} at its start"] if load is not None else []
    remarks += [f"note: {cell(before['note'])}"] if before["note"] else []
    remark = f" ({'; '.join(remarks)})" if remarks else ""
    return f"Compared with the run on {_when(before)}{remark}{since}."


def cell(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
