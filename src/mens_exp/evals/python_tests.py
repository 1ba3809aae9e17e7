"""Python answers and their tests, run together as one program.

The program says itself how it ended, in a line that begins with a word of its own: an answer that
leaves before its tests have run has not passed them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.digest import digest
from mens_exp.evals.answer_quality import parsed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.evals.running import Runner
    from mens_exp.sandbox.program import Execution, Program

__all__ = ["Checked", "check_all"]

_HARNESS: Final = """\
import json, sys, traceback

def _last_line(error):
    return traceback.format_exception_only(type(error), error)[-1].strip()[:500]

def _check(word, tests):
    namespace, stage, done = {"__name__": "solution"}, "", {"passed": False}
    try:
        with open("answer.py", encoding="utf-8") as file:
            exec(compile(file.read(), "answer.py", "exec"), namespace)
        for stage in tests:
            exec(compile(stage, "<test>", "exec"), namespace)
        done["passed"] = True
    except BaseException as error:
        done.update(test=stage, error=_last_line(error))
    sys.stdout.flush()
    print("\\n" + word + json.dumps(done), flush=True)

_check(*json.loads(sys.stdin.read()))
"""
_OUTCOMES: Final = {
    "timeout": "it ran longer than its time limit",
    "cpu_time": "it used more processor time than it may",
    "memory": "it used more memory than it may",
    "output": "it wrote more output than it may",
    "killed_signal": "it was killed by a signal",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What came of one answer.

    Attributes:
        outcome: ``passed``, ``syntax_error``, ``failed_test``, ``exception`` before any test,
            ``left`` before they had run, or the limit that it met.
        error: what is wrong with it; None where nothing is.
    """

    outcome: str
    error: str | None = None

    @property
    def is_passed(self) -> bool:
        """Whether every test passed."""
        return self.outcome == "passed"


def check_all(
    codes: Sequence[str], tests: Sequence[Sequence[str]], runner: Runner
) -> list[Checked]:
    """Run each answer with its tests; what does not parse is not run.

    Args:
        codes: Python source.
        tests: statements that pass silently, each after the ones before it.
        runner: where they run.
    """
    checked: list[Checked | None] = []
    programs: list[Program] = []
    for code, own in zip(codes, tests, strict=True):
        tree = parsed(code)
        if isinstance(tree, str):
            checked.append(Checked(outcome="syntax_error", error=tree))
        else:
            checked.append(None)
            programs.append(_program(code, own))
    results = iter(zip(programs, runner.run(programs), strict=True))
    return [one if one is not None else _read(*next(results)) for one in checked]


def _program(code: str, tests: Sequence[str]) -> Program:
    from mens_exp.sandbox.program import Program, python_program

    plain = python_program(_HARNESS, stdin=json.dumps([_word(code, tests), list(tests)]))
    return Program(
        argv=plain.argv,
        files={**plain.files, "answer.py": code},
        stdin=plain.stdin,
        env=plain.env,
    )


def _word(code: str, tests: Sequence[str]) -> str:
    """Return what begins the line that says how it ended; no answer can know its own digest."""
    return digest([code, list(tests)])[:24] + " "


def _read(program: Program, execution: Execution) -> Checked:
    outcome = execution.outcome.value
    if outcome in _OUTCOMES:
        return Checked(outcome=outcome, error=_OUTCOMES[outcome])
    word, _ = json.loads(program.stdin)
    last = next((x for x in reversed(execution.stdout.splitlines()) if x.startswith(word)), None)
    if last is None:
        return Checked(outcome="left", error="it ended before its tests had run")
    said = json.loads(last.removeprefix(word))
    if said["passed"]:
        return Checked(outcome="passed")
    if not said["test"]:
        return Checked(outcome="exception", error=said["error"])
    return Checked(outcome="failed_test", error=f"This test fails: {said['test']}\n{said['error']}")
