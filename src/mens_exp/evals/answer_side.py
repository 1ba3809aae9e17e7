"""The program that runs an answer: it returns values to the grader, and has no access to tests.

It runs alone in a sandbox (`grading.py` sends its code), and imports as little as possible, because
it is started for every answer. Its input is a socket. The grader's requests are marshalled and
trusted here. Replies are JSON of the plain types that `grader_side.py` reconstructs.
"""

from __future__ import annotations

import builtins
import marshal
import posix
import sys
from _json import encode_basestring_ascii as quoted

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing`, `os` or `json` would take as long as starting Python
    from typing import Any, NoReturn

_SMALL = 2**53  # larger integers are sent in hexadecimal: parsing decimals takes quadratic time
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
# Operators that a handle may offer; the grader decides which of them it forwards.
_OPERATORS = (
    *("call", "len", "iter", "next", "reversed", "getitem", "setitem", "delitem", "contains"),
    *("bool", "int", "float", "index", "complex", "round", "enter", "exit", "str", "repr"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"),
    *(f"{side}{name}" for side in ("", "r", "i") for name in ("add", "sub", "mul", "matmul")),
    *(f"{side}{name}" for side in ("", "r", "i") for name in ("truediv", "floordiv", "mod")),
    *(f"{side}{name}" for side in ("", "r", "i") for name in ("pow", "and", "or", "xor")),
    *(f"{side}{name}" for side in ("", "r", "i") for name in ("lshift", "rshift", "divmod")),
)
_SPECIAL = tuple(f"__{name}__" for name in _OPERATORS)


class Channel:
    """The socket to the grader, and the objects to which the grader holds handles."""

    def __init__(self, fd: int) -> None:
        """Start without handles."""
        self.fd = fd
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}  # by id; `objects` keeps the object alive

    def read(self) -> Any:
        """Return the next request; exit if the grader has closed the connection."""
        size = int.from_bytes(self._exactly(4), "little")
        return marshal.loads(self._exactly(size))  # the grader is trusted

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = posix.read(self.fd, min(size, 2**20))
            if not part:
                end()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def write(self, text: str) -> None:
        """Send one message."""
        data = text.encode("ascii")
        left = memoryview(len(data).to_bytes(4, "little") + data)
        while left:
            left = left[posix.write(self.fd, left) :]

    def number_of(self, value: Any) -> int:
        """Return the handle's number of an object; each object has only one."""
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return number


def end() -> NoReturn:
    """Exit without waiting for threads, because the tests are over."""
    try:  # noqa: SIM105  # contextlib is not imported
        sys.stdout.flush()
    except Exception:  # the answer closed or replaced its output
        pass
    posix._exit(0)  # noqa: SLF001  # its public name is os._exit


class Writer:
    """Encodes the values of one message; repeated objects are referenced by number."""

    def __init__(self, channel: Channel, known: list[Any]) -> None:
        """Register the arguments of the request under their numbers."""
        self.channel = channel
        self.kept = list(known)  # keeps them alive, so that an id names one object
        self.numbers = {id(value): number for number, value in enumerate(known)}

    def text(self, value: Any) -> str:
        """Return a value as JSON."""
        kind = type(value)
        if kind is str:
            return str(quoted(value))
        if kind is int:
            if -_SMALL < value < _SMALL:
                return int.__repr__(value)
            return f'["i","{value:x}"]'
        if value is None or value is True or value is False:
            return "null" if value is None else "true" if value is True else "false"
        if kind is float:
            return f'["f","{float.hex(value)}"]'
        number = self.numbers.get(id(value))
        if number is not None:
            return f'["r",{number}]'
        for base, write in _WRITERS:
            if issubclass(kind, base):
                return str(write(self, value))
        return self._other(value, kind)

    def content(self, value: Any) -> str:
        """Encode the content of a container whose number is already known."""
        number = self.numbers[id(value)]
        if isinstance(value, dict):
            return self._filled("d", number, [one for pair in dict.items(value) for one in pair])
        if isinstance(value, list):
            return self._filled("l", number, list.__iter__(value))
        if isinstance(value, set):
            return self._filled("s", number, set.__iter__(value))
        return f'["a",{number},"{bytes(value).hex()}"]'

    def container(self, value: Any) -> str:
        """Number a container before encoding its content, because it may contain itself."""
        self.numbers[id(value)] = len(self.kept)
        self.kept.append(value)
        return self.content(value)

    def _filled(self, tag: str, number: int, parts: Any) -> str:
        return ",".join([f'["{tag}",{number}', *map(self.text, parts)]) + "]"

    def fixed(self, tag: str, parts: Any) -> str:
        """Encode a tag followed by values."""
        return ",".join([f'["{tag}"', *map(self.text, parts)]) + "]"

    def _other(self, value: Any, kind: type) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        plain = _PLAIN.get(name)
        if plain is not None:
            return self.fixed("o", [name, *plain(value)])
        if kind is Given or kind is GivenIterator:
            return f'["k",{value.number}]'
        named = getattr(value, "__name__", None) if kind in _NAMED else None
        if isinstance(named, str) and getattr(builtins, named, None) is value:
            return f'["n",{quoted(named)}]'
        number = self.channel.number_of(value)
        if issubclass(kind, type) and issubclass(value, BaseException):
            return f'["x",{number},{self.fixed("t", _names(value))}]'
        return f'["h",{number},{_offered(kind)}]'


_NAMED = (type, type(len))
_WRITERS: tuple[tuple[Any, Any], ...] = (
    ((list, dict, set, bytearray), Writer.container),
    (tuple, lambda w, v: w.fixed("t", tuple.__iter__(v))),
    (frozenset, lambda w, v: w.fixed("z", frozenset.__iter__(v))),
    (str, lambda w, v: w.text(str.__str__(v))),
    (int, lambda w, v: w.text(int.__pos__(v))),
    (float, lambda w, v: w.text(float.__pos__(v))),
    (bytes, lambda _, v: f'["b","{bytes.hex(v)}"]'),
    (complex, lambda _, v: f'["c","{v.real.hex()}","{v.imag.hex()}"]'),
    (range, lambda w, v: w.fixed("g", [v.start, v.stop, v.step])),
    ((type(...), type(NotImplemented)), lambda _, v: f'["n","{v!r}"]'),
)
# Standard-library values, encoded as the arguments of their constructors.
_PLAIN: dict[str, Any] = {
    "fractions.Fraction": lambda v: [v.numerator, v.denominator],
    "decimal.Decimal": lambda v: [str(v)],
    "collections.deque": lambda v: [list(v)],
    "datetime.date": lambda v: [v.year, v.month, v.day],
    "datetime.timedelta": lambda v: [v.days, v.seconds, v.microseconds],
}


_OFFERED: dict[type, str] = {}


def _offered(kind: type) -> str:
    """Return a class's name, whether it defines equality, and its operators, as JSON."""
    if kind not in _OFFERED:
        spaces = [vars(one) for one in kind.__mro__]  # without the metaclass's methods
        found = {name: space[name] for space in reversed(spaces) for name in space}
        offers = [one for one in _SPECIAL if found.get(one) is not None]
        own = found["__eq__"] is not object.__eq__
        _OFFERED[kind] = f"{quoted(kind.__name__)},{str(own).lower()},{_strings(offers)}"
    return _OFFERED[kind]


def _strings(texts: Any) -> str:
    return "[" + ",".join(map(quoted, texts)) + "]"


def _names(kind: type) -> list[str]:
    """Return the names of an exception's classes, with a star before built-in ones."""
    return [("*" if one.__module__ == "builtins" else "") + one.__name__ for one in kind.__mro__]


class Given:
    """A proxy of a function of the tests, which runs in the grader."""

    def __init__(self, channel: Channel, number: int) -> None:
        """Store the function's number in the grader."""
        self.channel = channel
        self.number = number

    def __call__(self, *arguments: Any) -> Any:
        """Call the function in the grader."""
        return ask(self.channel, self.number, arguments)


class GivenIterator(Given):
    """A proxy of an iterator of the tests."""

    def __iter__(self) -> GivenIterator:
        return self

    def __next__(self) -> Any:
        return ask(self.channel, self.number, ())


def ask(channel: Channel, number: int, arguments: Any) -> Any:
    """Ask the grader to call one of its functions; return or raise the result."""
    writer = Writer(channel, [])
    channel.write(f'["c",{number},{writer.fixed("t", arguments)}]')
    reply = channel.read()
    while len(reply) == 4:  # a request: the function calls back into the answer
        channel.write(answered(channel, reply))
        reply = channel.read()
    is_returned, value, names = reply
    got = Reader(channel).value(value)
    if is_returned:
        return got
    raise next((getattr(builtins, n) for n in names if hasattr(builtins, n)), Exception)(*got)


class Reader:
    """Reconstructs the values of one request."""

    def __init__(self, channel: Channel) -> None:
        """Start without known containers."""
        self.channel = channel
        self.known: list[Any] = []  # mutable containers, in the order of their numbers

    def value(self, sent: Any) -> Any:
        """Reconstruct a value: a scalar is sent as it is, any other value as a tagged tuple."""
        if type(sent) in _SCALARS:
            return sent
        tag, *rest = sent
        made = getattr(self, f"_{tag}", None)
        return made(*rest) if made else _MADE[tag](*map(self.value, rest))

    def _l(self, *parts: Any) -> Any:
        made: list[Any] = []
        self.known.append(made)
        made.extend(map(self.value, parts))
        return made

    def _d(self, *parts: Any) -> Any:
        made: dict[Any, Any] = {}
        self.known.append(made)
        flat = list(map(self.value, parts))
        made.update(zip(flat[::2], flat[1::2], strict=True))
        return made

    def _s(self, *parts: Any) -> Any:
        made: set[Any] = set()
        self.known.append(made)
        made.update(map(self.value, parts))
        return made

    def _a(self, data: bytes) -> Any:
        self.known.append(bytearray(data))
        return self.known[-1]

    def _r(self, number: int) -> Any:
        return self.known[number]

    def _h(self, number: int) -> Any:
        return self.channel.objects[number]

    def _k(self, number: int, kind: str) -> Any:
        return (GivenIterator if kind == "iterator" else Given)(self.channel, number)

    def _n(self, name: str) -> Any:
        return getattr(builtins, name)

    def _o(self, name: str, *parts: Any) -> Any:
        module, _, kind = name.rpartition(".")
        return getattr(__import__(module), kind)(*map(self.value, parts))


_MADE: dict[str, Any] = {
    "t": lambda *parts: parts,
    "z": lambda *parts: frozenset(parts),
    "c": complex,
    "g": range,
}


def perform(operation: str, target: Any, arguments: Any, named: Any) -> Any:
    """Perform the operation of a request."""
    if operation == "load":
        found = vars(__import__("solution"))
        return {name: found[name] for name in arguments if name in found}
    if operation == "call":
        return target(*arguments, **named)
    if operation == "get":
        return getattr(target, *arguments)
    if operation == "set":
        return setattr(target, *arguments)
    if operation == "isinstance":
        return isinstance(*arguments)
    return getattr(type(target), operation)(target, *arguments)


def answered(channel: Channel, request: Any) -> str:
    """Return the reply to a request: the result, and the changes to its arguments."""
    operation, target, sent, sent_named = request
    reader = Reader(channel)
    arguments = reader.value(sent)
    named = {name: reader.value(value) for name, value in sent_named.items()}
    before = _state(channel, reader.known)
    try:
        got = perform(operation, reader.value(target), arguments, named)
        result = [got]
        head = '["v"'
    except BaseException as error:  # the tests judge every exception
        head, result = f'["e",{_strings(_names(type(error)))},{_message(error)}', [_args(error)]
    writer = Writer(channel, reader.known)
    changed = "null"
    if reader.known and _state(channel, reader.known) != before:
        changed = "[" + ",".join(map(writer.content, reader.known)) + "]"
    return f"{head},{changed},{writer.text(result[0])}]"


def _state(channel: Channel, known: list[Any]) -> list[str]:
    writer = Writer(channel, known)
    return list(map(writer.content, known))


def _message(error: BaseException) -> str:
    try:
        return str(quoted(str(error)[:4000]))
    except Exception:  # raised by the answer's own __str__
        return '""'


def _args(error: BaseException) -> Any:
    found = getattr(error, "args", ())
    return found if type(found) is tuple else ()


def serve(channel: Channel) -> NoReturn:
    """Answer requests until the grader closes the connection."""
    while True:
        request = channel.read()
        try:
            reply = answered(channel, request)
        except BaseException as error:  # a value that cannot be encoded
            names = _strings(_names(type(error)))
            reply = f'["e",{names},{_message(error)},null,["t"]]'
        channel.write(reply)


def main() -> None:
    """Move the socket away from standard input, which is then empty for the answer."""
    fd = posix.dup(0)
    nothing = posix.open("/dev/null", posix.O_RDONLY)
    posix.dup2(nothing, 0)
    posix.close(nothing)
    serve(Channel(fd))


if __name__ == "__main__":
    main()
