"""Grade a Rust answer: compile it, run its tests in another process, and lint it with Clippy.

The answer is compiled where it runs; the tests are compiled once for all answers to a task. Each
runs in a fresh sandbox, and a socket connects them. The tests' process reports the verdict with a
secret word that only it knows. If the function's signature has types other than plain values
(`rust_values.py`), answer and tests are one program, whose verdict is *trusting*.

Lints are forced with rustc's ``--force-warn``, which no attribute of the source can lower, and the
program gets an empty ``clippy.toml``. Clippy sets ``cfg(clippy)`` and does not expand most macros,
so a source that uses any of these could show it a different program from the one that runs. Such a
source does not count as clean.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mens_exp.errors import SetupError
from mens_exp.evals.grading import OF_OUTCOME, Verdict
from mens_exp.evals.rust_values import WIRE, answer_source, grader_source, signature_of
from mens_exp.sandbox.program import Outcome, Program, run_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mens_exp.evals.rust_values import Signature
    from mens_exp.sandbox.program import Clippy, Execution, Limits, Sandbox, Toolchain

LINTS: Final = ("clippy::all", "unused")
"""Lint groups: Clippy's defaults, and rustc's for unused code."""

_FILE: Final = "main.rs"
_EVASION: Final = re.compile(r"\b(?:clippy|macro_rules|automatically_derived)\b")
_UNFINISHED: Final = "clippy did not finish"
# Every Clippy version since 1.29 reports at least one finding of each expected lint here.
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
        answer_lines: number of leading lines that belong to the answer or the prompt.
        prompt: the prompt; findings in its lines are not attributed to the answer.
    """

    source: str
    answer_lines: int
    prompt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Linted:
    """Names of the lints found in one answer, in source order."""

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
    """Lint programs in the sandbox, several at once, in order; none of them is run.

    Raises:
        SetupError: the sandbox failed.
    """
    commands = [_command(clippy, one.source) for one in programs]
    executions = run_all(sandbox, commands, limits, workers)
    return [_linted(one, said) for one, said in zip(programs, executions, strict=True)]


def probe_problem(sandbox: Sandbox, clippy: Clippy, limits: Limits) -> str | None:
    """Lint a program with known findings; return the problem if they are not found.

    Raises:
        SetupError: the sandbox failed.
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
            # Cap all other lints, so that levels set in the answer add no findings.
            *("--cap-lints", "allow", *forced, _FILE),
        ),
        files={_FILE: source, "clippy.toml": "", ".clippy.toml": ""},
        visible=(clippy.sysroot,),
    )


def _linted(program: Lintable, execution: Execution) -> Linted:
    answer = program.source.split("\n")[: program.answer_lines]  # as rustc counts lines
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
    """Return the lint and the program line of a diagnostic; None for any other output line."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    if not isinstance(told, dict) or not isinstance(told.get("code"), dict):
        return None
    span = next((one for one in told.get("spans", ()) if one["is_primary"]), None)
    while span is not None and span["file_name"] != _FILE:  # inside a macro of the standard library
        span = (span.get("expansion") or {}).get("span")
    return None if span is None else (str(told["code"]["code"]), _line(span))


def _line(span: dict[str, Any]) -> int:
    return int(span["line_start"])


# Linking the shared standard library takes half the time.
_FLAGS: Final = (
    *("--edition", "2021", "-C", "debuginfo=0", "-C", "codegen-units=1"),
    *("-C", "prefer-dynamic", "-C", "rpath"),
)
_WITH_WIRE: Final = (*_FLAGS, "--extern", f"{WIRE}=lib{WIRE}.rlib")
# No code of an answer runs before "compiled" is printed.
_COMPILE: Final = """
"$@" -o made main.rs 2>messages || {
  echo "$word refused" >&2
  head -c 4000 messages >&2
  exit 1
}
echo "$word compiled" >&2
"""
_AND_SHOW: Final = f"word=$0{_COMPILE}base64 made"
_AND_RUN: Final = f"word=$0{_COMPILE}exec ./made"
# The shell reads the first line of its input, and the program reads the second before the tests.
_AND_RUN_WITH_INPUT: Final = f"read word{_COMPILE}exec ./made"
_RUN: Final = 'cp tests made && chmod +x made && exec ./made "$0"'
_READ_WORD: Final = """
    let mut word_of_the_check = String::new();
    std::io::stdin().read_line(&mut word_of_the_check).unwrap();
"""
_TELL_WORD: Final = '\n    eprintln!("\\n{} passed", word_of_the_check.trim());\n'
# Since Rust 1.73, the message is on a separate line; before, it was quoted before the location.
_ASSERTION: Final = re.compile(r"panicked at (?:'|[^\n]*\n)assertion ")
_MORE_S: Final = 5.0  # additional time for the tests to notice that the answer has timed out
_MORE_MIB: Final = 128  # additional memory for the tests besides the answer's values
_MOST_KIB: Final = 65_536  # maximum size of a compiled program in base64
_MOST_KNOWN: Final = 1000  # cached compiled tests, 30 kB each
_COMPILING: Final = threading.Lock()
_KNOWN: Final[weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], _Compiled]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RustJob:
    """An answer and its tests.

    Attributes:
        items: the answer's items.
        above: the task's own items above its function.
        tests: the tests: up to the body of their main function, that body, and the rest.
        signature: the requested signature; None if it has other types than plain values.
    """

    items: str
    above: str
    tests: tuple[str, str, str]
    signature: Signature | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RustGraded:
    """The verdict, the compiler's or the panic's message, and the execution of the answer."""

    verdict: Verdict
    detail: str | None
    execution: Execution


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compiled:
    """The compiler's output for trusted source, or the reason why there is none."""

    made: bytes | None
    said: str = ""


def grade_rust(sandbox: Sandbox, toolchain: Toolchain, limits: Limits, job: RustJob) -> RustGraded:
    """Compile and run one answer, and run its tests; safe to call from several threads.

    Raises:
        SetupError: a sandbox could not be made, or the compiler does not work in it.
    """
    if job.signature is None:
        return _graded_together(sandbox, toolchain, limits, job)
    signature = signature_of(job.items, job.signature)
    wire = _wire(sandbox, toolchain, limits)
    source = grader_source(job.above, job.tests, signature)
    tests = _compiled(sandbox, toolchain, limits, source, _WITH_WIRE, wire)
    told, word = secrets.token_hex(16), secrets.token_hex(16)
    program = Program(
        argv=("/bin/sh", "-c", _AND_RUN, told, toolchain.rustc, *_WITH_WIRE),
        files={"main.rs": answer_source(job.items, signature), **wire},
        visible=(toolchain.sysroot,),
    )
    answering, asking = socket.socketpair()
    # A sandbox is killed when the thread that started it ends.
    with answering, asking, ThreadPoolExecutor(1) as pool:
        judging = pool.submit(_run_tests, sandbox, toolchain, tests, word, limits, asking)
        answer = _run(sandbox, program, limits, answering)
        judged = judging.result()
    refused = _refused(answer, told) or (tests.said if tests.made is None else None)
    if refused is not None:
        return RustGraded(verdict=Verdict.COMPILE_ERROR, detail=refused, execution=answer)
    assert judged is not None, "there are tests"
    verdict, detail = _verdict(answer, judged, word)
    return RustGraded(verdict=verdict, detail=detail, execution=answer)


def _run_tests(
    sandbox: Sandbox,
    toolchain: Toolchain,
    tests: _Compiled,
    word: str,
    limits: Limits,
    end: socket.socket,
) -> Execution | None:
    if tests.made is None:
        end.shutdown(socket.SHUT_RDWR)
        return None
    program = Program(
        argv=("/bin/sh", "-c", _RUN, word),
        files={"tests": tests.made},
        visible=(toolchain.sysroot,),
    )
    more = replace(limits, wall_s=limits.wall_s + _MORE_S, memory_mib=limits.memory_mib + _MORE_MIB)
    return _run(sandbox, program, more, end)


def _run(sandbox: Sandbox, program: Program, limits: Limits, end: socket.socket) -> Execution:
    """Run one side, and notify the other when it has ended."""
    try:
        return sandbox.run(replace(program, channel=end.fileno()), limits)
    finally:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _wire(sandbox: Sandbox, toolchain: Toolchain, limits: Limits) -> dict[str, str | bytes]:
    """Return the crate that both sides use, keyed by its file name."""
    source = Path(__file__).with_name("rust_wire.rs").read_text("utf-8")
    flags = (*_FLAGS, "--crate-type", "rlib", "--crate-name", WIRE)
    done = _compiled(sandbox, toolchain, limits, source, flags, {})
    if done.made is None:
        raise SetupError(
            "rustc does not compile what grades Rust answers",
            found=done.said,
            expected="rustc 1.72 or newer with its standard library",
            remedy="rustup default stable",
        )
    return {f"lib{WIRE}.rlib": done.made}


def _compiled(
    sandbox: Sandbox,
    toolchain: Toolchain,
    limits: Limits,
    source: str,
    flags: tuple[str, ...],
    files: Mapping[str, str | bytes],
) -> _Compiled:
    """Compile trusted source, once for each sandbox."""
    with _COMPILING:
        known = _KNOWN.setdefault(sandbox, {})
        found = known.get(key := (toolchain.version, *flags, source))
    if found is not None:
        return found
    word = secrets.token_hex(16)
    program = Program(
        argv=("/bin/sh", "-c", _AND_SHOW, word, toolchain.rustc, *flags),
        files={"main.rs": source, **files},
        visible=(toolchain.sysroot,),
    )
    execution = sandbox.run(program, replace(limits, output_kib=_MOST_KIB))
    if execution.outcome in OF_OUTCOME:  # not cached, since a busy machine may have caused it
        return _Compiled(made=None, said=f"compiling the tests: {execution.outcome.value}")
    refused = _refused(execution, word)
    made = base64.b64decode(execution.stdout) if refused is None else None
    done = _Compiled(made=made, said=refused or "")
    with _COMPILING:
        if len(known) >= _MOST_KNOWN:
            known.pop(next(iter(known)))
        known[key] = done
    return done


def _graded_together(
    sandbox: Sandbox, toolchain: Toolchain, limits: Limits, job: RustJob
) -> RustGraded:
    """Run answer and tests as one program, which prints the secret word at the end of main."""
    head, body, end = job.tests
    word = secrets.token_hex(16)
    program = Program(
        argv=("/bin/sh", "-c", _AND_RUN_WITH_INPUT, "sh", toolchain.rustc, *_FLAGS),
        files={"main.rs": f"{job.items}{head}{_READ_WORD}{body}{_TELL_WORD}{end}"},
        stdin=f"{word}\n{word}\n",
        visible=(toolchain.sysroot,),
    )
    execution = sandbox.run(program, limits)
    refused = _refused(execution, word)
    if refused is not None:
        return RustGraded(verdict=Verdict.COMPILE_ERROR, detail=refused, execution=execution)
    verdict, detail = _verdict(execution, execution, word)
    return RustGraded(verdict=verdict, detail=detail, execution=execution)


def _verdict(answer: Execution, tests: Execution, word: str) -> tuple[Verdict, str | None]:
    """Return the verdict of a compiled program, and the message that supports it.

    Args:
        answer: the execution of the answer.
        tests: the execution of the tests.
        word: the secret word that precedes the verdict; the answer's process does not know it.
    """
    for one in (answer, tests):
        if one.outcome in OF_OUTCOME:
            return OF_OUTCOME[one.outcome], None
    if tests.outcome is Outcome.ok and f"\n{word} passed" in tests.stderr:
        return Verdict.PASSED, None
    if f"\n{word} refused" in tests.stderr:
        return Verdict.EXCEPTION, "it returned no value"
    if "panicked at" in tests.stderr:
        message = tests.stderr[tests.stderr.index("panicked at") :].strip()
        failed = _ASSERTION.match(message)
        return (Verdict.ASSERTION if failed else Verdict.EXCEPTION), message
    return Verdict.EXITED, f"exit code {answer.exit_code}"


def _refused(execution: Execution, word: str) -> str | None:
    """Return the reason why a program was not compiled; None if it was.

    The answer may discover the word, but the first line is printed before any of its code runs.
    """
    if execution.stderr.startswith(f"{word} compiled\n"):
        return None
    if execution.outcome in OF_OUTCOME:
        return f"the compiler passed a limit: {execution.outcome.value}"
    return execution.stderr.partition(f"{word} refused\n")[2].strip()
