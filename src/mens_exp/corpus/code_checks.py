"""Check that code parses, and that it compiles in a sandbox."""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Final

from mens_exp.config.evaluation import ExecutingSandbox
from mens_exp.corpus.rust import first_error, parse_rust
from mens_exp.sandbox.opening import limits_of, open_sandbox
from mens_exp.sandbox.program import (
    PYTHON,
    Outcome,
    Program,
    Toolchain,
    find_rust,
    least_rust_limits,
    run_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mens_exp.config.evaluation import SandboxConfig
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.sandbox.program import Execution

_FENCED: Final = re.compile(
    r"^ {0,3}(?P<marks>`{3,}|~{3,})[ \t]*(?P<label>[^\s`{,]*)[^\n]*\n"
    r"(?P<code>.*?)^ {0,3}(?P=marks)[`~]*[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_SAME: Final = {"py": "python", "python3": "python", "rs": "rust"}


def parse_problem(pair: TrainingPair) -> str | None:
    """Return the first syntax error in the code of a row's answers.

    Code is the content of fenced blocks in the row's language or without a label; an answer without
    fences is code as a whole. Rows without a language, or with one not in `CHECKED`, are skipped.

    Returns:
        The error with its line in the code; None if all code parses.

    Raises:
        MissingExtra: a row is in Rust and the grammar is not installed.
    """
    check = CHECKED.get((pair.language or "").casefold())
    if check is None:
        return None
    return next((wrong for code in blocks_of(pair) if (wrong := check(code)) is not None), None)


def blocks_of(pair: TrainingPair) -> Iterator[str]:
    """Yield the code of a row's answers in the row's language."""
    language = (pair.language or "").casefold()
    for _, said in pair.exchanges:
        for start, end in spans_of(said, language):
            yield said[start:end]


def spans_of(said: str, language: str) -> list[tuple[int, int]]:
    """Return the spans of the code of an answer in one language.

    An answer without fences is code as a whole.
    """
    fenced = list(_FENCED.finditer(said))
    if not fenced:
        return [(0, len(said))]
    labels = [block["label"].casefold() for block in fenced]
    return [
        block.span("code")
        for block, label in zip(fenced, labels, strict=True)
        if _SAME.get(label, label) in {"", language}
    ]


def _python_problem(code: str) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # users need no warning about invalid escapes in a row
        try:
            ast.parse(code)
        except SyntaxError as error:
            return f"line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    return None


def _rust_problem(code: str) -> str | None:
    place = first_error(parse_rust(code.encode("utf-8")))
    return None if place is None else f"line {place[0]}, column {place[1]}"


def _json_problem(code: str) -> str | None:
    try:
        json.loads(code)
    except (ValueError, RecursionError) as error:
        return str(error)
    return None


CHECKED: Final[dict[str, Callable[[str], str | None]]] = {
    "python": _python_problem,
    "rust": _rust_problem,
    "json": _json_problem,
}


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
    """Compile nothing."""

    def problems(self, pairs: Sequence[TrainingPair]) -> Iterator[str | None]:
        """Yield None for every row."""
        return iter([None] * len(pairs))

    def compiled(self) -> dict[str, int] | None:
        """Return None: nothing was compiled."""
        return None


class Compiler:
    """Compile Python and Rust rows, each in its own sandbox."""

    def __init__(self, config: SandboxConfig) -> None:
        """Open and probe the sandbox.

        Raises:
            SetupError: the sandbox is not available, or does not isolate as required.
        """
        self._sandbox = open_sandbox(config)
        self._limits = limits_of(config)
        self._workers = config.workers if isinstance(config, ExecutingSandbox) else None
        self._counts: Counter[str] = Counter()

    def problems(self, pairs: Sequence[TrainingPair]) -> Iterator[str | None]:
        """Yield each row's compiler error; None if it compiles.

        Rows in other languages and rows without code are not compiled.

        Raises:
            SetupError: a row is in Rust and rustc is not installed.
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
        """Return the number of compiled rows by language."""
        return dict(sorted(self._counts.items()))

    def _compiled(self, language: str, pairs: Sequence[TrainingPair]) -> list[str | None]:
        if not pairs:
            return []
        is_rust = language == "rust"
        limits = least_rust_limits(self._limits) if is_rust else self._limits
        programs = [_rust_program(pair) if is_rust else _python_program(pair) for pair in pairs]
        return [
            _failure_of(each) for each in run_all(self._sandbox, programs, limits, self._workers)
        ]


@functools.cache
def _toolchain() -> Toolchain:
    return find_rust()


def _codes(pair: TrainingPair) -> dict[str, str]:
    return {f"{number:04d}.code": code for number, code in enumerate(blocks_of(pair))}


def _python_program(pair: TrainingPair) -> Program:
    return Program(
        argv=(PYTHON, "-s", "-S", "-B", "-W", "ignore", "main.py"),
        files={"main.py": _PYTHON, **_codes(pair)},
        env={"PYTHONUTF8": "1"},
    )


def _rust_program(pair: TrainingPair) -> Program:
    found = _toolchain()
    return Program(
        argv=("/bin/sh", "-c", _RUST, found.rustc),
        files=_codes(pair) or {"0.code": ""},
        visible=(found.sysroot,),
    )


def _failure_of(execution: Execution) -> str | None:
    """Return the compiler's first error line, or why the compiler was stopped."""
    if execution.outcome is Outcome.ok:
        return None
    if execution.outcome is Outcome.failed:
        return (execution.stderr.strip().splitlines() or ["no message"])[-1]
    return f"the compiler was stopped ({execution.outcome})"
