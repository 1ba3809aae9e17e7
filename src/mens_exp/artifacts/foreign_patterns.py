"""Regular expressions that come from files, matched in a process that can be ended.

Python's `re` looks for a match in a time that may double with each character of the text, and
cannot be interrupted. PEFT matches its patterns with `re`, so another engine with a timeout, or a
smaller grammar, would sometimes give another answer. Patterns that consist of names only are
matched in this process.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from typing import Any, Final

from mens_exp.errors import DataError

__all__ = ["matches", "problem_of", "searches"]

_MOST_S: Final = 5  # processor time for all matches of one file, or for one search
_MOST_WALL_S: Final = 60  # for one of them, where the system has no limit on processor time
_MOST_BYTES: Final = 2**30  # of memory
_MOST_PATTERN: Final = 100_000  # characters; compiling takes the square of some
# Names, `.` (which stands for any character), `\.`, and the ends of a text: nothing to try twice.
_NAMES: Final = re.compile(r"\^?(?:[\w.-]|\\\.)*\$?")
_PEFT: Final = re.compile(r"\(\.\*\\\.\)\?\((?P<names>.*)\)\$", re.DOTALL)
_SOURCE: Final = """
import json, re, signal, sys, time
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
except (ImportError, ValueError, OSError):
    pass
has_timer = hasattr(signal, "setitimer")
if has_timer:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
for line in sys.stdin.buffer:
    begun = time.process_time()
    if has_timer:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    how, pattern, text = json.loads(line)
    try:
        compiled = re.compile(pattern)
        found = None if how == "compile" else getattr(compiled, how)(text) is not None
    except (re.error, OverflowError, RecursionError) as error:
        found = str(error)
    except MemoryError:
        sys.exit(1)
    reply = json.dumps([found, time.process_time() - begun]) + "\\n"
    sys.stdout.buffer.write(reply.encode())
    sys.stdout.buffer.flush()
"""


def problem_of(pattern: str, where: str) -> str | None:
    """Return why a text is not a regular expression, or None if it is one.

    Raises:
        DataError: compiling it takes too long.
    """
    if len(pattern) > _MOST_PATTERN:
        return f"it has more than {_MOST_PATTERN:,} characters"
    found = None if _is_plain(pattern) else _WORKER.ask("compile", pattern, "", where)
    return found if isinstance(found, str) else None


def matches(pattern: str, text: str, where: str) -> bool:
    """Tell whether ``re.match`` finds a pattern at the beginning of a text.

    Args:
        pattern: a regular expression, for which `problem_of` returns None.
        text: the text.
        where: the file that holds the pattern; the patterns of a file share their time.

    Raises:
        DataError: it takes too long, or too much memory.
    """
    return _found("match", pattern, text, where)


def searches(pattern: str, text: str, where: str) -> bool:
    """Tell whether ``re.search`` finds a pattern anywhere in a text.

    Each search has the whole time, because a file does not say how many answers it is applied to.

    Raises:
        DataError: it takes too long, or too much memory.
    """
    return _found("search", pattern, text, where)


def _found(how: str, pattern: str, text: str, where: str) -> bool:
    if _is_plain(pattern):
        return getattr(re, how)(pattern, text) is not None
    return _WORKER.ask(how, pattern, text, where) is True


def _is_plain(pattern: str) -> bool:
    r"""Tell whether a pattern holds names alone, also in PEFT's ``(.*\.)?(names)$``."""
    form = _PEFT.fullmatch(pattern)
    return _NAMES.fullmatch(pattern if form is None else form["names"]) is not None


class _Worker:
    """A process that matches patterns; it is started on first use, and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._used_s: Counter[str] = Counter()

    def ask(self, how: str, pattern: str, text: str, where: str) -> Any:
        """Return what the process finds."""
        with self._lock:
            is_over = self._used_s[where] > _MOST_S
            reply = None if is_over else self._answer([how, pattern, text])
            if reply is None:
                if how != "search":
                    self._used_s[where] = _MOST_S + 1
                raise _too_long(pattern, where)
            found, used_s = reply
            if how != "search":
                self._used_s[where] += used_s
        return found

    def _answer(self, asked: list[str]) -> Any:
        """Ask the process; None where it was ended before it had an answer."""
        process = self._started()
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        timer = threading.Timer(_MOST_WALL_S, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(asked).encode("ascii") + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:
            reply = b""
        finally:
            timer.cancel()
        if reply:
            return json.loads(reply)
        self.end()
        return None

    def _started(self) -> subprocess.Popen[bytes]:
        # A fork has the pipes of the process that it came from, and must not write into them.
        if self._process is None or self._owner != os.getpid():
            self._owner = os.getpid()
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and source
                [sys.executable, "-I", "-S", "-c", _SOURCE, str(_MOST_S), str(_MOST_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def end(self) -> None:
        """End the process, if this process has started one."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "both are pipes"
            try:
                pipe.close()
            except OSError:  # what it did not take
                continue
        process.wait()


_WORKER: Final = _Worker()
atexit.register(_WORKER.end)


def _too_long(pattern: str, where: str) -> DataError:
    return DataError(
        "the regular expression takes too long, or too much memory",
        where=where,
        found=pattern[:200],
        expected=f"patterns that take at most {_MOST_S} s of processor time in all, and 1 GiB",
        remedy="rewrite it without a repetition inside another, such as (a+)+",
    )
