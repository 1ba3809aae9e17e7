"""The program that runs tests and gives the verdict; it never sees an answer's code.

It runs in a sandbox (`grading.py` starts it once) and forks for each answer. In the fork, the
answer's names used by the tests are proxies: a call goes to the process that runs the answer
(`answer_side.py`), and the result is reconstructed as an exact builtin, or stays a handle. A handle
never receives the value that a test compares it with, so an object that claims to equal everything
equals only other objects of the answer.
"""

from __future__ import annotations

import ast
import builtins
import collections
import datetime as dt
import decimal
import fractions
import gc
import importlib
import json
import marshal
import os
import resource
import signal
import socket
import sys
import types
from typing import Any, NoReturn, cast

_OFTEN = ("copy", "functools", "itertools", "math", "random", "re", "string", "typing")
_MOST_BYTES = 64 * 2**20  # per message
_DEEP = 3000  # recursion limit of the tests; an answer has Python's default
_UNARY = frozenset(
    f"__{name}__"
    for name in (
        *("call", "len", "iter", "next", "reversed", "getitem", "setitem", "delitem", "bool"),
        *("int", "float", "index", "complex", "round", "enter", "exit", "str", "repr"),
        *("neg", "pos", "abs", "invert"),
    )
)
_EQUALITY = frozenset({"__eq__", "__ne__"})
_NUMERIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_BINARY = frozenset(f"__{side}{name}__" for side in ("", "r", "i") for name in _NUMERIC)
_BETWEEN = _BINARY | frozenset({"__lt__", "__le__", "__gt__", "__ge__"})
_OF_LIBRARY: dict[str, Any] = {
    "fractions.Fraction": fractions.Fraction,
    "decimal.Decimal": decimal.Decimal,
    "collections.deque": collections.deque,
    "datetime.date": dt.date,
    "datetime.timedelta": dt.timedelta,
}
_NAMES_OF_LIBRARY: dict[Any, str] = {kind: name for name, kind in _OF_LIBRARY.items()}


class RefusedError(Exception):
    """The answer's process wrote an invalid value."""


class EndedError(Exception):
    """The answer's process has ended."""


class Handle:
    """A proxy of an object in the answer's process."""

    __slots__ = ("_Handle__connection", "_Handle__number")

    def __init__(self, connection: Connection, number: int) -> None:
        """Store the object's number under names that its own attributes do not have."""
        object.__setattr__(self, "_Handle__connection", connection)
        object.__setattr__(self, "_Handle__number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_Handle__"):
            raise AttributeError(name)
        return self.__connection.request("get", self, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self.__connection.request("set", self, (name, value))

    def __instancecheck__(self, one: Any) -> bool:
        is_one = isinstance(one, Handle) and number_of(one) is not None
        return is_one and bool(self.__connection.request("isinstance", None, (one, self)))

    __hash__ = object.__hash__


def number_of(handle: Handle) -> int:
    """Return the object's number in the answer's process."""
    return int(object.__getattribute__(handle, "_Handle__number"))


def _through(name: str) -> Any:
    def method(self: Handle, *arguments: Any, **named: Any) -> Any:
        connection = object.__getattribute__(self, "_Handle__connection")
        operation = "call" if name == "__call__" else name
        return connection.request(operation, self, arguments, named)

    return method


def _between(name: str) -> Any:
    """Return an operator that is forwarded only if both operands are the answer's objects."""
    asked = _through(name)

    def method(self: Handle, other: Any) -> Any:
        return asked(self, other) if isinstance(other, Handle) else NotImplemented

    return method


class Connection:
    """The socket to the answer's process, and the handles that each side holds."""

    def __init__(self, one: socket.socket, stop: Any, *, of_class: bool) -> None:
        """Start without handles."""
        self.socket = one
        self.stop = stop  # reports a verdict and exits; the tests could catch an exception
        self.of_class = of_class  # the task is a class, and tests check its operators
        self.kinds: dict[Any, type] = {}
        self.handles: dict[int, Any] = {}
        self.given: list[Any] = []
        self.raised: dict[Any, type[BaseException]] = {}

    def request(self, operation: str, target: Any, arguments: Any, named: Any = None) -> Any:
        """Let the answer's process perform an operation; return or raise its result."""
        sender = Sender(self)
        error = None
        sent_target = sender.value(target)
        sent = sender.value(tuple(arguments))
        sent_named = {name: sender.value(value) for name, value in (named or {}).items()}
        try:
            self._write((operation, sent_target, sent, sent_named))
            message = self._read()
            while message[0] == "c" and len(message) == 3:
                self._call_back(*message[1:])
                message = self._read()
            value, error = self._received(message, Maker(self, sender.known))
        except RefusedError as problem:
            self.stop("refused", str(problem), None)
        except EndedError:
            self.stop("ended", "", None)
        if error is not None:
            raise error
        return value

    def _received(self, message: Any, maker: Maker) -> tuple[Any, BaseException | None]:
        if message[0] == "v" and len(message) == 3:
            maker.change(message[1])
            return maker.value(message[2]), None
        if message[0] != "e" or len(message) != 5:
            raise RefusedError("no reply")
        _, names, text, changed, args = message
        maker.change(changed)
        return None, self._error(names, text, maker.value(args))

    def _call_back(self, number: Any, sent: Any) -> None:
        if type(number) is not int or not 0 <= number < len(self.given):
            raise RefusedError("no such function")
        arguments = Maker(self, []).value(sent)
        if type(arguments) is not tuple:
            raise RefusedError("no arguments")
        try:
            reply: Any = (True, Sender(self).value(self.given[number][0](*arguments)), ())
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            reply = (False, Sender(self).value(error.args), tuple(names))
        self._write(reply)

    def error_class(self, names: Any) -> type[BaseException]:
        """Return the builtin exception, or a subclass of the nearest one with the given name."""
        if type(names) is not list or not all(type(name) is str for name in names):
            raise RefusedError("no exception")
        key = tuple(names)
        if key not in self.raised:
            known = [getattr(builtins, n[1:], None) for n in names if n.startswith("*")]
            base = next((k for k in known if isinstance(k, type) and _raises(k)), Exception)
            own = names and not names[0].startswith("*")
            made = type(names[0], (base,), {"__module__": "solution"}) if own else base
            self.raised[key] = made
        return self.raised[key]

    def _error(self, names: Any, text: Any, args: Any) -> BaseException:
        kind = self.error_class(names)
        if type(text) is not str or type(args) is not tuple:
            raise RefusedError("no exception")
        try:
            error = kind(*args)
            if str(error) == text:
                return error
        except Exception:  # this class cannot be constructed from its arguments
            pass
        made: Any = type(
            kind.__name__, (kind,), {"__str__": lambda _: text, "__module__": "solution"}
        )
        error = made.__new__(made, *args)
        error.args = args
        return cast("BaseException", error)

    def handle(self, number: Any, name: Any, own_equality: Any, offers: Any) -> Any:
        """Return the proxy of an object; each object has only one."""
        if type(number) is not int or type(name) is not str or type(offers) is not list:
            raise RefusedError("no handle")
        if number not in self.handles:
            key = (name, own_equality is True, tuple(map(str, offers)))
            if key not in self.kinds:
                self.kinds[key] = self._kind(*key)
            self.handles[number] = self.kinds[key](self, number)
        return self.handles[number]

    def _kind(self, name: str, own_equality: bool, offers: tuple[str, ...]) -> type:
        members: dict[str, Any] = {"__slots__": (), "__hash__": object.__hash__}
        own_operators = {*_UNARY, *(_BINARY if self.of_class else ())}
        if self.of_class:
            own_operators.add("__contains__")  # otherwise `in` would compare each element here
        for one in offers:
            if one in own_operators:
                members[one] = _through(one)
            elif one in _BETWEEN or (one in _EQUALITY and own_equality):
                members[one] = _between(one)
        return type(name, (Handle,), members)

    def _write(self, message: Any) -> None:
        data = marshal.dumps(message)
        try:
            self.socket.sendall(len(data).to_bytes(4, "little") + data)
        except OSError as error:
            raise EndedError from error

    def _read(self) -> Any:
        size = int.from_bytes(self._exactly(4), "little")
        if size > _MOST_BYTES:
            raise RefusedError(f"a value of more than {_MOST_BYTES // 2**20} MiB")
        try:
            message = json.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise RefusedError("no JSON, or nested too deeply") from error
        if type(message) is not list or not message:
            raise RefusedError("no message")
        return message

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = self.socket.recv(min(size, 2**20))
            except OSError as error:
                raise EndedError from error
            if not part:
                raise EndedError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _raises(kind: type) -> bool:
    return issubclass(kind, BaseException)


class Sender:
    """Encodes the values of one request in a form that can be marshalled."""

    def __init__(self, connection: Connection) -> None:
        """Start without known containers."""
        self.connection = connection
        self.known: list[Any] = []
        self.numbers: dict[int, int] = {}

    def value(self, value: Any) -> Any:
        """Encode a value as a scalar or a tagged tuple."""
        kind: Any = type(value)
        if kind in {int, str, float, bool, type(None), bytes}:
            return value
        if kind is tuple:
            return ("t", *map(self.value, value))
        if kind in {list, dict, set, bytearray}:
            return self._container(value, kind)
        if kind is frozenset:
            return ("z", *map(self.value, value))
        if kind is range:
            return ("g", value.start, value.stop, value.step)
        if kind is complex:
            return ("c", value.real, value.imag)
        if isinstance(value, Handle):
            return ("h", number_of(value))
        if kind in _NAMES_OF_LIBRARY:
            return ("o", _NAMES_OF_LIBRARY[kind], *map(self.value, _arguments(value)))
        return self._other(value)

    def _container(self, value: Any, kind: Any) -> Any:
        number = self.numbers.get(id(value))
        if number is not None:
            return ("r", number)
        self.numbers[id(value)] = len(self.known)
        self.known.append(value)
        if kind is bytearray:
            return ("a", bytes(value))
        parts = [one for pair in value.items() for one in pair] if kind is dict else value
        tag = {list: "l", dict: "d", set: "s"}[kind]
        return (tag, *map(self.value, parts))

    def _other(self, value: Any) -> Any:
        bases: tuple[Any, ...] = (str, int, float, list, tuple, dict, set)
        for base in bases:  # such as a Counter
            if isinstance(value, base):
                return self.value(base(value))
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return ("n", name)
        if isinstance(value, collections.abc.Iterator):
            return self._given(value.__next__, value, "iterator")
        if callable(value):
            return self._given(value, value, "function")
        raise TypeError(f"a {type(value).__name__} of the tests cannot be given to the answer")

    def _given(self, call: Any, value: Any, kind: str) -> Any:
        self.connection.given.append((call, value))
        return ("k", len(self.connection.given) - 1, kind)


def _arguments(value: Any) -> list[Any]:
    if isinstance(value, fractions.Fraction):
        return [value.numerator, value.denominator]
    if isinstance(value, dt.date):
        return [value.year, value.month, value.day]
    if isinstance(value, dt.timedelta):
        return [value.days, value.seconds, value.microseconds]
    return [list(value)] if isinstance(value, collections.deque) else [str(value)]


class Maker:
    """Reconstructs the values of one reply; invalid values are refused."""

    def __init__(self, connection: Connection, known: list[Any]) -> None:
        """Register the arguments of the request under their numbers."""
        self.connection = connection
        self.known: dict[int, Any] = dict(enumerate(known))

    def value(self, sent: Any) -> Any:
        """Return an exact builtin, or a handle."""
        if type(sent) in {int, str, bool, type(None)}:
            return sent
        if type(sent) is not list or not sent or type(sent[0]) is not str:
            raise RefusedError("no value")
        make = _MAKERS.get(sent[0])
        if make is None:
            raise RefusedError("no such type")
        try:
            return make(self, *sent[1:])
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise RefusedError(f"no value: {error}") from error

    def change(self, sent: Any) -> None:
        """Apply the answer's changes of its copies to the arguments."""
        if sent is None:
            return
        if type(sent) is not list:
            raise RefusedError("no arguments")
        for one in sent:
            self.value(one)

    def _container(self, number: Any, kind: Any, parts: Any) -> Any:
        if type(number) is not int:
            raise RefusedError("no container")
        made = self.known.setdefault(number, kind())
        if type(made) is not kind:
            raise RefusedError("another container")
        values = [self.value(one) for one in parts]
        made.clear()
        if kind is list:
            made.extend(values)
        elif kind is set:
            made.update(values)
        else:
            made.update(zip(values[::2], values[1::2], strict=True))
        return made

    def list_(self, number: Any, *parts: Any) -> Any:
        """Return the list with this number, with these items."""
        return self._container(number, list, parts)

    def dict_(self, number: Any, *parts: Any) -> Any:
        """Return the dictionary with this number, from alternating keys and values."""
        return self._container(number, dict, parts)

    def set_(self, number: Any, *parts: Any) -> Any:
        """Return the set with this number."""
        return self._container(number, set, parts)

    def bytearray_(self, number: Any, text: Any) -> Any:
        """Return the bytearray with this number."""
        made = self.known.setdefault(number, bytearray())
        if type(made) is not bytearray:
            raise RefusedError("another container")
        made[:] = bytes.fromhex(text)
        return made

    def of_library(self, name: Any, *parts: Any) -> Any:
        """Return a value of the standard library."""
        return _OF_LIBRARY[name](*map(self.value, parts))

    def of_builtins(self, name: Any) -> Any:
        """Return a builtin type or constant; functions are refused."""
        found = getattr(builtins, name)
        return found if isinstance(found, type) or name in _CONSTANTS else self._no_value()

    def given(self, number: Any) -> Any:
        """Return the tests' own object that the answer was given."""
        return self.connection.given[number][1] if number >= 0 else self._no_value()

    def error_class(self, number: Any, names: Any) -> Any:
        """Return the class of an exception."""
        kind = self.connection.error_class(list(self.value(names)))
        self.connection.handles.setdefault(number, kind)
        return kind

    def _no_value(self) -> NoReturn:
        raise RefusedError("no value")


_CONSTANTS = frozenset({"Ellipsis", "NotImplemented"})
_MAKERS: dict[str, Any] = {
    "i": lambda _, text: int(text, 16),
    "f": lambda _, text: float.fromhex(text),
    "b": lambda _, text: bytes.fromhex(text),
    "c": lambda _, real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "t": lambda maker, *parts: tuple([maker.value(one) for one in parts]),
    "z": lambda maker, *parts: frozenset([maker.value(one) for one in parts]),
    "g": lambda maker, *parts: range(*map(maker.value, parts)),
    "r": lambda maker, number: maker.known[number],
    "l": Maker.list_,
    "d": Maker.dict_,
    "s": Maker.set_,
    "a": Maker.bytearray_,
    "o": Maker.of_library,
    "n": Maker.of_builtins,
    "k": Maker.given,
    "x": Maker.error_class,
    "h": lambda maker, *parts: maker.connection.handle(*parts),
}


def judged(job: Any, one: socket.socket, stop: Any) -> tuple[str, str, int | None]:
    """Run the tests of a job; return an exception's name, message and line, or ``passed``."""
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    space = vars(module)
    line = None
    try:
        for code in job["before"]:
            exec(compile(code, "before.py", "exec"), space)  # trusted code of the task
        tests = ast.parse(job["tests"])
        connection = Connection(one, stop, of_class=job["of_class"])
        wanted = _free(tests) - set(space) - set(dir(builtins)) | {job["entry_point"]}
        found = connection.request("load", None, tuple(sorted(wanted)))
        if type(found) is not dict:
            stop("refused", "no names", None)
        space.update({name: found[name] for name in wanted if name in found})
        exec(compile(tests, "tests.py", "exec"), space)  # likewise
    except BaseException as error:  # also SystemExit
        frame = error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == "tests.py":
                line = frame.tb_lineno
            frame = frame.tb_next
        return f"raised {type(error).__name__[:80]}", _said(error), line
    return "passed", "", None


def _free(tests: ast.Module) -> set[str]:
    """Return the names that tests use but do not bind, which the answer must provide."""
    names = [node for node in ast.walk(tests) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tests):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return {node.id for node in names} - bound


def _said(error: BaseException) -> str:
    try:
        return str(error)[:400].encode("utf-8", "replace").decode()
    except Exception:  # raised by the exception's own __str__
        return ""


def judge_one(result: socket.socket, one: socket.socket) -> None:
    """Read a job, run it within its limits, and write the verdict."""
    with result.makefile("rb") as file:
        job = marshal.loads(file.read(int.from_bytes(file.read(4), "little")))
    signal.setitimer(signal.ITIMER_REAL, job["wall_s"])
    memory = job["memory_mib"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"] + 1))
    sys.setrecursionlimit(_DEEP)
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # discard the tests' output
        os.dup2(quiet, fd)

    def stop(*verdict: Any) -> NoReturn:
        result.sendall(json.dumps(verdict).encode())
        os._exit(0)

    stop(*judged(job, one, stop))


def main() -> None:
    """Fork for each pair of sockets that arrives: one for the verdict, one to the answer."""
    control = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name in _OFTEN:  # once, instead of in every fork
        importlib.import_module(name)
    gc.freeze()  # keeps the pages shared with the forks
    while True:
        data, fds, _, _ = socket.recv_fds(control, 16, 2)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            try:
                judge_one(*(socket.socket(fileno=fd) for fd in fds))
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main()
