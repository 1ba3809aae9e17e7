"""Grading by values and proxies gives the verdict of tests and answer run as one program."""

from __future__ import annotations

import os
import time

import pytest

from mens_exp.errors import SetupError
from mens_exp.evals import grading
from mens_exp.evals.grading import ProgramTask, Verdict, check_all
from mens_exp.sandbox.program import Limits
from mens_exp.sandbox.supervise import Unsafe

LIMITS = Limits(memory_mib=256, wall_s=5, cpu_s=5, output_kib=64)


def task_of(tests, *, reference="", code="", setup=""):
    return ProgramTask(
        id="T", prompt="", entry_point="f", tests=tests, reference=reference, code=code, setup=setup
    )


def checked(sandbox, tests, answer, limits=LIMITS, **fields):
    (found,) = check_all(sandbox, [task_of(tests, **fields)], [answer], limits)
    return found


# The tests, an answer that passes them, and one that fails them.
HONEST = {
    "scalars": (
        (
            "assert f(2) == 4 and type(f(2)) is int\n"
            "assert f(True) is True\nassert f('a') == 'aa'\n"
            "assert f(1.5) == 3.0 and type(f(1.5)) is float"
        ),
        "def f(x): return x if x is True else x * 2",
        "def f(x): return x + x",
    ),
    "large integers": ("assert f(3) == 2**5000 + 3", "def f(x): return 2**5000 + x", "def f(x): 0"),
    "floats to the last bit": (
        (
            "import math\nassert f() == [0.1, -0.0, math.inf]\n"
            "assert math.copysign(1, f()[1]) == -1\n"
            "assert math.isnan(f(1))"
        ),
        "def f(x=0): return float('nan') if x else [0.1, -0.0, float('inf')]",
        "def f(x=0): return float('nan') if x else [0.1, 0.0, float('inf')]",
    ),
    "containers": (
        "assert f() == ([1, (2, {3})], {'a': b'x', 2: None}, frozenset([4]), 1j, range(3))",
        "def f(): return [1, (2, {3})], {'a': b'x', 2: None}, frozenset([4]), 1j, range(3)",
        "def f(): return [1, [2, {3}]], {'a': b'x', 2: None}, frozenset([4]), 1j, range(3)",
    ),
    "half a character": ("assert f() == chr(0xD800)", "def f(): return chr(0xD800)", "def f(): 0"),
    "the order of a dictionary": (
        "assert list(f()) == ['b', 'a']",
        "def f(): return {'b': 1, 'a': 2}",
        "def f(): return {'a': 2, 'b': 1}",
    ),
    "subclasses are their values": (
        "assert f('aab') == {'a': 2, 'b': 1}",
        "from collections import Counter\ndef f(x): return Counter(x)",
        "from collections import Counter\ndef f(x): return Counter(x[1:])",
    ),
    "fractions, decimals, dates": (
        (
            "from fractions import Fraction\nimport datetime\nfrom decimal import Decimal\n"
            "assert f() == [Fraction(1, 3), Decimal('0.10'), datetime.date(2020, 2, 29)]\n"
            "assert f()[0] * 3 == 1"
        ),
        (
            "import datetime, decimal, fractions\n"
            "def f(): return [fractions.Fraction(1, 3), decimal.Decimal('0.1'),"
            " datetime.date(2020, 2, 29)]"
        ),
        (
            "import datetime, decimal, fractions\n"
            "def f(): return [1 / 3, decimal.Decimal('0.1'), datetime.date(2020, 2, 29)]"
        ),
    ),
    "what it contains twice is one": (
        "one, other = f()\none.append(1)\nassert other == [1]",
        "def f():\n    one = []\n    return one, one",
        "def f(): return [], []",
    ),
    "a list that contains itself": (
        "one = f()\nassert one[0] is one",
        "def f():\n    one = []\n    one.append(one)\n    return one",
        "def f(): return [[]]",
    ),
    "arguments are changed": (
        (
            "given = {'a': [3, 1], 'b': {1}}\nassert f(given) is None\n"
            "assert given == {'a': [1, 3], 'b': {1, 2}, 'c': given['a']}\n"
            "assert given['c'] is given['a']"
        ),
        "def f(x):\n    x['a'].sort()\n    x['b'].add(2)\n    x['c'] = x['a']",
        "def f(x):\n    x = {'a': [1, 3], 'b': {1, 2}, 'c': [1, 3]}",
    ),
    "arguments stay as they are": (
        "given = [3, 1]\nassert f(given) == [1, 3]\nassert given == [3, 1]",
        "def f(x): return sorted(x)",
        "def f(x):\n    x.sort()\n    return x",
    ),
    "an argument is given back": (
        "given = [1]\nassert f(given) is given",
        "def f(x): return x",
        "def f(x): return list(x)",
    ),
    "an argument changed by what raises": (
        (
            "given = [1]\ntry:\n    f(given)\nexcept ValueError:\n    assert given == []\n"
            "else:\n    assert False"
        ),
        "def f(x):\n    x.clear()\n    raise ValueError",
        "def f(x):\n    raise ValueError",
    ),
    "keywords": (
        "assert f(1, *[2], c=3, **{'d': 4}) == [1, 2, 3, 4]",
        "def f(a, b, *, c, d): return [a, b, c, d]",
        "def f(a, b, *, d, c): return [a, b, d, c]",
    ),
    "state between calls": (
        "assert [f(), f(), f()] == [1, 2, 3]",
        "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
        "def f(): return 1",
    ),
    "iterators are lazy": (
        (
            "import itertools\nassert list(itertools.islice(f(), 3)) == [0, 1, 2]\n"
            "one = f()\nassert next(one) == 0 and iter(one) is one and list(zip(one, 'ab')) == "
            "[(1, 'a'), (2, 'b')]"
        ),
        "import itertools\ndef f(): return itertools.count()",
        "def f(): return iter([0, 1])",
    ),
    "a generator is sent to, and ends": (
        (
            "one = f()\nassert next(one) == 1\nassert one.send(5) == 6\n"
            "try:\n    next(one)\nexcept StopIteration as end:\n    assert end.value == 7\n"
            "else:\n    assert False"
        ),
        "def f():\n    got = yield 1\n    yield got + 1\n    return 7",
        "def f():\n    got = yield 1\n    yield got + 1\n    return 8",
    ),
    "functions of the tests are called": (
        (
            "calls = []\n"
            "assert f(lambda x: calls.append(x) or -x, [1, 3, 2]) == [3, 2, 1]\n"
            "assert sorted(calls) == [1, 2, 3]"
        ),
        "def f(key, items): return sorted(items, key=key)",
        "def f(key, items): return sorted(items, reverse=True)",
    ),
    "what functions of the tests raise arrives": (
        "def bad(x):\n    raise KeyError(x)\nassert f(bad) == ('k', 4)",
        (
            "def f(call):\n    try:\n        call(4)\n    except KeyError as e:\n"
            "        return 'k', e.args[0]"
        ),
        "def f(call):\n    try: call(4)\n    except ValueError as e: return 'k', 4",
    ),
    "iterators of the tests are read": (
        "assert f(iter([1, 2, 3])) == 6\nassert f(x * x for x in range(3)) == 5",
        "def f(x): return sum(x)",
        "def f(x): return 6",
    ),
    "functions of the answer": (
        (
            "twice = f(2)\nassert twice(4) == 8 and callable(twice)\n"
            "assert list(map(twice, [1, 2])) == [2, 4]\nassert twice.__name__ == 'inner'"
        ),
        "def f(n):\n    def inner(x): return n * x\n    return inner",
        "def f(n):\n    def inner(x): return 2 + x\n    return inner",
    ),
    "both sides call each other": (
        "assert f(lambda g: g(3) + 1) == 7",
        "def f(call): return call(lambda x: 2 * x)",
        "def f(call): return call(lambda x: x)",
    ),
    "types": (
        "assert f('3', int) == 3\nassert f('3', float) == 3.0\nassert f(1, type) is int",
        "def f(x, kind): return kind(x)",
        "def f(x, kind): return 3",
    ),
    "exceptions": (
        (
            "for given, kind, args in [('3', KeyError, ('lost', 3)), ('x', ValueError, None)]:\n"
            "    try:\n        f(given)\n    except kind as error:\n"
            "        assert args is None or error.args == args\n"
            "        assert args or 'invalid literal' in str(error)\n    else: assert False"
        ),
        "def f(x): raise KeyError('lost', int(x))",
        "def f(x): raise LookupError('lost', int(x))",
    ),
    "its own exceptions": (
        (
            "try:\n    f()\nexcept Odd as error:\n    assert str(error) == 'odd: 3'\n"
            "    assert isinstance(error, ValueError)\nelse:\n    assert False"
        ),
        (
            "class Odd(ValueError):\n    def __str__(self): return f'odd: {self.args[0]}'\n"
            "def f(): raise Odd(3)"
        ),
        (
            "class Odd(TypeError):\n    def __str__(self): return f'odd: {self.args[0]}'\n"
            "def f(): raise Odd(3)"
        ),
    ),
    "classes that the tests use": (
        (
            "pairs = [Pair(3, 1), Pair(1, 2)]\nassert f(pairs).a == 1\n"
            "assert isinstance(pairs[0], Pair)"
            "\nassert f(pairs) is pairs[1]"
        ),
        (
            "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
            "def f(x): return min(x, key=lambda one: one.a)"
        ),
        (
            "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
            "def f(x): return min(x, key=lambda one: one.b)"
        ),
    ),
    "attributes": (
        (
            "one = f()\none.value += 1\nassert one.value == 4 and one.shown() == 'value 4'\n"
            "assert not hasattr(one, 'other')"
        ),
        (
            "class One:\n    value = 3\n    def shown(self): return f'value {self.value}'\n"
            "def f(): return One()"
        ),
        (
            "class One:\n    value = other = 3\n    def shown(self): return f'value {self.value}'\n"
            "def f(): return One()"
        ),
    ),
    "operators between its own objects": (
        (
            "assert f(1) + f(2) == f(3)\nassert f(1) != f(2)\n"
            "assert sorted([f(2), f(1)]) == [f(1), f(2)]"
        ),
        (
            "import functools\n@functools.total_ordering\nclass N:\n"
            "    def __init__(self, n): self.n = n\n"
            "    def __add__(self, other): return N(self.n + other.n)\n"
            "    def __eq__(self, other): return isinstance(other, N) and self.n == other.n\n"
            "    def __lt__(self, other): return self.n < other.n\n"
            "def f(n): return N(n)"
        ),
        (
            "class N:\n    def __init__(self, n): self.n = n\n"
            "    def __add__(self, other): return N(self.n + other.n)\ndef f(n): return N(n)"
        ),
    ),
    "a context, an index, a length, a text": (
        (
            "with f() as one:\n    assert (len(one), one[1], list(one), str(one), bool(one)) == "
            "(2, 'b', ['a', 'b'], 'ab', True)\n    one[1] = 'c'\n"
            "assert 'c' in one and one[1] == 'c'"
        ),
        (
            "class L:\n    def __init__(self): self.x = ['a', 'b']\n"
            "    def __enter__(self): return self\n    def __exit__(self, *a): pass\n"
            "    def __len__(self): return len(self.x)\n"
            "    def __getitem__(self, i): return self.x[i]\n"
            "    def __setitem__(self, i, v): self.x[i] = v\n    def __str__(self): return 'ab'\n"
            "def f(): return L()"
        ),
        "def f(): return ['a', 'b']",
    ),
    "members of an enumeration": (
        "assert f() is f() and f().name == 'RED' and f().value == 3",
        "import enum\nclass C(enum.Enum):\n    RED = 3\ndef f(): return C.RED",
        "import enum\nclass C(enum.Enum):\n    RED = 4\ndef f(): return C.RED",
    ),
    "deep recursion": (
        "assert f(900) == 900",
        "def f(n): return n and 1 + f(n - 1)",
        "def f(n): 0",
    ),
    "nested values": (
        "one = f(200)\nfor _ in range(199):\n    (one,) = one\nassert one == []",
        "def f(n): return [f(n - 1)] if n > 1 else []",
        "def f(n): return [f(n - 1)] if n > 2 else []",
    ),
    "a method of class Solution": (
        "assert f(2) == 4",
        "class Solution:\n    def f(self, x): return x * 2",
        "class Solution:\n    def f(self, x): return x * 3",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_answer_is_judged_as_if_it_were_one_program_with_the_tests(sandbox, name):
    """The correct answer passes; the wrong answer fails an assertion."""
    tests, right, wrong = HONEST[name]
    tasks = [task_of(f"{tests}\n")] * 2
    good, bad = check_all(sandbox, tasks, [right, wrong], LIMITS)
    assert good.verdict is Verdict.PASSED, good
    assert bad.verdict in {Verdict.ASSERTION, Verdict.EXCEPTION}, bad
    space = {}
    exec(good.source, space)  # the oracle: plain Python in one namespace
    exec(tests, space)


POINT = """\
class f:
    def __init__(self, x): self.x = x
    def __mul__(self, n): return f(self.x * n)
    def __contains__(self, n): return n == self.x
    def __eq__(self, other): return True
"""


def test_operators_of_a_class_that_is_asked_for_are_its_own(sandbox):
    """Operators of a requested class are tested; those of a function's result are not called."""
    tests = "assert (f(2) * 3).x == 6\nassert 2 in f(2) and 3 not in f(2)\n"
    assert checked(sandbox, tests, POINT, reference=POINT).verdict is Verdict.PASSED
    assert checked(sandbox, tests, POINT).verdict is Verdict.EXCEPTION
    found = checked(sandbox, "assert f(2) == 2\n", POINT, reference=POINT)
    assert found.verdict is Verdict.ASSERTION


def test_helpers_of_the_prompt_are_the_tasks_own(sandbox):
    """An answer cannot redefine a helper of the prompt, such as `poly` of HumanEval/32."""
    prompt = 'import math\ndef poly(x):\n    return x - 3\n\n\ndef f():\n    """Solve poly."""\n'
    tests = "def check(f):\n    assert math.fabs(poly(f())) < 1e-4\n\ncheck(f)\n"
    assert checked(sandbox, tests, "    return 3\n", code=prompt).verdict is Verdict.PASSED
    cheat = "def poly(x):\n    return 0\n\ndef f():\n    return 1\n"
    assert checked(sandbox, tests, cheat, code=prompt).verdict is Verdict.ASSERTION


def test_an_answer_cannot_bind_the_names_of_the_tests(sandbox):
    """An answer cannot rebind builtins or names that the tests or the setup define."""
    tests = "def same(a, b):\n    return a == b\nassert same(abs(f()), helped(3))\n"
    cheat = "abs = same = helped = lambda *_: True\ndef f(): return True\n"
    setup = "def helped(x):\n    return x + 1\n"
    assert checked(sandbox, tests, cheat, setup=setup).verdict is Verdict.ASSERTION
    assert checked(sandbox, tests, "def f(): return -4", setup=setup).verdict is Verdict.PASSED


# What an answer that found the channel may write into it: replies to `load`, then to a call.
FORGE = """
import gc, json
def f(): pass
for one in gc.get_objects():
    if type(one).__name__ == "Channel":
        channel = one
        break
import __main__
for reply in REPLIES:
    channel.write(reply if type(reply) is str else json.dumps(reply))
"""
HANDLE = ["h", 0, "Same", True, ["__call__", "__eq__", "__lt__", "__sub__", "__class__", "__len__"]]
FORGERIES = {
    "names of the tests": [["v", None, ["d", 0, "same", ["n", "bool"], "f", HANDLE]]],
    "names of Python": [["v", None, ["d", 0, "abs", ["n", "bool"], "__builtins__", None]]],
    "an object that equals": [["v", None, ["d", 0, "f", HANDLE]], ["v", None, HANDLE]],
    "no names": [["v", None, HANDLE]],
    "an operator of its own making": [
        ["v", None, ["h", 0, "X", True, ["__getattribute__", "__init_subclass__", "__del__"]]]
    ],
    "a function that was not given": [["c", 0, ["t"]]],
    "a function by a negative number": [["c", -1, ["t"]]],
    "a float of JSON": [["v", None, 1.5]],
    "a constant of JSON": ['["v",null,NaN]'],
    "no type": [["v", None, ["z", ["l", 0]]]],
    "a builtin that is no type": [["v", None, ["n", "eval"]]],
    "a module's function": [["v", None, ["o", "os.system", "true"]]],
    "a reference to nothing": [["v", None, ["r", 7]]],
    "a change of another kind": [["v", [["d", 0]], None]],
    "no message": [[]],
    "an unknown word": [["passed"]],
    "a verdict": [["passed", "", None]],
    "no JSON": ["passed"],
    "an exception of no class": [["e", [1], "", None, ["t"]]],
    "an exception that ends": [["e", ["*SystemExit", "*BaseException"], "0", None, ["t", 0]]],
    "an exception of the grader's": [["e", ["Ended", "*Exception"], "", None, ["t"]]],
    "half a message": ["[" * 100_000],
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_reply_is_never_a_verdict(sandbox, name):
    """A reply that is not a value is refused, even if the tests catch every exception."""
    tests = (
        "def same(a, b):\n    return a == b\n\n"
        "try:\n    found = f([1])\nexcept BaseException:\n    found = 48213\n"
        "assert same(found, 48213) and found is not None and abs(f([2])) == 7\n"
    )
    answer = FORGE.replace("REPLIES", repr(FORGERIES[name]))
    answer = f"if True:\n    {answer.replace(chr(10), chr(10) + '    ')}\nf = f\n"
    found = checked(sandbox, tests, answer)
    assert found.verdict in {Verdict.EXCEPTION, Verdict.ASSERTION, Verdict.EXITED}, found


def test_the_grader_is_started_once_and_again_when_it_is_gone(sandbox):
    """One process grades all answers, and is restarted if it was killed."""
    assert checked(sandbox, "assert f() == 1\n", "def f(): return 1").verdict is Verdict.PASSED
    first = grading.grader_of(sandbox)
    assert grading.grader_of(sandbox) is first
    first.close()
    assert not first.is_running
    assert checked(sandbox, "assert f() == 1\n", "def f(): return 1").verdict is Verdict.PASSED
    assert grading.grader_of(sandbox) is not first


def test_a_fork_neither_ends_nor_keeps_the_grader():
    """Closing the grader in a forked child does not stop it, and a child does not keep it alive."""
    grader = grading.Grader(Unsafe())
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        grader.close()
        os.read(reading, 1)
        os._exit(0)
    try:
        time.sleep(0.2)
        assert grader.is_running
        began = time.monotonic()
        grader.close()
        assert not grader.is_running
        assert time.monotonic() - began < 4
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
        os.close(reading)


def test_a_grader_that_does_not_start_is_an_error(monkeypatch):
    """A failed start is an error and not a verdict on the answer."""
    monkeypatch.setattr(grading, "_PYTHON", ("/bin/false",))
    with pytest.raises(SetupError, match="runs tests did not start"):
        checked(Unsafe(), "assert f() == 1\n", "def f(): return 1")


@pytest.mark.parametrize(
    ("tests", "answer", "verdict"),
    [
        ("list(f())\n", "def f():\n    while True: yield 'x' * 10**7", Verdict.MEMORY),
        ("while True: f()\n", "def f(): pass", Verdict.TIMEOUT),
        ("while True: pass\n", "def f(): pass", Verdict.TIMEOUT),
        ("f()\n", "def f():\n    while True: pass", Verdict.TIMEOUT),
        ("assert f() == 1\n", "def f(): return 'x' * (65 * 2**20)", Verdict.EXCEPTION),
    ],
    ids=["tests swell", "many calls", "tests wait", "a call waits", "a large value"],
)
def test_tests_have_limits_too(sandbox, tests, answer, verdict):
    """An answer that makes the tests wait or use too much memory fails; the next one is graded."""
    wall_s = 20 if verdict is Verdict.MEMORY else 1.5
    short = Limits(memory_mib=256, wall_s=wall_s, cpu_s=wall_s, output_kib=64)
    assert checked(sandbox, tests, answer, short).verdict is verdict
    assert checked(sandbox, "assert f() == 1\n", "def f(): return 1").verdict is Verdict.PASSED
