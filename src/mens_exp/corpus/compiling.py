"""Whether code compiles, by the language's own tool, in a sandbox."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Final

from mens_exp.config.sandbox import ExecutingSandbox
from mens_exp.corpus.code_checks import blocks_of
from mens_exp.sandbox.batch import run_all
from mens_exp.sandbox.opening import limits_of, open_sandbox
from mens_exp.sandbox.program import PYTHON, Outcome, Program
from mens_exp.sandbox.rust_toolchain import Toolchain, find_rust, least_rust_limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.sandbox import SandboxConfig
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.sandbox.program import Execution

__all__ = ["Compiler", "NoCompiler"]

_PYTHON: Final = """\
import pathlib, sys
for path in sorted(pathlib.Path.cwd().glob("*.code")):
    try:
        compile(path.read_text("utf-8"), "code", "exec")
    except (SyntaxError, ValueError) as error:
        sys.exit(f"line {getattr(error, 'lineno', None)}: {getattr(error, 'msg', error)}")
"""
_RUST: Final = """\
for code in *.code; do
  "$0" --edition 2021 --crate-name row --crate-type lib --emit metadata -A warnings \\
    -o row.rmeta "$code" 2>messages || { head -n 1 messages >&2; exit 1; }
done
"""


class NoCompiler:
    """Compiles nothing."""

    def problems(self, pairs: Sequence[TrainingPair]) -> Iterator[str | None]:
        """Yield None for every row."""
        return iter([None] * len(pairs))

    def compiled(self) -> dict[str, int] | None:
        """Return None: nothing was."""
        return None


class Compiler:
    """Compiles rows in Python and in Rust, each in a sandbox of its own."""

    def __init__(self, config: SandboxConfig) -> None:
        """Open and probe the sandbox.

        Raises:
            SetupError: it is not there, or does not contain what it must.
        """
        self._sandbox = open_sandbox(config)
        self._limits = limits_of(config)
        self._workers = config.workers if isinstance(config, ExecutingSandbox) else None
        self._counts: Counter[str] = Counter()

    def problems(self, pairs: Sequence[TrainingPair]) -> Iterator[str | None]:
        """Yield, for each row, what its compiler says of it; None where it compiles.

        A row in another language, or without code, is not compiled.

        Raises:
            SetupError: a row is in Rust, and its compiler is not installed.
        """
        found: dict[int, str | None] = {}
        for language in ("python", "rust"):
            chosen = [
                number
                for number, pair in enumerate(pairs)
                if (pair.language or "").casefold() == language
            ]
            self._counts[language] += len(chosen)
            found |= zip(chosen, self._compiled(language, [pairs[n] for n in chosen]), strict=True)
        return (found.get(number) for number in range(len(pairs)))

    def compiled(self) -> dict[str, int] | None:
        """Return how many rows of each language were compiled."""
        return dict(sorted(self._counts.items()))

    def _compiled(self, language: str, pairs: Sequence[TrainingPair]) -> list[str | None]:
        if not pairs:
            return []
        is_rust = language == "rust"
        limits = least_rust_limits(self._limits) if is_rust else self._limits
        programs = [_rust(pair) if is_rust else _python(pair) for pair in pairs]
        return [_told(each) for each in run_all(self._sandbox, programs, limits, self._workers)]


@functools.cache
def _toolchain() -> Toolchain:
    return find_rust()


def _codes(pair: TrainingPair) -> dict[str, str]:
    return {f"{number:04d}.code": code for number, code in enumerate(blocks_of(pair))}


def _python(pair: TrainingPair) -> Program:
    return Program(
        argv=(PYTHON, "-s", "-S", "-B", "-W", "ignore", "main.py"),
        files={"main.py": _PYTHON, **_codes(pair)},
        env={"PYTHONUTF8": "1"},
    )


def _rust(pair: TrainingPair) -> Program:
    found = _toolchain()
    return Program(
        argv=("/bin/sh", "-c", _RUST, found.rustc),
        files=_codes(pair) or {"0.code": ""},
        visible=(found.sysroot,),
    )


def _told(execution: Execution) -> str | None:
    """Return the compiler's first line, or how it was stopped."""
    if execution.outcome is Outcome.ok:
        return None
    if execution.outcome is Outcome.failed:
        return (execution.stderr.strip().splitlines() or ["no message"])[-1]
    return f"the compiler was stopped ({execution.outcome})"
