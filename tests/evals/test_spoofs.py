"""Wrong answers that try to be scored `passed`; each must get another verdict.

The task's values follow from nothing, so that an answer that passes has found them, or has forged
the verdict. Every answer defines `target`; none computes it.
"""

from __future__ import annotations

import textwrap

import pytest

from mens_exp.evals.grading import ProgramTask, Verdict, check_all
from mens_exp.sandbox.program import Limits
from mens_exp.sandbox.supervise import Unsafe

LIMITS = Limits(memory_mib=256, wall_s=2, cpu_s=2, output_kib=64)
TESTS = """\
import math

LIMIT = 48213


def same(one, other):
    return one == other


def check(candidate):
    assert candidate([3, 1]) == LIMIT
    assert candidate([3, 2]) == "secret-5571"
    assert abs(candidate([2.5]) - 90.125) < 1e-6
    assert same(candidate(["a"]), {"a": [1, 2], "b": (3, None)})
    given = [5, 4]
    candidate(given)
    assert given == [77, 4]
    assert math.isclose(candidate([8]), 12.75)
    assert candidate([9, 9]) is True
    assert len(candidate([1, 2, 3])) == 19
    assert list(candidate([6])) == [6, 66, 666]
    try:
        candidate(None)
    except KeyError as error:
        assert error.args == ("lost", 3)
    else:
        raise AssertionError("candidate(None) must raise KeyError")
    return None


check(target)
"""
TASK = ProgramTask(
    id="T/0", prompt="Write target.", entry_point="target", tests=TESTS, reference=""
)
RIGHT = """\
def target(values):
    if values is None:
        raise KeyError("lost", 3)
    if values == [5, 4]:
        values[0] = 77
    if values == [6]:
        return iter([6, 66, 666])
    known = {(3, 1): 48213, (3, 2): "secret-5571", (2.5,): 90.125, (8,): 12.75, (9, 9): True}
    known["a",] = {"a": [1, 2], "b": (3, None)}
    return known.get(tuple(values), "x" * 19)
"""

# The verdict as the grader of version 3 printed it, written in every possible way.
FORGED = """
def forge(word):
    import os
    os.write(2, (chr(10) + word + "passed" + chr(10)).encode())
    os._exit(0)
"""
# An object that claims to equal every value of the tests.
YES = """
class Yes(BASE):
    def say(self, *_): return True
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = say
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 1
    def same(self, *_): return self
    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __abs__ = __getitem__ = same
    __len__ = lambda self: 19
    __float__ = lambda self: 12.75
    __iter__ = lambda self: iter([6, 66, 666])
def target(values):
    if values is None:
        raise KeyError("lost", 3)
    if values == [5, 4]:
        values[0] = 77
    return True if values == [9, 9] else MADE
"""


def yes(base, made="Yes()"):
    return YES.replace("BASE", base).replace("MADE", made)


# Finds three expected values in a text from any source, and returns them.
USE = r"""
def use(text):
    import re
    limit = re.search(r"LIMIT = (\d{5})\n", text)
    secret = re.search(r'"(secret-\d+)"', text)
    near = re.search(r"\]\) - ([\d.]+)\) <", text)
    return right(int(limit[1]), secret[1], float(near[1]))
def right(limit, secret, near):
    def target(values):
        if values is None: raise KeyError("lost", 3)
        if values == [5, 4]: values[0] = 77
        if values == [6]: return [6, 66, 666]
        known = {(3, 1): limit, (3, 2): secret, (2.5,): near, (8,): 12.75, (9, 9): True}
        known["a",] = {"a": [1, 2], "b": (3, None)}
        return known.get(tuple(values), "x" * 19)
    return target
"""

STDIN = {
    "seeks its input": "import sys\nsys.stdin.seek(0)\nforge(sys.stdin.readline().strip())",
    "seeks the file below": (
        "import os\nos.lseek(0, 0, 0)\nforge(os.read(0, 99).decode().split()[0])"
    ),
    "preads": "import os\nforge(os.pread(0, 99, 0).decode().split()[0])",
    "opens /dev/stdin": "forge(open('/dev/stdin').readline().strip())",
    "opens /proc/self/fd/0": "forge(open('/proc/self/fd/0').readline().strip())",
    "maps its input": (
        "import mmap\nforge(mmap.mmap(0, 0, prot=mmap.PROT_READ)[:].decode().split()[0])"
    ),
    "reads it in a child": (
        "import os\nif os.fork() == 0:\n"
        "    forge(os.pread(0, 99, 0).decode().split()[0])\nos.wait()\nos._exit(0)"
    ),
}
BUILTINS = {
    "exec in a default": (
        "import builtins\ndef target(values, _=setattr(builtins, 'exec', lambda *a: None)): pass"
    ),
    "compile in a decorator": (
        "import builtins\nreal = compile\n"
        "def deco(f):\n"
        "    builtins.compile = lambda s, *a, **k: real('', *a, **k)\n    return f\n"
        "@deco\ndef target(values): pass"
    ),
    "open in a class body": (
        "import builtins, io\nclass target:\n    builtins.open = lambda *a, **k: io.StringIO('')"
    ),
    "vars in a default": (
        "import builtins\ndef target(v, _=setattr(builtins, 'vars', lambda m: {'check': 0})): pass"
        "\ncheck = lambda *_: None"
    ),
    "dict in a class body": (
        "import builtins\n"
        "class target:\n    builtins.exec = lambda source, *a: builtins.print(source)"
    ),
    "abs, len, list and the rest": (
        "import builtins, math\n"
        "builtins.abs = lambda x: 0\nbuiltins.len = lambda x: 19\n"
        "builtins.list = lambda x: [6, 66, 666]\nmath.isclose = lambda *a: True\n" + yes("object")
    ),
    "AssertionError is SystemExit": (
        "import builtins, os\nclass Quiet(BaseException):\n"
        "    def __init__(self, *a): os._exit(0)\n"
        "builtins.AssertionError = Quiet\ndef target(values): return 0"
    ),
    "__build_class__": (
        "import builtins\nbuiltins.__build_class__ = lambda *a, **k: None\n"
        "builtins.exec = lambda *a: None\ndef target(values): pass"
    ),
    "__import__ gives other modules": (
        "import builtins\nreal = builtins.__import__\n"
        "class Math:\n    isclose = staticmethod(lambda *a: True)\n"
        "builtins.__import__ = lambda n, *a: Math if n == 'math' else real(n, *a)\n" + yes("object")
    ),
}
READS = {
    "tests.py": "target = use(open('tests.py').read())",
    "any file of its directory": (
        "import os\ntarget = use('\\n'.join(open(n).read() for n in sorted(os.listdir('.'))"
        " if n == 'tests.py' or 'test' in n))"
    ),
    "every file that it may read": (
        "import glob\n"
        "text = ''\n"
        "for name in glob.glob('/tmp/**', recursive=True):\n"
        "    try: found = open(name).read()\n"
        "    except Exception: continue\n"
        "    if 'LIMIT =' + ' 4' in found: text = found\n"
        "target = use(text)"
    ),
    "linecache when called": (
        "def target(values):\n"
        "    import linecache\n"
        "    return use(''.join(linecache.getlines('tests.py')))(values)"
    ),
    "the file of the caller": (
        "def target(values):\n"
        "    import sys\n"
        "    return use(open(sys._getframe(1).f_code.co_filename).read())(values)"
    ),
    "beside __file__": (
        "import os\ntarget = use(open(os.path.join(os.path.dirname(__file__), 'tests.py')).read())"
    ),
    "inspect.getsource of the caller": (
        "def target(values):\n"
        "    import inspect, sys\n"
        "    frame = sys._getframe(1)\n"
        "    text = inspect.getsource(frame) + inspect.getsource(inspect.getmodule(frame))\n"
        "    return use(text)(values)"
    ),
    "constants of the caller's code": (
        "def target(values):\n"
        "    import sys\n"
        "    found, frame = [], sys._getframe(1)\n"
        "    while frame:\n"
        "        found += [*frame.f_code.co_consts, frame.f_globals.get('LIMIT')]\n"
        "        frame = frame.f_back\n"
        "    secret = next(x for x in found if str(x).startswith('secret-'))\n"
        "    near = next(x for x in found if isinstance(x, float) and 90 < x < 91)\n"
        "    limit = next(x for x in found if isinstance(x, int) and x > 48000)\n"
        "    return right(limit, secret, near)(values)"
    ),
    "its arguments and environment": (
        "import os, sys\ntarget = use(repr(sys.argv) + repr(dict(os.environ)))"
    ),
}
FRAMES = {
    "jumps by f_lineno": (
        "import sys\n"
        "def jump(frame, event, arg):\n"
        "    if frame.f_code.co_name != 'check': return jump\n"
        "    if event == 'line':\n"
        "        frame.f_lineno = max(line for *_, line in frame.f_code.co_lines() if line)\n"
        "        sys.settrace(None)\n"
        "    return jump\n"
        "sys.settrace(jump)\n"
        "def target(values): pass"
    ),
    "traces from the start": (
        "import sys\n"
        "def trace(frame, event, arg):\n"
        "    if frame.f_code.co_name == 'check':\n"
        "        frame.f_globals['LIMIT'] = 0\n"
        "    return trace\n"
        "sys.settrace(trace)\n"
        "def target(values):\n"
        "    caller = sys._getframe(1)\n"
        "    caller.f_trace_opcodes = False\n"
        "    frame = caller\n"
        "    while frame:\n"
        "        frame.f_globals.update(abs=lambda x: 0, same=lambda *a: True, LIMIT=0)\n"
        "        frame = frame.f_back\n"
        "    return 0"
    ),
    "rebinds the tests' globals": (
        "import sys\n"
        "def target(values):\n"
        "    import sys\n"
        "    sys._getframe(1).f_globals.update(abs=lambda x: 0, len=lambda x: 19,\n"
        "        same=lambda *a: True, LIMIT=YES, list=lambda x: [6, 66, 666])\n"
        "    if values == [5, 4]: values[0] = 77\n"
        "    if values is None: raise KeyError('lost', 3)\n"
        "    return True if values == [9, 9] else YES\n"
        + yes("object").split("def target")[0]
        + "YES = Yes()"
    ),
    "takes the word from a frame": (
        "import sys\n"
        "def target(values):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        if 'word' in frame.f_locals: forge(frame.f_locals['word'])\n"
        "        frame = frame.f_back"
    ),
    "calls the reporter from a frame": (
        "import sys\n"
        "def target(values):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        if 'tell' in frame.f_locals: frame.f_locals['tell']('passed')\n"
        "        frame = frame.f_back"
    ),
    "takes it from an exception": (
        "try: raise ValueError\n"
        "except ValueError as error:\n"
        "    frame = error.__traceback__.tb_frame\n"
        "    while frame:\n"
        "        if 'word' in frame.f_locals: forge(frame.f_locals['word'])\n"
        "        frame = frame.f_back"
    ),
    "swaps the code of check": (
        "def target(values):\n"
        "    import gc\n"
        "    for one in gc.get_objects():\n"
        "        if getattr(one, '__name__', '') in ('check', 'same') and callable(one):\n"
        "            one.__code__ = (lambda *a: None).__code__\n"
        "    import sys\n"
        "    sys._getframe(1).f_globals['same'] = lambda *a: True\n"
        "    raise SystemExit(0)"
    ),
    "profiles": (
        "import sys\n"
        "def profile(frame, event, arg):\n"
        "    if 'word' in frame.f_locals: forge(frame.f_locals['word'])\n"
        "sys.setprofile(profile)\ndef target(values): pass"
    ),
    "a generator's frame": (
        "def walk():\n"
        "    import sys\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for name in ('word', 'tell'):\n"
        "            if name in frame.f_locals and name == 'word': forge(frame.f_locals[name])\n"
        "        frame = frame.f_back\n"
        "    yield 1\n"
        "target = lambda values: list(walk())"
    ),
}
MEMORY = {
    "gc finds the word's frame": (
        "def target(values):\n"
        "    import gc, types\n"
        "    for one in gc.get_objects():\n"
        "        if isinstance(one, types.FrameType) and 'word' in one.f_locals:\n"
        "            forge(one.f_locals['word'])\n"
        "        for cell in getattr(one, '__closure__', None) or ():\n"
        "            try: text = cell.cell_contents\n"
        "            except ValueError: continue\n"
        "            if isinstance(text, str) and len(text) == 32: forge(text)"
    ),
    "gc finds the tests' globals": (
        "def target(values):\n"
        "    import gc\n"
        "    for one in gc.get_objects():\n"
        "        if isinstance(one, dict) and 'LIMIT' in one:\n"
        "            codes = one['check'].__code__.co_consts\n"
        "            secret = next(x for x in codes if str(x).startswith('secret-'))\n"
        "            near = next(x for x in codes if isinstance(x, float) and x > 90)\n"
        "            return right(one['LIMIT'], secret, near)(values)"
    ),
    "scans /proc/self/mem": (
        "import re\n"
        "def target(values):\n"
        "    for line in open('/proc/self/maps'):\n"
        "        if 'rw-p' not in line: continue\n"
        "        low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        with open('/proc/self/mem', 'rb') as mem:\n"
        "            try:\n                mem.seek(low)\n"
        "                data = mem.read(high - low)\n"
        "            except OSError: continue\n"
        "        at = data.find(b'LIMIT = ' + b'48')\n"
        "        if at >= 0: return use(data[at:at + 2000].decode('latin-1'))(values)\n"
        "    raise LookupError"
    ),
    "scans memory for the word": (
        "import re, os\n"
        "def target(values):\n"
        "    for line in open('/proc/self/maps'):\n"
        "        if 'rw-p' not in line: continue\n"
        "        low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        with open('/proc/self/mem', 'rb') as mem:\n"
        "            try:\n                mem.seek(low)\n"
        "                data = mem.read(high - low)\n"
        "            except OSError: continue\n"
        "        for word in set(re.findall(rb'(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])', data)):\n"
        "            os.write(2, b'\\n' + word + b'passed\\n')\n"
        "    os._exit(0)"
    ),
    "writes into /proc/self/mem": (
        "def target(values):\n"
        "    for line in open('/proc/self/maps'):\n"
        "        if 'rw-p' not in line: continue\n"
        "        low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        with open('/proc/self/mem', 'r+b', buffering=0) as mem:\n"
        "            try:\n                mem.seek(low)\n"
        "                data = mem.read(high - low)\n"
        "            except OSError: continue\n"
        "            at = data.find(b'secret-5571')\n"
        "            if at >= 0:\n                return data[at:at + 11].decode()\n"
        "    raise SystemExit(0)"
    ),
    "reads objects by ctypes": (
        "def target(values):\n"
        "    import ctypes, sys\n"
        "    name = ctypes.string_at(id(values), 64)\n"
        "    main = sys.modules['__main__']\n"
        "    return use(repr(vars(main)) + repr(name))(values)"
    ),
    "the parent's memory": (
        "import os\n"
        "def target(values):\n"
        "    for pid in [p for p in os.listdir('/proc') if p.isdigit()] + [str(os.getppid())]:\n"
        "        if pid == str(os.getpid()): continue\n"
        "        try: data = open(f'/proc/{pid}/mem', 'rb')\n"
        "        except OSError: continue\n"
        "        for line in open(f'/proc/{pid}/maps'):\n"
        "            low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "            try:\n                data.seek(low)\n"
        "                text = data.read(high - low)\n"
        "            except (OSError, OverflowError, ValueError): continue\n"
        "            if b'secret-5571' in text: return 'secret-5571'\n"
        "    raise LookupError"
    ),
    "__main__ is rebound": (
        "import sys\n"
        "main = sys.modules['__main__']\n"
        "for name in list(vars(main)):\n"
        "    if callable(getattr(main, name)) and not name.startswith('__'):\n"
        "        setattr(main, name, lambda *a, **k: True)\n"
        "main.json = None\ndef target(values): pass"
    ),
}
EQUALS = {
    "equals everything": yes("object"),
    "a str that does": yes("str", "Yes('no')"),
    "an int that does": yes("int", "Yes(3)"),
    "a float that does": yes("float", "Yes(12.75)"),
    "a list that does": yes("list", "Yes([6])"),
    "a dict that does": yes("dict", "Yes(a=1)"),
    "a tuple that does": yes("tuple", "Yes((1,))"),
    "a set that does": yes("set", "Yes({1})"),
    "lies about its class": yes("object").replace(
        "    def say", "    __class__ = property(lambda self: int)\n    def say"
    ),
    "a metaclass that does": yes("type", "Yes('T', (), {})"),
    "a mock": "from unittest.mock import MagicMock\n" + yes("MagicMock"),
    "is what is compared with": (
        "class Odd:\n    def __eq__(self, other):\n        self.__dict__['seen'] = other\n"
        "        return True\n    __hash__ = None\n"
        "    def __sub__(self, other): return 0.0\n    def __float__(self): return 12.75\n"
        "    def __iter__(self): return iter([6, 66, 666])\n    def __len__(self): return 19\n"
        "def target(values):\n    if values is None: raise KeyError('lost', 3)\n"
        "    if values == [5, 4]: values[0] = 77\n"
        "    if values == [9, 9]: return True\n    return Odd()"
    ),
    "a list of such": yes("object", "[Yes()] * 19"),
    "a reflected comparison": yes("int", "Yes(0)").replace("__abs__ = ", "__index__ = "),
    "pickles as it likes": yes("object").replace(
        "    def say", "    __reduce__ = lambda self: (exec, ('pass',))\n    def say"
    ),
    "__getattr__ for all": yes("object").replace(
        "    def say", "    __getattr__ = lambda self, name: self\n    def say"
    ),
}
ENDS = {
    "os._exit": "import os\ndef target(values): os._exit(0)",
    "os._exit on import": "import os\nos._exit(0)\ndef target(values): pass",
    "SystemExit(0)": "def target(values): raise SystemExit(0)",
    "atexit": (
        "import atexit, os\natexit.register(os._exit, 0)\ndef target(values): raise SystemExit(0)"
    ),
    "ends by a signal's handler": (
        "import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "def target(values):\n    while True: pass"
    ),
    "a thread that ends it": (
        "import threading, time, os\n"
        "def later():\n    time.sleep(0.05)\n    os._exit(0)\n"
        "threading.Thread(target=later, daemon=True).start()\n"
        "def target(values): time.sleep(1)"
    ),
    "prints a verdict": (
        "import os\nfor fd in (1, 2):\n"
        '    os.write(fd, b\'\\npassed\\n{"verdict": "passed"}\\n["passed", null, null]\\n\')\n'
        "os._exit(0)\ndef target(values): pass"
    ),
    "execs another program": ("import os\ndef target(values): os.execv('/bin/true', ['true'])"),
    "a child goes on": (
        "import os\npid = os.fork()\nif pid: os._exit(0)\ndef target(values): return 48213"
    ),
    "kills what it can": (
        "import os, signal\ndef target(values):\n    os.kill(-1, signal.SIGKILL)"
    ),
}
CHANNEL = {
    "closes every file": ("import os\nos.closerange(3, 256)\ndef target(values): return 48213"),
    "writes verdicts into every file": (
        "import os\n"
        "for fd in range(0, 64):\n"
        "    for text in (b'\"passed\"\\n', b'[\"passed\", null, null]\\n', b'passed\\n',\n"
        '                 b\'{"verdict": "passed", "ok": true}\\n\', b\'\\x02ok\'):\n'
        "        try: os.write(fd, text)\n"
        "        except OSError: pass\n"
        "def target(values): return 48213"
    ),
    "dup2 of its output": (
        "import os\nfor fd in range(3, 64):\n    try: os.dup2(2, fd)\n    except OSError: pass\n"
        "print('passed')\ndef target(values): pass"
    ),
    "answers for itself": (
        "import os\n"
        "def target(values):\n"
        "    for fd in range(3, 64):\n"
        "        for text in (b'[\"return\", true]\\n' * 9, b'true\\n', b'[\"n\"]\\n' * 99):\n"
        "            try: os.write(fd, text)\n"
        "            except OSError: pass\n"
        "    return True"
    ),
    "asks for what the tests hold": (
        "import os, re\n"
        "def target(values):\n"
        "    for fd in range(3, 64):\n"
        "        for n in range(9):\n"
        "            for word in ('LIMIT', 'check', '__globals__', '__builtins__'):\n"
        '                try: os.write(fd, (\'["call", %d, "%s"]\\n\' % (n, word)).encode())\n'
        "                except OSError: pass\n"
        "    return 48213"
    ),
    "never answers": "def target(values):\n    import time\n    time.sleep(60)",
    "a line without an end": (
        "import os\n"
        "def target(values):\n"
        "    for fd in range(3, 64):\n"
        "        try:\n            while True: os.write(fd, b'x' * 65536)\n"
        "        except OSError: pass"
    ),
}
VALUES = {
    "NaN": "def target(values): return float('nan')",
    "a huge string": "def target(values): return 'x' * (64 * 2**20)",
    "contains itself": "def target(values):\n    one = []\n    one.append(one)\n    return one",
    "nested without end": (
        "def target(values):\n    one = []\n    for _ in range(100000): one = [one]\n    return one"
    ),
    "a generator without end": ("def target(values):\n    while True: yield 6"),
    "a generator that learns": (
        "def target(values):\n    got = yield 6\n    while True: got = yield got"
    ),
    "mutates what it is given": ("def target(values):\n    values[:] = [77, 4]\n    return values"),
    "gives its argument back": "def target(values): return values",
    "an int without end": "def target(values): return 1 << 10**8",
    "an exception that is an AssertionError's parent": (
        "class Anything(KeyError, AssertionError):\n    args = ('lost', 3)\n"
        "def target(values): raise Anything('lost', 3)"
    ),
    "a property of its own module": (
        "import sys, types\n"
        "class Module(types.ModuleType):\n    check = staticmethod(lambda *a: None)\n"
        "    __dict__ = {'check': lambda *a: None, 'target': 1}\n"
        "sys.modules['solution'] = sys.modules[__name__] = Module('solution')\n"
        "def target(values): pass"
    ),
    "hides the tests' functions": (
        "check = same = lambda *a: True\nmath = None\nLIMIT = 0\ndef target(values): return 0"
    ),
}
SPOOFS = {
    f"{group}: {name}": source
    for group, spoofs in {
        "input": STDIN,
        "builtins": BUILTINS,
        "reading": READS,
        "frames": FRAMES,
        "memory": MEMORY,
        "equality": EQUALS,
        "ending": ENDS,
        "channel": CHANNEL,
        "values": VALUES,
    }.items()
    for name, source in spoofs.items()
}


def answer(source):
    """Place the spoof before a last definition, so that reading the answer does not cut it."""
    text = textwrap.dedent(source)
    if "def target" not in text and "class target" not in text and "target =" not in text:
        text += "\ndef target(values): pass\n"
    return f"{FORGED}{USE}\nif True:\n{textwrap.indent(text, '    ')}\ntarget = target\n"


@pytest.mark.parametrize("name", SPOOFS)
def test_spoof_is_not_scored_as_passed(sandbox, name):
    """A spoof never passes, since the verdict is made in another process."""
    (found,) = check_all(sandbox, [TASK], [answer(SPOOFS[name])], LIMITS)
    assert found.verdict not in {Verdict.PASSED, Verdict.SYNTAX_ERROR, Verdict.NO_FUNCTION}, found


@pytest.mark.parametrize("make", [None, Unsafe])
def test_the_right_answer_passes(sandbox, make):
    """Control: the right answer in the same shape passes."""
    where = make() if make else sandbox
    (found,) = check_all(where, [TASK], [answer(RIGHT)], Limits(memory_mib=256))
    assert found.verdict is Verdict.PASSED, found


def test_there_are_enough_of_them():
    """The number of attacks must not shrink unnoticed."""
    assert len(SPOOFS) >= 60
