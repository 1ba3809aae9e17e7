"""A Jinja sandbox that counts the work of a template, and stops one that does too much.

Jinja's own sandbox prevents a template from reaching Python. It does not prevent it from looping
for hours, or from exhausting memory with one multiplication. This sandbox adds counting to the
Python code that a template is compiled to, and wraps filters, tests and methods.
"""

from __future__ import annotations

from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final, cast

from jinja2.compiler import CodeGenerator, optimizeconst
from jinja2.nodes import Add, Block, Concat, Const, Filter, For, Slice
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from markupsafe import Markup

from mens_exp.tokenizer import template_steps as steps_of
from mens_exp.tokenizer.template_steps import (
    CONSUMERS,
    EXTRA,
    PLAIN,
    READ_SHIFT,
    SHALLOW,
    SHIFT,
    UNGUARDED,
    TooMuch,
    bounded,
    compared,
    count_format,
    counted,
    made,
    numbers,
    searched,
    spend,
    weigh,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jinja2 import nodes
    from jinja2.compiler import Frame

_MOST_SOURCE: Final = 2**18  # characters; published templates have up to 30,000
_CALL: Final = 8  # cost of a call in steps
_COUNTED: Final = "counted items"  # a filter that no template can name
# String and number methods that create bytes or long strings, and that no template needs.
_REFUSED: Final = frozenset(
    {"encode", "translate", "maketrans", "to_bytes", "from_bytes", "fromhex"}
)


class _CountingFormatter(SandboxedFormatter):
    """`str.format`, with each field counted before it is formatted."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Count a value, then convert it."""
        return super().convert_field(made(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Count a value, then format it; numbers in the format are widths."""
        spend(numbers(format_spec) >> SHIFT)
        return super().format_field(made(value), format_spec)


class _CountingEscapeFormatter(_CountingFormatter, SandboxedEscapeFormatter):
    """`str.format` of a string whose arguments are escaped, counted likewise."""


class _Generator(CodeGenerator):
    """Code generator that adds counting to the Python code of a template."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start a template."""
        super().__init__(*args, **kwargs)
        self._bodies: dict[int, int] = {}  # cost of one run of a body, by its id()

    def _count(self, node: Any) -> None:
        """Make each run of a body cost steps in proportion to its size."""
        size = sum(1 for _ in node.find_all(object))
        self._bodies[id(node.body)] = 1 + (size >> 2)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Start a counted body with its cost."""
        if id(nodes) in self._bodies:
            self.writeline(f"environment.spend({self._bodies[id(nodes)]})")
        super().blockvisit(nodes, frame)

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802  # Jinja's own name
        """Count runs of blocks, which call each other."""
        for block in node.find_all(Block):
            self._count(block)
        super().visit_Template(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802  # Jinja's own name
        """Count runs of a loop."""
        self._count(node)
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: Frame) -> Any:
        """Count calls of a macro."""
        self._count(node)
        return super().macro_body(node, frame)

    def _wrapped(self, name: str, node: Any, frame: Frame) -> None:
        self.write(f"environment.{name}(")
        self.visit(node, frame)
        self.write(")")

    def _output_child_pre(self, node: Any, frame: Frame, finalize: Any) -> None:
        super()._output_child_pre(node, frame, finalize)
        is_escaped = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        name = "environment.made" if is_escaped else "environment.shown"
        self.write("(" if _is_text(node) and not is_escaped else f"{name}(")

    def _output_child_post(self, node: Any, frame: Frame, finalize: Any) -> None:
        self.write(")")
        super()._output_child_post(node, frame, finalize)

    @optimizeconst
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802  # Jinja's own name
        """Count compared values, except comparisons with a constant, which are cheap."""
        first, ops = node.expr, node.ops
        last = ops[0].expr
        if len(ops) == 1 and ops[0].op in _SEARCHES:
            self.write("(not " if ops[0].op == "notin" else "(")
            self.write("environment.within(")
            self.visit(first, frame)
            self.write(", ")
            self.visit(last, frame)
            self.write("))")
            return
        if len(ops) == 1 and (isinstance(first, Const) or isinstance(last, Const)):
            super().visit_Compare(node, frame)
            return
        self.write("(")
        self._wrapped("compared", first, frame)
        for op in ops:
            self.write(f" {_SPELLED[op.op]} ")
            self._wrapped("sought" if op.op in _SEARCHES else "compared", op.expr, frame)
        self.write(")")

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802  # Jinja's own name
        """Evaluate a chain of additions at once."""
        operands: list[Any] = []
        left: Any = node
        while isinstance(left, type(node)):
            operands.append(left.right)
            left = left.left
        self.write("environment.added(")
        for one in (left, *reversed(operands)):
            self.visit(one, frame)
            self.write(", ")
        self.write(")")

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  # Jinja's own name
        """Count the operands of `~`."""
        name = "str_join"
        if frame.eval_ctx.volatile:
            name = "(markup_join if context.eval_ctx.volatile else str_join)"
        elif frame.eval_ctx.autoescape:
            name = "markup_join"
        self.write(f"{name}(environment.pieces((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write(")))")

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802  # Jinja's own name
        """Count slices, which are copied, and keys that are not constant."""
        is_slice = isinstance(node.arg, Slice)
        self.write("" if is_slice else "environment.getitem(")
        if is_slice:
            self._wrapped("sliced", node.node, frame)
            self.write("[")
            self.visit(node.arg, frame)
            self.write("]")
            return
        self.visit(node.node, frame)
        self.write(", ")
        if isinstance(node.arg, Const):
            self.visit(node.arg, frame)
        else:
            self._wrapped("compared", node.arg, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802  # Jinja's own name
        """Count keys, which are hashed."""
        self.write("{")
        for item in node.items:
            self._wrapped("compared", item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")


_SEARCHES: Final = frozenset({"in", "notin"})
_SPELLED: Final = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}


def _is_text(node: Any) -> bool:
    """Return whether an expression is always a string and already counted."""
    if isinstance(node, Add):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, Const):
        return isinstance(node.value, str)
    return isinstance(node, Concat) or (isinstance(node, Filter) and node.name == "trim")


class CountingSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox where everything costs steps; :func:`allow` starts a count."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "%", "-", "/", "//"})
    concat = staticmethod(steps_of.concat)
    # Functions called by the generated Python code.
    spend = staticmethod(steps_of.spend)
    compared = staticmethod(steps_of.compared)
    sought = staticmethod(steps_of.sought)
    within = staticmethod(steps_of.within)
    shown = staticmethod(steps_of.shown)
    made = staticmethod(steps_of.made)
    sliced = staticmethod(steps_of.sliced)
    pieces = staticmethod(steps_of.pieces)
    added = staticmethod(steps_of.added)

    def __init__(self, **options: Any) -> None:
        """Accept Jinja's options."""
        super().__init__(**options)
        self.binop_table |= {"*": steps_of.times, "**": steps_of.power, "%": steps_of.modulo}
        self.binop_table |= {"-": steps_of.minus}
        for sign in ("/", "//"):
            self.binop_table[sign] = _on_bounded(self.binop_table[sign])
        for name, call in self.filters.items():
            self.filters[name] = _guarded_filter(name, call)
        self.filters[_COUNTED] = counted
        self.tests["in"] = steps_of.within
        for name in _COMPARING_TESTS:
            self.tests[name] = _guarded_test(cast("Callable[..., Any]", self.tests[name]))
        del self.globals["lipsum"]  # random text of unbounded length

    def set_filter(self, name: str, call: Callable[..., Any]) -> None:
        """Add a filter, counted like Jinja's own."""
        self.filters[name] = _guarded_filter(name, call)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(For):
            if loop.test is not None:  # items that fail the test do not run the body
                loop.iter = Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > _MOST_SOURCE:
            raise TooMuch(f"the template has more than {_MOST_SOURCE:,} characters")
        return super()._parse(source, name, filename)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse attributes that create bytes or numbers without a bound."""
        if attr in _REFUSED and isinstance(obj, str | int | float):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a counting replacement of ``str.format``."""
        if super().wrap_str_format(value) is None:
            return None
        text, by_map = value.__self__, value.__name__ == "format_map"
        formatter: Any = _CountingFormatter(self)
        if isinstance(text, Markup):
            formatter = _CountingEscapeFormatter(self, escape=text.escape)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if by_map and (kwargs or len(args) != 1):
                raise TypeError("format_map() takes exactly one argument")
            spend(1 + (len(text) >> SHIFT))
            given: Any = ((), args[0]) if by_map else (args, kwargs)
            return cast("str", type(text)(formatter.vformat(text, *given)))

        return formatted

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count a call; the body of a macro is counted separately."""
        spend(_CALL + len(args) + len(kwargs))
        if type(obj) is LoopContext:
            spend(sum(len(one) for one in args if hasattr(one, "__len__")))
        elif type(obj) is not Macro:
            args = _count_call(obj, args, kwargs)
        return super().call(context, obj, *args, **kwargs)


def _on_bounded(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda left, right: call(bounded(left), bounded(right))


def _count_call(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Count the work of a function or method on its arguments."""
    args = tuple(list(counted(one)) if isinstance(one, GeneratorType) else one for one in args)
    steps = sum(weigh(one) for one in (*args, *kwargs.values()))
    owner, name = getattr(call, "__self__", None), getattr(call, "__name__", "")
    if isinstance(owner, str):
        spend(1 + (len(owner) >> SHIFT))
        values = (*args, *kwargs.values())
        sought = next((one for one in values if isinstance(one, str)), "")
        if name in _FORWARDS or name in _BACKWARDS:
            searched(owner, sought, backwards=name in _BACKWARDS)
        spend(_made_by_method(owner, name, values) >> SHIFT)
    elif isinstance(owner, list | tuple | range) and name in {"index", "count", "copy"}:
        weigh(list(owner) if isinstance(owner, range) else owner, READ_SHIFT)
    elif name == "strftime":  # a directive of two characters becomes up to some thirty
        spend(steps * 16)
    elif name == "fromkeys":
        spend(sum(len(one) for one in args if isinstance(one, str)))
    elif isinstance(owner, dict):
        spend(1 + (len(owner) >> 2 if name == "copy" else 0))
    return args


_FORWARDS: Final = frozenset({"find", "index", "count", "split", "partition", "replace"})
_BACKWARDS: Final = frozenset(
    {"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"}
)


def _made_by_method(text: str, name: str, args: tuple[Any, ...]) -> int:
    """Return the maximum number of characters that a string method can add."""
    first: Any = args[0] if args else None
    if name in {"center", "ljust", "rjust", "zfill"}:
        return max(first, 0) if isinstance(first, int) else 0
    if name == "expandtabs":
        return text.count("\t") * max(first if isinstance(first, int) else 8, 0)
    if name == "join":
        return len(text) * len(first) if hasattr(first, "__len__") else 0
    if name == "replace" and isinstance(first, str) and len(args) > 1 and isinstance(args[1], str):
        return (text.count(first) + 1) * len(args[1])
    return 0


def _guarded_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts its arguments before it runs, and its results afterwards."""
    if name in UNGUARDED:
        return call
    first = 1 if getattr(call, "jinja_pass_arg", None) is not None else 0
    extra, is_consumer = EXTRA.get(name), name in CONSUMERS
    # Most often it is `trim`.
    is_plain = name == "trim" or (not first and extra is None and name != "format")

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_plain and len(args) == 1 and type(args[0]) is str and not kwargs:
            spend(1 + (len(args[0]) >> SHIFT))
            return call(args[0])
        values = args[first:]
        if is_consumer and values and isinstance(values[0], GeneratorType):
            values = (list(counted(values[0])), *values[1:])
        steps = 1 + _weight((*values, *kwargs.values()), is_shallow=name in SHALLOW)
        if extra is not None:
            spend(extra(steps, *values, **kwargs) >> SHIFT)
        if name == "format":
            count_format(str(values[0]), kwargs or values[1:])
        result = call(*args[:first], *values, **kwargs)
        return counted(result) if isinstance(result, GeneratorType) else result

    guarded.__dict__.update(call.__dict__)  # including which arguments Jinja passes
    return guarded


def _weight(values: tuple[Any, ...], *, is_shallow: bool) -> int:
    """Count a filter's arguments, of which the first may be shallow, and return the steps."""
    steps = 0
    for place, one in enumerate(values):
        if type(one) in PLAIN:
            steps += len(one) >> SHIFT if isinstance(one, str) else 0
        elif is_shallow and not place:
            steps += len(one) if hasattr(one, "__len__") else 0
        else:
            steps += weigh(one)
    spend(steps)
    return steps


_COMPARING_TESTS: Final = (
    *("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<="),
    *("gt", "greaterthan", ">", "ge", ">=", "divisibleby", "lower", "upper"),
)


def _guarded_test(call: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(value: Any, *args: Any) -> Any:
        return call(bounded(compared(value)), *(bounded(compared(one)) for one in args))

    return guarded
