"""Make docs/measured/reliability.md from the results of the fault campaign and of fuzzing.

    python tests/support/reliability_page.py [results [results of fuzzing]]

It prints the page; `make docs` writes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "faults/campaign.json"
FUZZING = RESULTS.with_name("fuzzing.json")
FAULTS = ("kill", "torn", "short", "full", "error", "moment")
HEAD = """# Reliability

What happens to your files when a process is killed, a disk fills up or a write fails? `make soak`
plays a campaign of such faults and this page shows its last results. `make docs` draws the page
from `tests/faults/campaign.json`; do not edit it.

A filter in the kernel (seccomp) stops every system call of a command, and of all the processes
that it starts, that changes a file: Python's own calls and those of native code such as
safetensors, torch and W&B's Go program. Calls are alike when they do the same to the same class of
file. Of each set of alike calls the campaign draws cases:

| Fault | Meaning |
|---|---|
| kill | SIGKILL before the call: the first, the middle or the last of alike calls |
| torn | half of the bytes are written, then SIGKILL |
| short | half of the bytes are written, and the call says so |
| full | ENOSPC for this call, and for every later one that needs space |
| error | EIO for this call alone |
| moment | SIGKILL of one process of the command, or of all, at a random moment |

The processes of the task `slurm` include the cluster's own: the controller, the node's daemon and
the steps of its jobs. A daemon that was killed is started again at once, with what it had saved.

After the fault, the next commands run on a disk that works: `resume=`, `sweep.resume=`, or the same
command again. A case ends well if all of this holds:

- Each command succeeds, or says what to do next. There is no traceback and no "bug in mens_exp".
- No record says that a run succeeded while a file that it lists is missing or has other bytes.
- After the last command every file is there and has the same bytes as after a run that nothing
  disturbed. Times, process IDs and the like may differ; `tests/support/after_faults.py` lists them.
- No temporary file is left behind, except in the directory of a run that was killed and then run
  again elsewhere. A fault at a deletion may leave a lock that nobody holds, and the very file that
  the disk did not delete.

A report that could not be written does not make a run fail: its record then says so.

Not covered: power cuts (calls to `fsync` are seen, and made to fail, but no disk forgets what it
has acknowledged), network file systems, and changes to memory-mapped pages, which are not calls.

In the tables, *Calls* is how many calls of an undisturbed task change files, *Alike* how many
different ones there are (or of how many of them one was hit), and *Cases* how many faults that
makes. Each set of alike calls is hit once before one is hit again; the time may end before all
cases are played. Where processes run side by side, a call may not come up again; such a case does
not count as played.
"""


FUZZED = """
## Damaged files

`make fuzz` feeds damaged files to every reader of files that may come from elsewhere; its results
are in `tests/faults/fuzzing.json`. *Mutated* inputs are valid files with one to six changes: bits,
bytes, words, parts of other files, repetitions, cuts; or, in JSON and YAML, other values. *Bred*
ones are made by libFuzzer from those that reached new lines of our code. A reader may refuse an
input by an error that names it, or read it. These are faults: any other error, the end of the
process, more than 20 s or 1 GiB for one input, and values that another reader (the standard
library, numpy) finds to be others. Inputs of faults that were mended are in
`tests/faults/corpora`, which the tests read each time.

GGUF files are read only from a package whose hash is known, and bundles are unpacked by `tar`, so
neither is fuzzed. pyarrow ends the process over some damaged descriptions of lists in Parquet
files (seen with 26.0); that is not ours to mend.
"""


def page(results, fuzzing):
    """Return the whole page."""
    campaigns = "".join(_section(one) for one in results["campaigns"])
    return HEAD + campaigns + FUZZED + _readers(fuzzing)


def _readers(fuzzing):
    """Return the results of each reader."""
    readers, machine = fuzzing["readers"], fuzzing["machine"]
    whole = sum(one["inputs"] + one["guided"] for one in readers.values())
    faults = sum(len(one["faults"]) for one in readers.values())
    told = "no fault" if not faults else f"{faults} faults"
    where = f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}"
    lines = [
        f"\n{whole:,} inputs, {told} ({where}).\n",
        "| Reader | Mutated | of which read | Bred | Faults |",
        "|---" * 5 + "|",
    ]
    for name, one in sorted(readers.items()):
        read = f"{one.get('accepted', 0):,}"
        found = "; ".join(f"`{text}`" for text in one["faults"]) or "none"
        lines.append(f"| {name} | {one['inputs']:,} | {read} | {one['guided']:,} | {found} |")
    return "\n".join(lines) + "\n"


def _section(campaign):
    """Return the results of one campaign."""
    machine, versions, tasks = campaign["machine"], campaign["versions"], campaign["tasks"]
    problems = campaign["problems"]
    played, planned = sum(map(_played, tasks)), sum(task["planned"] for task in tasks)
    drawn = f"{played:,} of {planned:,} cases, drawn with seed {campaign['seed']}"
    lines = [
        f"\n## Results of {campaign['started_utc'][:10]}, commit {campaign['commit'][:10]}\n",
        f"{drawn}, in {campaign['minutes']:.0f} minutes; {len(problems)} did not end well.\n",
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}",
        "- Versions: " + ", ".join(f"{name} {value}" for name, value in sorted(versions.items())),
        *(["- The package had changes that are not committed."] if campaign["dirty"] else []),
        "",
        f"| Task | Calls | Alike | Cases | Played | {' | '.join(FAULTS)} | Well |",
        "|---" * (6 + len(FAULTS)) + "|",
    ]
    for task in tasks:
        counts = [task["played"].get(name, 0) for name in FAULTS]
        alike = task["alike"]
        if "alike_played" in task:  # missing in older results
            alike = f"{task['alike_played']} of {alike}"
        cells = [task["name"], task["calls"], alike, task["planned"], _played(task)]
        lines.append("| " + " | ".join(map(str, [*cells, *counts, task["well"]])) + " |")
    if campaign["note"]:
        lines += ["", campaign["note"]]
    if problems:
        lines.append("\nWhat did not end well:\n")
        lines += [f"- `{one['case']}`: {_first(one['problems'])}" for one in problems]
    return "\n".join(lines) + "\n"


def _first(problems):
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


def _played(task):
    return sum(task["played"].values())


if __name__ == "__main__":
    given = [Path(text) for text in sys.argv[1:]]
    files = [*given, *(RESULTS, FUZZING)[len(given) :]]
    print(page(*(json.loads(file.read_text("utf-8")) for file in files)), end="")
