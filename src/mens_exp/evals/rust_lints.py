"""Clippy's findings in a Rust answer that compiles, whatever the answer says about lints.

The lints are forced by rustc's ``--force-warn``, which no attribute of the source lowers, and a
``clippy.toml`` of the program's own is empty. Clippy sets ``cfg(clippy)`` and does not look into
most macros, so a source that names any of these could show it another program than the one that
runs: it is not clean either.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mens_exp.sandbox.batch import run_all
from mens_exp.sandbox.program import Outcome, Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.sandbox.program import Execution, Limits, Sandbox
    from mens_exp.sandbox.rust_toolchain import Clippy

__all__ = ["LINTS", "Lintable", "Linted", "lint_rust", "probe_problem"]

LINTS: Final = ("clippy::all", "unused")
"""Groups of lints: Clippy's default ones, and rustc's for what is not used."""

_FILE: Final = "main.rs"
_EVASION: Final = re.compile(r"\b(?:clippy|macro_rules|automatically_derived)\b")
_UNFINISHED: Final = "clippy did not finish"
# Each has one finding at least, under every version of Clippy since 1.29.
_PROBE: Final = """\
#![allow(warnings)]
fn main() {
    let unread = twice(1);
}
fn twice(x: i32) -> i32 {
    return x * 2;
}
"""
_OF_THE_PROBE: Final = frozenset({"clippy::needless_return", "unused_variables"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Lintable:
    """A program that compiles.

    Attributes:
        source: the whole program, with the tests below the answer.
        answer_lines: how many lines from the top are the answer's, or the prompt's.
        prompt: what was asked; a finding on a line of it is the task's, not the answer's.
    """

    source: str
    answer_lines: int
    prompt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Linted:
    """Findings in one answer, by the name of the lint, in their order in the source."""

    lints: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether there is no finding."""
        return not self.lints


def lint_rust(
    sandbox: Sandbox,
    clippy: Clippy,
    programs: Sequence[Lintable],
    limits: Limits,
    workers: int | None = None,
) -> list[Linted]:
    """Lint programs in the sandbox, several at once, in their order; none of them is run.

    Raises:
        SetupError: the sandbox broke.
    """
    commands = [_command(clippy, one.source) for one in programs]
    executions = run_all(sandbox, commands, limits, workers)
    return [_linted(one, said) for one, said in zip(programs, executions, strict=True)]


def probe_problem(sandbox: Sandbox, clippy: Clippy, limits: Limits) -> str | None:
    """Lint a program with known findings; say what is wrong where they are not found.

    Raises:
        SetupError: the sandbox broke.
    """
    probe = Lintable(source=_PROBE, answer_lines=_PROBE.count("\n"))
    (found,) = lint_rust(sandbox, clippy, [probe], limits, workers=1)
    missed = _OF_THE_PROBE - set(found.lints)
    return f"clippy does not find {', '.join(sorted(missed))}" if missed else None


def _command(clippy: Clippy, source: str) -> Program:
    forced = [word for lint in LINTS for word in ("--force-warn", lint)]
    return Program(
        argv=(
            *(clippy.driver, "--edition", "2021", "--crate-name", "program"),
            *("--emit", "metadata", "-o", "program.rmeta", "--error-format", "json"),
            # What is not forced is silent, so that the answer's own levels add nothing.
            *("--cap-lints", "allow", *forced, _FILE),
        ),
        files={_FILE: source, "clippy.toml": "", ".clippy.toml": ""},
        visible=(clippy.sysroot,),
    )


def _linted(program: Lintable, execution: Execution) -> Linted:
    answer = program.source.split("\n")[: program.answer_lines]  # as rustc counts
    asked = {line.strip() for line in program.prompt.splitlines()}
    own = "\n".join(line for line in answer if line.strip() not in asked)
    lints = [f"names {name}" for name in dict.fromkeys(_EVASION.findall(own))]
    for line in execution.stderr.splitlines():
        found = _finding(line)
        if found is None or not 0 < found[1] <= len(answer):
            continue
        if answer[found[1] - 1].strip() not in asked:
            lints.append(found[0])
    if execution.outcome is not Outcome.ok:
        lints.append(_UNFINISHED)
    return Linted(lints=tuple(lints))


def _finding(line: str) -> tuple[str, int] | None:
    """Return a diagnostic's lint and line in the program; None for a line that is none."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    if not isinstance(told, dict) or not isinstance(told.get("code"), dict):
        return None
    span = next((one for one in told.get("spans", ()) if one["is_primary"]), None)
    while span is not None and span["file_name"] != _FILE:  # within a macro of the library
        span = (span.get("expansion") or {}).get("span")
    return None if span is None else (str(told["code"]["code"]), _line(span))


def _line(span: dict[str, Any]) -> int:
    return int(span["line_start"])
