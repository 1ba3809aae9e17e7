"""Refresh the tutorial's outputs: run every command of docs/tutorial and record its output.

    python tests/support/tutorial.py [page …]

Pages are run in their order, in one directory (`build/tutorial`), as a reader would. A block of
Python or JSON with a title is written as a file first. A block of bash followed by an output
is run, and the output replaced; `<!-- output: last 20 -->` keeps the last 20 lines of it. Naming
pages runs those alone, in the directory as earlier pages left it.

The run also refreshes the gallery and the picture of a report. `gallery` instead of a page does
that alone: it renders the reports of the two runs again from their JSON.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("first-run", "your-data", "plan", "sweep", "compare", "merge", "serve")
TUTORIAL = ROOT / "docs" / "tutorial"
GALLERY = ROOT / "docs" / "gallery"
PICTURE = ROOT / "docs" / "assets" / "report.png"
WORK = ROOT / "build" / "tutorial"
SHOWN = {  # a gallery page: the newest file that a glob matches
    "main-job": "outputs/train/default/*/report.html",
    "own-data": "tickets/report.html",
    "sweep": "targets/sweep.html",
    "comparison": "verdict/compare.html",
    "attribution": "attribution/report.html",
    "corpus": "corpus/corpus_report.html",
}
RECORDS = ROOT / "notebooks" / "records" / "attribution"
CORPUS = """
cp -r {source} project
python -m mens_exp task=corpus corpus.input=project corpus.output=corpus \\
    'corpus.steps=[extract,validate,dedupe,split,report]' logger=none
"""
FILE = re.compile(
    r"^```\w+ title=\"(?P<name>[^\"]+)\"\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
STEP = re.compile(
    r"^```bash\n(?P<commands>.*?)^```\n"
    r"(?:\n<!-- output(?:: (?P<part>first|last) (?P<lines>\d+))? -->\n"
    r"(?P<shown>.*?)<!-- end of output -->$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Ran:
    """The output of one block of commands, and its duration."""

    text: str
    seconds: float


def main() -> None:
    """Run the named pages, or all of them in an empty directory."""
    named = sys.argv[1:]
    if not named:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    made = {}
    try:
        for name in (name for name in named or PAGES if name != "gallery"):
            page = TUTORIAL / f"{name}.md"
            made[page] = filled(page.read_text("utf-8"), run)
            print(name, "done", flush=True)
    finally:  # not earlier: later runs would record uncommitted changes
        for page, text in made.items():
            page.write_text(text, "utf-8")
    make_gallery()
    take_picture()


def filled(text: str, runner) -> str:
    """Return a page with fresh outputs of all commands that show one.

    Args:
        text: the page.
        runner: runs the commands of a block and returns a :class:`Ran`.
    """
    for found in FILE.finditer(text):
        (WORK / found["name"]).write_text(found["text"], "utf-8")

    def with_output(found: re.Match[str]) -> str:
        ran = runner(found["commands"])
        if found["shown"] is None:
            return found[0]
        kept = cut(ran.text, found["part"], int(found["lines"] or 0))
        begin, end = (at - found.start() for at in found.span("shown"))
        shown = f"```text\n{kept}\n```\n\n*{took(ran.seconds)}*\n"
        return found[0][:begin] + shown + found[0][end:]

    return STEP.sub(with_output, text)


def cut(text: str, part: str | None, count: int) -> str:
    """Return the lines of an output that a page shows, with an ellipsis for omitted ones."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    if part is None or len(lines) <= count:
        return "\n".join(lines)
    return "\n".join([*lines[:count], "…"] if part == "first" else ["…", *lines[-count:]])


def took(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 90:
        return f"Took {max(round(seconds), 1)} s."
    return f"Took {round(seconds / 60)} min."


def run(commands: str) -> Ran:
    """Run a block of commands in the reader's shell; a failing command ends the tutorial."""
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=WORK,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "80",
            "MENS_EXP_CACHE": str(WORK / "cache"),  # without files of an earlier run
            "NO_COLOR": "1",
        },
    )
    if done.returncode:
        sys.exit(f"{commands}\nended with {done.returncode}:\n{done.stdout}")
    text = done.stdout.replace(str(WORK), "~/tutorial").replace(str(Path.home()), "~")
    return Ran(text=text, seconds=time.monotonic() - began)


def make_gallery() -> None:
    """Copy the tutorial's pages into the gallery, with those of two other tasks."""
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.report.write import write_report

    if not (WORK / "corpus").exists():
        run(CORPUS.format(source=ROOT / "src" / "mens_exp" / "corpus"))
    shutil.copytree(RECORDS, WORK / "attribution", dirs_exist_ok=True)
    for name in ("main-job", "own-data", "attribution"):
        for page in WORK.glob(SHOWN[name].replace("report.html", "manifest.json")):
            write_report(RunDir(page.parent))
    for name, pattern in SHOWN.items():
        found = sorted(WORK.glob(pattern))
        if found:
            shutil.copy(found[-1], GALLERY / f"{name}.html")


def take_picture() -> None:
    """Take a picture of the main job's report with Chromium, if it is installed."""
    browser, page = shutil.which("chromium"), GALLERY / "main-job.html"
    if browser is None or not page.is_file():
        return
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    look = ["--window-size=1200,1500", "--hide-scrollbars", f"--screenshot={PICTURE}"]
    profile = f"--user-data-dir={WORK / 'chromium'}"
    subprocess.run([browser, *flags, *look, profile, page.as_uri()], check=True, timeout=120)


if __name__ == "__main__":
    main()
