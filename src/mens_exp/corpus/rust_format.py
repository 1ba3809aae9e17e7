"""Rust in its canonical form: rustfmt's default layout of the edition 2021, comments kept.

rustfmt opens the files that a source's ``mod`` declarations name, and so it runs in a sandbox.
One call formats many files, since starting it takes as long as formatting twenty.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mens_exp.errors import SetupError
from mens_exp.sandbox.batch import run_all
from mens_exp.sandbox.program import Outcome, Program
from mens_exp.sandbox.rust_toolchain import find_rust, find_rustfmt, least_rust_limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.sandbox.program import Execution, Limits, Sandbox
    from mens_exp.sandbox.rust_toolchain import Rustfmt

__all__ = ["EDITION", "Formatted", "RustFormatter", "rustfmt_version"]

EDITION: Final = "2021"
_AT_ONCE: Final = 64  # sources of one call
_OUTPUT_KIB: Final = 64  # of one source; rows are far shorter
_WORDS: Final = re.compile(r"\w+")
_ABI: Final = re.compile(r'\bextern\s+"C"')  # rustfmt writes out what is meant
_FAILED: Final = "rustfmt failed"
_MORE: Final = "rustfmt changed more than the layout"
_SCRIPT: Final = 'exec "$0" --edition "$1" --emit stdout --config-path rustfmt.toml ./*.rs'


@dataclass(frozen=True, kw_only=True, slots=True)
class Formatted:
    """A source in canonical form, or as it was with the reason why it is not."""

    text: str
    problem: str | None = None


def rustfmt_version() -> str | None:
    """Return the version of this machine's rustfmt, None where there is none."""
    try:
        return find_rustfmt(find_rust()).version
    except SetupError:
        return None


class RustFormatter:
    """Formats sources in a sandbox."""

    def __init__(self, sandbox: Sandbox, limits: Limits, workers: int | None = None) -> None:
        """Find rustfmt.

        Args:
            sandbox: where it runs.
            limits: of one call.
            workers: calls at once; None is one for each processor.

        Raises:
            SetupError: rustc or rustfmt is not installed.
        """
        self._tool: Rustfmt = find_rustfmt(find_rust())
        self._sandbox, self._workers = sandbox, workers
        self._limits = replace(least_rust_limits(limits), output_kib=_AT_ONCE * _OUTPUT_KIB)

    @property
    def version(self) -> str:
        """The version of rustfmt."""
        return self._tool.version

    def formatted(self, sources: Sequence[str]) -> list[Formatted]:
        """Format sources, in their order.

        Raises:
            SetupError: the sandbox broke.
        """
        batches = [sources[at : at + _AT_ONCE] for at in range(0, len(sources), _AT_ONCE)]
        found = [one for some in self._formatted(batches) for one in some]
        # What one source did to rustfmt is no reason for the others of its call.
        again = [number for number, one in enumerate(found) if one is None]
        alone = dict(zip(again, self._formatted([[sources[n]] for n in again]), strict=True))
        return [
            one or alone[number][0] or Formatted(text=sources[number], problem=_FAILED)
            for number, one in enumerate(found)
        ]

    def _formatted(self, batches: Sequence[Sequence[str]]) -> Iterator[list[Formatted | None]]:
        """Yield what came of each call; None for a source that it says nothing of."""
        # Nothing in a source can name a file of this call, or look like the head of one.
        words = [secrets.token_hex(16) for _ in batches]
        programs = [self._program(*one) for one in zip(words, batches, strict=True)]
        executions = run_all(self._sandbox, programs, self._limits, self._workers)
        for word, some, execution in zip(words, batches, executions, strict=True):
            yield _read(word, some, execution)

    def _program(self, word: str, sources: Sequence[str]) -> Program:
        files = {f"{word}{number:04d}.rs": source for number, source in enumerate(sources)}
        return Program(
            argv=("/bin/sh", "-c", _SCRIPT, self._tool.tool, EDITION),
            files={**files, "rustfmt.toml": ""},
            visible=(self._tool.sysroot,),
        )


def _read(word: str, sources: Sequence[str], execution: Execution) -> list[Formatted | None]:
    """Take the output apart: before each source's text stands a line with its file's path."""
    head = re.compile(rf"^[^\n]*/{word}(\d{{4}})\.rs:\n\n", re.MULTILINE)
    heads = list(head.finditer(execution.stdout))
    ends = [*(one.start() for one in heads), len(execution.stdout)][1:]
    texts = {
        int(one[1]): execution.stdout[one.end() : e] for one, e in zip(heads, ends, strict=True)
    }
    is_whole = execution.outcome in {Outcome.ok, Outcome.failed}
    if not is_whole and texts:
        del texts[max(texts)]  # it was being written
    found: list[Formatted | None] = []
    for number, source in enumerate(sources):
        problem = _refusal(execution.stderr, f"{word}{number:04d}.rs")
        if problem is not None:
            found.append(Formatted(text=source, problem=problem))
        elif number in texts and _words(source) == _words(texts[number]):
            found.append(Formatted(text=texts[number]))
        elif number in texts and len(sources) == 1:
            found.append(Formatted(text=source, problem=_MORE))
        elif len(sources) == 1:
            found.append(Formatted(text=source, problem=_failure(execution)))
        else:
            found.append(None)
    return found


def _refusal(said: str, file: str) -> str | None:
    """Return the first thing that rustfmt says against a file, with line and column."""
    found = re.search(
        rf"^error[^\n:]*: ([^\n]*)\n(?:[^\n]*\n)??\s*-->\s[^\n]*/{file}:(\d+):(\d+)",
        said,
        re.MULTILINE,
    )
    if found is None:
        return None
    # A message may name the sandbox's own path.
    message = found[1] if file[:32] not in found[1] else "a file that it names cannot be read"
    return f"line {found[2]}, column {found[3]}: {message}"


def _failure(execution: Execution) -> str:
    """Say how rustfmt ended over a source, where it says nothing of a place in it."""
    if "failed to resolve mod" in execution.stderr:
        return "it declares a module that is in another file"
    if execution.outcome in {Outcome.ok, Outcome.failed}:
        return _FAILED
    return f"{_FAILED} ({execution.outcome})"


def _words(source: str) -> Counter[str]:
    """Count what layout does not change; a file that another source read in would."""
    return Counter(_WORDS.findall(_ABI.sub("extern", source)))
