"""Run a Rust answer in one process, and its tests in another that never saw its code.

Both are compiled where they run, each in a fresh sandbox, and joined by a socket. The tests' process
gives the verdict, with a word that it alone knows. Where the function takes or gives what is no
plain value (`rust_values.py`), answer and tests are one program, whose verdict is *trusting*.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mens_exp.evals.program_checks import OF_OUTCOME, Verdict
from mens_exp.evals.rust_values import answer_files, grader_files, signature_of
from mens_exp.sandbox.program import Outcome, Program

if TYPE_CHECKING:
    from mens_exp.evals.rust_values import Signature
    from mens_exp.sandbox.program import Execution, Limits, Sandbox
    from mens_exp.sandbox.rust_toolchain import Toolchain

__all__ = ["RustGraded", "RustJob", "grade_rust"]

# The shared library links in half the time. No code of an answer runs before "compiled" is said.
_COMPILE: Final = """\
"$0" --edition 2021 -C debuginfo=0 -C codegen-units=1 -C prefer-dynamic -C rpath \
  -o main main.rs 2>messages || {
  echo "$word refused" >&2
  head -c 4000 messages >&2
  exit 1
}
echo "$word compiled" >&2
exec ./main
"""
_WITH_WORD: Final = f"word=$1\n{_COMPILE}"
# The shell keeps the first line of its input, the program reads the second before the tests.
_WITH_INPUT: Final = f"read word\n{_COMPILE}"
_READ_WORD: Final = """
    let mut word_of_the_check = String::new();
    std::io::stdin().read_line(&mut word_of_the_check).unwrap();
"""
_TELL_WORD: Final = '\n    eprintln!("\\n{} passed", word_of_the_check.trim());\n'
# The message has a line of its own since Rust 1.73; before, it stood in quotes before the place.
_ASSERTION: Final = re.compile(r"panicked at (?:'|[^\n]*\n)assertion ")
_MORE_S: Final = 5.0  # for the tests' process to find that the answer's time was over
_MORE_MIB: Final = 128  # its own, beside the values of the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class RustJob:
    """An answer and its tests.

    Attributes:
        items: the answer's.
        above: those of the task, which stand above its function.
        tests: up to the body of their main function, that body, and what is left.
        signature: the one asked for; None where it is of no plain values.
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


def grade_rust(
    sandbox: Sandbox, toolchain: Toolchain, limits: Limits, job: RustJob
) -> RustGraded:
    """Compile and run one answer and its tests; safe to call from several threads.

    Raises:
        SetupError: a sandbox could not be made.
    """
    word, told = secrets.token_hex(16), secrets.token_hex(16)
    if job.signature is None:
        execution = sandbox.run(_together(job, toolchain, word), limits)
        return _judged(execution, execution, word, word)
    signature = signature_of(job.items, job.signature)
    answer = _program(toolchain, answer_files(job.items, signature), told)
    tests = _program(toolchain, grader_files(job.above, job.tests, signature, word), word)
    more = replace(
        limits, wall_s=limits.wall_s + _MORE_S, memory_mib=limits.memory_mib + _MORE_MIB
    )
    answering, asking = socket.socketpair()
    # Each sandbox lives no longer than the thread that starts it.
    with answering, asking, ThreadPoolExecutor(1) as pool:
        judging = pool.submit(_run, sandbox, tests, more, asking)
        execution = _run(sandbox, answer, limits, answering)
        return _judged(execution, judging.result(), told, word)


def _run(sandbox: Sandbox, program: Program, limits: Limits, end: socket.socket) -> Execution:
    """Run one side, and tell the other that it has ended."""
    try:
        return sandbox.run(replace(program, channel=end.fileno()), limits)
    finally:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _program(toolchain: Toolchain, files: dict[str, str], word: str) -> Program:
    return Program(
        argv=("/bin/sh", "-c", _WITH_WORD, toolchain.rustc, word),
        files=files,
        visible=(toolchain.sysroot,),
    )


def _together(job: RustJob, toolchain: Toolchain, word: str) -> Program:
    """Return a program that has both, whose main function tells that it came to its end."""
    head, body, end = job.tests
    return Program(
        argv=("/bin/sh", "-c", _WITH_INPUT, toolchain.rustc),
        files={"main.rs": "".join([job.items, head, _READ_WORD, body, _TELL_WORD, end])},
        stdin=f"{word}\n{word}\n",
        visible=(toolchain.sysroot,),
    )


def _judged(answer: Execution, tests: Execution, told: str, word: str) -> RustGraded:
    verdict, detail = _verdict(answer, tests, told, word)
    return RustGraded(verdict=verdict, detail=detail, execution=answer)


def _verdict(
    answer: Execution, tests: Execution, told: str, word: str
) -> tuple[Verdict, str | None]:
    """Return the verdict, and the message that it rests on.

    Args:
        answer: the execution of the answer.
        tests: the execution of the tests.
        told: with this word the answer's compiler says how it went; the answer may find it.
        word: with this one the tests say so, and the verdict; the answer never has it.
    """
    for one, its in ((answer, told), (tests, word)):
        refused = _refused(one, its)
        if refused is not None:
            return Verdict.COMPILE_ERROR, refused
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
    """Return why a program was not compiled; None where it was."""
    if execution.stderr.startswith(f"{word} compiled\n"):
        return None
    said = execution.stderr.partition(f"{word} refused\n")[2].strip()
    if execution.outcome in OF_OUTCOME:
        return f"the compiler passed a limit: {execution.outcome.value}"
    return said
