"""The two programs that grade a Rust answer: one has the answer, the other its tests.

The function that the tests call is a stand-in with the answer's signature. It sends its arguments
to the answer's process, and reconstructs the result from bytes. This requires a signature of plain
values: numbers, strings, standard collections, tuples, and references to these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

WIRE: Final = "wire_of_the_check"
"""The crate that both programs use, `rust_wire.rs`."""

_WIRE: Final = f"::{WIRE}"
_NUMBERS: Final = (
    *("i8", "i16", "i32", "i64", "i128", "isize"),
    *("u8", "u16", "u32", "u64", "u128", "usize", "f32", "f64"),
)
# Full path and number of type parameters of each type, since the answer may redefine short names.
_TYPES: Final = {
    **{name: (f"::std::primitive::{name}", 0) for name in (*_NUMBERS, "bool", "char")},
    "String": ("::std::string::String", 0),
    "Box": ("::std::boxed::Box", 1),
    "Option": ("::std::option::Option", 1),
    "Result": ("::std::result::Result", 2),
    "Vec": ("::std::vec::Vec", 1),
    **{
        name: (f"::std::collections::{name}", 1)
        for name in ("VecDeque", "LinkedList", "BTreeSet", "HashSet")
    },
    **{name: (f"::std::collections::{name}", 2) for name in ("BTreeMap", "HashMap")},
}
_MOST_IN_TUPLE: Final = 8
_LONGEST: Final = 500  # maximum characters of a signature, which bounds the nesting of types
_TOKEN: Final = re.compile(r"\s*(->|::|'\w+|\w+|[^\s\w])")
_ARRAY: Final = re.compile(r"; \d+\]\Z")
_LIFETIME: Final = re.compile(r"'\w+ ")
_QUALIFIERS: Final = r'(?P<qualifiers>(?:\b(?:const|async|unsafe|extern(?:\s+"[^"]*")?)\s+)*)'


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """The type of an argument, written with full paths.

    Attributes:
        type: the type, without ``&mut``.
        is_changed: whether the argument is ``&mut``, so that the function may change it.
    """

    type: str
    is_changed: bool = False

    @property
    def is_slice(self) -> bool:
        """Whether the argument is ``&mut [T]``, whose length cannot change."""
        return self.is_changed and self.type.startswith("[") and not _ARRAY.search(self.type)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A function of plain values."""

    name: str
    lifetimes: str  # its generics, ``<'a, 'b>`` or nothing
    parameters: tuple[Parameter, ...]
    result: str


class _Other(Exception):  # noqa: N818  # ends the parsing; not an error
    """A type in the signature is not a plain value."""


class _Reader:
    """Parser of a signature's tokens."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = [*_TOKEN.findall(text), "", ""]
        self.at = 0

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def has(self, *tokens: str) -> bool:
        """Consume the given tokens if they come next; return whether they did."""
        if tuple(self.tokens[self.at : self.at + len(tokens)]) != tokens:
            return False
        self.at += len(tokens)
        return True

    def need(self, token: str) -> None:
        if not self.has(token):
            raise _Other

    def until(self, end: str) -> bool:
        """Consume a comma or the end token; return whether another element follows."""
        if self.has(end):
            return False
        self.need(",")
        return not self.has(end)

    def lifetime(self) -> str:
        """Consume a lifetime if there is one; return it with a space."""
        return f"{self.next()} " if self.tokens[self.at].startswith("'") else ""

    def lifetimes(self) -> str:
        if not self.has("<"):
            return ""
        found = []
        more = True
        while more:
            name = self.lifetime().strip()
            if not name:
                raise _Other
            found.append(f"{name}: {self.lifetime().strip()}" if self.has(":") else name)
            more = self.until(">")
        return f"<{', '.join(found)}>"

    def parameters(self) -> tuple[Parameter, ...]:
        self.need("(")
        found: list[Parameter] = []
        more = not self.has(")")
        while more:
            self.has("mut")
            if not self.next().isidentifier():
                raise _Other
            self.need(":")
            found.append(self.parameter())
            more = self.until(")")
        return tuple(found)

    def parameter(self) -> Parameter:
        start = self.at
        if self.has("&"):
            self.lifetime()
            if self.has("mut"):
                kind = self.slice() if self.tokens[self.at] == "[" else self.type()
                return Parameter(type=kind, is_changed=True)
        self.at = start
        return Parameter(type=self.type())

    def slice(self) -> str:
        """Return the type of an array, or of a slice, which is only valid behind a reference."""
        self.need("[")
        kind = self.type()
        if self.has(";"):
            length = self.next()
            self.need("]")
            if not length.isdecimal():
                raise _Other
            return f"[{kind}; {length}]"
        self.need("]")
        return f"[{kind}]"

    def type(self) -> str:
        if self.has("&"):
            lifetime = self.lifetime()
            if self.has("str"):
                return f"&{lifetime}::std::primitive::str"
            kind = self.slice() if self.tokens[self.at] == "[" else self.type()
            return f"&{lifetime}{kind}"
        if self.tokens[self.at] == "[":
            kind = self.slice()
            if not _ARRAY.search(kind):
                raise _Other
            return kind
        if self.has("("):
            return self.tuple()
        return self.named()

    def tuple(self) -> str:
        kinds = []
        more = not self.has(")")
        while more:
            kinds.append(self.type())
            if self.has(")"):
                if len(kinds) == 1:  # a type in parentheses
                    return kinds[0]
                break
            more = self.until(")")
        if len(kinds) > _MOST_IN_TUPLE:
            raise _Other
        return f"({', '.join(kinds)}{',' if len(kinds) == 1 else ''})"

    def named(self) -> str:
        self.has("::")
        name = self.next()
        if name in {"std", "core", "alloc"}:
            while self.has("::"):
                name = self.next()
        path, arity = _TYPES.get(name, ("", 0))
        if not path:
            raise _Other
        kinds = []
        if self.has("<"):
            more = True
            while more:
                kinds.append(self.type())
                more = self.until(">")
        if len(kinds) != arity:
            raise _Other
        return f"{path}<{', '.join(kinds)}>" if kinds else path


def signatures(text: str, name: str) -> list[Signature]:
    """Return the signatures of a Rust function's definitions that have only plain values."""
    found = []
    for head in re.finditer(rf"{_QUALIFIERS}\bfn\s+{re.escape(name)}\b", text):
        end = text.find("{", head.end(), head.end() + _LONGEST)
        if re.search("async|unsafe|extern", head["qualifiers"]) or end < 0:
            continue
        reader = _Reader(text[head.end() : end])
        try:
            lifetimes, parameters = reader.lifetimes(), reader.parameters()
            result = reader.type() if reader.has("->") else "()"
            reader.need("")
        except _Other:
            continue
        found.append(
            Signature(name=name, lifetimes=lifetimes, parameters=parameters, result=result)
        )
    return found


def signature_of(items: str, asked: Signature) -> Signature:
    """Return the signature of an answer: the requested one if it has that, or else its own.

    An answer may take ``i32`` instead of the requested ``isize``, which many tests allow. If no
    definition can be parsed, the compiler will report the error.
    """
    own = signatures(items, asked.name)
    return asked if asked in own or not own else own[0]


def answer_source(items: str, signature: Signature) -> str:
    """Return a program with the answer and without tests, which calls the function on request."""
    lines, arguments, changed = [], [], []
    for place, one in enumerate(signature.parameters):
        kind = _LIFETIME.sub("", f"::std::vec::Vec<{one.type[1:-1]}>" if one.is_slice else one.type)
        mutable = "mut " if one.is_changed else ""
        lines.append(f"let {mutable}a{place}: {kind} = {_WIRE}::Wire::decode(given)?;")
        arguments.append(f"&mut a{place}" if one.is_changed else f"a{place}")
        if one.is_changed:
            changed.append(f"{_WIRE}::Wire::encode(&a{place}, reply);")
    kind = _LIFETIME.sub("", signature.result)
    lines.append(f"let result: {kind} = {signature.name}({', '.join(arguments)});")
    lines += [f"{_WIRE}::Wire::encode(&result, reply);", *changed]
    body = "".join(f"        {line}\n" for line in lines)
    return (
        f"{items}\nfn main() {{\n    {_WIRE}::serve(|given, reply| {{\n{body}"
        "        ::std::option::Option::Some(())\n    });\n}\n"
    )


def grader_source(above: str, tests: tuple[str, str, str], signature: Signature) -> str:
    """Return a program with the tests and without the answer.

    Args:
        above: the task's own items.
        tests: the tests: up to the body of their main function, that body, and the rest.
        signature: signature of the answer.
    """
    head, body, end = tests
    return f'{above}\n{_stand_in(signature)}{head}{body}\n    {_WIRE}::stop("passed", 0);\n{end}'


def _stand_in(signature: Signature) -> str:
    parameters, put, taken = [], [], []
    for place, one in enumerate(signature.parameters):
        name = f"a{place}"
        parameters.append(f"{name}: {'&mut ' if one.is_changed else ''}{one.type}")
        given = f"&&*{name}" if one.is_slice else f"&*{name}" if one.is_changed else f"&{name}"
        put.append(f"{_WIRE}::Wire::encode({given}, &mut request);")
        new = f"{_WIRE}::taken(&mut given)"
        if one.is_changed:
            taken.append(f"{_WIRE}::fill({name}, {new});" if one.is_slice else f"*{name} = {new};")
    lines = [
        "let mut request = ::std::vec::Vec::new();",
        *put,
        f"let mut given = {_WIRE}::ask(request);",
        f"let result = {_WIRE}::taken(&mut given);",
        *taken,
        f"{_WIRE}::finished(given);",
        "result",
    ]
    body = "".join(f"    {line}\n" for line in lines)
    head = f"fn {signature.name}{signature.lifetimes}({', '.join(parameters)})"
    return f"{head} -> {signature.result} {{\n{body}}}\n"
