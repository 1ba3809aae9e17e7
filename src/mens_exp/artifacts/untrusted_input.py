"""YAML and regular expressions from untrusted files, with limits on time and memory.

YAML aliases let a kilobyte expand to billions of values, and deep nesting exceeds Python's
recursion limit, so both are counted before any object is built. A regular expression may need time
exponential in the length of the text, and `re` cannot be interrupted, so patterns run in a process
that can be killed. PEFT matches with `re`; another engine or a smaller grammar would sometimes give
a different answer. Patterns that consist only of names are matched in this process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import yaml

from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_YAML_NODES: Final = 100_000  # the largest run configuration has about 500
MAX_YAML_DEPTH: Final = 100
_OPEN: Final = 0  # the size of a collection that is still open
_MOST_DIGITS: Final = 4_300  # Python's own limit; base-60 numbers take quadratic time
# Longer integers can be chosen to have equal hashes, and a mapping with such keys takes quadratic
# time. The longest integers in settings are 64-bit seeds.
_MOST_WHOLE_DIGITS: Final = 20
_WHOLE: Final = re.compile(r"[-+]?(?:0x[0-9a-fA-F_]+|0b[01_]+|[0-9_:]+)")
_DIGITS: Final = re.compile(r"[-+0-9a-fA-FxXoO:_.]+")
# The C implementation, if PyYAML was built with libyaml: ten times as fast.
YAML_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# PyYAML's own errors, and those of the constructors of dates, numbers and the like.
_FAILURES: Final = (
    *(yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(AssertionError, RecursionError),
)


def parse_yaml(data: str | bytes, where: str, loader: Any = YAML_LOADER) -> Any:
    """Parse one YAML document as ``yaml.safe_load`` does.

    Args:
        data: the text.
        where: the file, for messages.
        loader: a safe loader, possibly with additional tags.

    Raises:
        DataError: it is not valid YAML, contains itself, or is larger than any configuration.
    """
    try:
        _count(data, where, loader)
        return yaml.load(data, Loader=loader)  # noqa: S506  # one of the safe loaders
    except _FAILURES as error:
        raise DataError(
            "is not valid YAML",
            where=where,
            found=" ".join(str(error).split()) or type(error).__name__,
        ) from error


def _count(data: str | bytes, where: str, loader: Any) -> None:
    """Count the values in a document, with each alias counted at the size of its target."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []  # anchors and prior counts of open ones
    count = 0
    for event in yaml.parse(data, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            count += _repeated(event, sizes, where)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            _check_number(event, where)
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = _OPEN
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor or ""] = count - before
        if count > MAX_YAML_NODES:
            raise _too_much(where, f"more than {MAX_YAML_NODES:,} values, aliases written out")
        if len(open_nodes) > MAX_YAML_DEPTH:
            raise _too_much(where, f"nested more than {MAX_YAML_DEPTH} deep")


def _repeated(event: yaml.AliasEvent, sizes: dict[str, int], where: str) -> int:
    """Return the size of an alias's target."""
    size = sizes.get(event.anchor or "", 1)
    if size == _OPEN:
        raise DataError("a value contains itself", where=where, found=f"*{event.anchor}")
    return size


def _check_number(event: yaml.ScalarEvent, where: str) -> None:
    if event.implicit[0] and len(event.value) > _MOST_DIGITS and _DIGITS.fullmatch(event.value):
        raise _too_much(where, f"a number of {len(event.value):,} digits")
    most = _MOST_WHOLE_DIGITS
    if event.implicit[0] and len(event.value) > most + 1 and _WHOLE.fullmatch(event.value):
        raise _too_much(where, f"a whole number of more than {most} digits: {event.value[:60]}")


def _too_much(where: str, found: str) -> DataError:
    return DataError(
        "the YAML is too large for a configuration",
        where=where,
        found=found,
        expected=f"at most {MAX_YAML_NODES:,} values, nested at most {MAX_YAML_DEPTH} deep, and "
        f"whole numbers of at most {_MOST_WHOLE_DIGITS} digits",
    )


_MOST_S: Final = 5  # processor time for all matches of one file, or for one search
_MOST_WALL_S: Final = 60  # per match, if the system cannot limit processor time
_MOST_BYTES: Final = 2**30  # of memory
_MOST_COMPARED: Final = 10_000_000  # characters; a search may start anywhere, at 1 ns each
MAX_PATTERNS: Final = 10_000  # of one file; adapters of AdaLoRA have one for each module
_MOST_PATTERN: Final = 100_000  # characters; compiling some takes quadratic time
# Names, `.` (any character), `\.`, and the ends of a text: no backtracking possible.
_NAMES: Final = re.compile(r"\^?(?:[\w.-]|\\\.)*\$?")
_PEFT: Final = re.compile(r"\(\.\*\\\.\)\?\((?P<names>.*)\)\$", re.DOTALL)
_SOURCE: Final = """
import json, re, signal, sys, time
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
except (ImportError, ValueError, OSError):
    pass
known = {}
has_timer = hasattr(signal, "setitimer")
if has_timer:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
for line in sys.stdin.buffer:
    begun = time.process_time()
    if has_timer:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    how, patterns, text = json.loads(line)
    found = [] if how == "compile" else None
    for number, pattern in enumerate(patterns):
        problem = None
        try:
            if pattern not in known:
                if len(known) == 20_000:  # searches come in any number
                    known.clear()
                known[pattern] = re.compile(pattern)
            if how != "compile" and getattr(known[pattern], how)(text) is not None:
                found = number
                break
        except (re.error, OverflowError, RecursionError) as error:
            problem = str(error)
        except MemoryError:
            sys.exit(1)
        if how == "compile":
            found.append(problem)
    reply = json.dumps([found, time.process_time() - begun]) + "\\n"
    sys.stdout.buffer.write(reply.encode())
    sys.stdout.buffer.flush()
"""


def pattern_problems(patterns: Sequence[str], where: str) -> list[str | None]:
    """Return, for each string, the reason why it is not a regular expression; None if it is one.

    Args:
        patterns: the strings.
        where: the file that contains them; the patterns of a file share one time limit.

    Raises:
        DataError: compiling them takes too long, or there are too many.
    """
    if len(patterns) > MAX_PATTERNS:
        raise DataError(
            "the file has too many patterns",
            where=where,
            found=f"{len(patterns):,}",
            expected=f"at most {MAX_PATTERNS:,}",
            remedy="name modules in one pattern with |, or drop those that match none",
        )
    found: dict[int, str | None] = {
        number: f"it has more than {_MOST_PATTERN:,} characters"
        for number, pattern in enumerate(patterns)
        if len(pattern) > _MOST_PATTERN
    }
    asked = [n for n, one in enumerate(patterns) if n not in found and _plain(one) is None]
    if asked:
        told = _WORKER.ask("compile", [patterns[number] for number in asked], "", where)
        found |= dict(zip(asked, told, strict=True))
    return [found.get(number) for number in range(len(patterns))]


def pattern_problem(pattern: str, where: str) -> str | None:
    """Return the reason why a string is not a regular expression, or None if it is one.

    Raises:
        DataError: compiling it takes too long.
    """
    return pattern_problems([pattern], where)[0]


def first_match(patterns: Sequence[str], text: str, where: str) -> int | None:
    """Return the number of the first pattern that ``re.match`` finds at the start of a text.

    Args:
        patterns: regular expressions, for which `pattern_problems` returns None.
        text: the text.
        where: the file that contains the patterns, which share one time limit.

    Raises:
        DataError: it takes too much time or memory.
    """
    asked, plain = [], None
    for number, pattern in enumerate(patterns):
        compiled = _plain(pattern)
        if compiled is None:
            asked.append(number)
        elif compiled.match(text):
            plain = number
            break
    if asked:  # all in one request: a round trip takes longer than a match
        several = [patterns[number] for number in asked]
        found: int | None = _WORKER.ask("match", several, text, where)
        if found is not None:
            return asked[int(found)]
    return plain


def pattern_matches(pattern: str, text: str, where: str) -> bool:
    """Return whether ``re.match`` finds a pattern at the start of a text; see `first_match`."""
    return first_match([pattern], text, where) is not None


def pattern_searches(pattern: str, text: str, where: str) -> bool:
    """Return whether ``re.search`` finds a pattern anywhere in a text.

    Each search has its own time limit, because a file may apply it to any number of answers.

    Raises:
        DataError: it takes too much time or memory.
    """
    compiled = _plain(pattern)
    if compiled is not None and len(pattern) * len(text) <= _MOST_COMPARED:
        return compiled.search(text) is not None
    return _WORKER.ask("search", [pattern], text, where) is not None


@functools.lru_cache(maxsize=16_384)
def _plain(pattern: str) -> re.Pattern[str] | None:
    """Return a pattern of names, compiled; None for any other, which the process matches."""
    return re.compile(pattern) if _is_plain(pattern) else None


def _is_plain(pattern: str) -> bool:
    r"""Return whether a pattern consists only of names, also in PEFT's ``(.*\.)?(names)$``."""
    form = _PEFT.fullmatch(pattern)
    return _NAMES.fullmatch(pattern if form is None else form["names"]) is not None


class _Worker:
    """A process that matches patterns; started on first use, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._used_s: Counter[str] = Counter()

    def ask(self, how: str, patterns: Sequence[str], text: str, where: str) -> Any:
        """Return the answer of the process."""
        with self._lock:
            is_over = self._used_s[where] > _MOST_S
            reply = None if is_over else self._answer([how, patterns, text])
            if reply is None:
                if how != "search":
                    self._used_s[where] = _MOST_S + 1
                raise _too_long(patterns[0], where)
            found, used_s = reply
            if how != "search":
                self._used_s[where] += used_s
        return found

    def _answer(self, asked: list[Any]) -> Any:
        """Ask the process; None if it was killed before it answered."""
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
        # After a fork, the pipes belong to the parent process, and must not be written to.
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
        """Stop the process, if this process has started one."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "both are pipes"
            try:
                pipe.close()
            except OSError:  # unread input
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
