"""Declarations of settings: everything known about a setting is stated at its field.

Validation, the contract, comparisons and the generated documentation all read these declarations
instead of keeping their own tables of settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from mens_exp.errors import ConfigError

TRAINING = frozenset({"train", "plan", "rejection_sampling"})
"""The tasks that read the same settings as a training run."""

_KEY = "declaration"  # in a field's metadata
_DECLARED: dict[tuple[type, str], Declaration] = {}  # cache of merged declarations


class Effect(StrEnum):
    """Effect of a setting on what a run learns; settings with one are in the contract's digest."""

    TRAINING = "training"
    NOTHING = "nothing"
    """It affects location, speed, frequency or naming, or permits or refuses a run."""


@dataclass(frozen=True, slots=True)
class Range:
    """Accepted interval of a finite number."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def accepts(self, value: float) -> bool:
        """Return whether ``value`` is within the range (NaN and infinity never are)."""
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        """Format the bounds for an error message."""
        signs = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Condition:
    """Condition on other settings; unless it holds, a setting has no effect.

    Attributes:
        holds: returns whether a whole configuration meets it.
        words: completes "has no effect" for a configuration that does not meet it.
        needs: what would meet it, for the message.
        tasks: the tasks in which it is checked; None means all of them.
        remedy: advice to give instead of dropping the setting.
    """

    holds: Callable[[Any], bool]
    words: Callable[[Any], str]
    needs: str
    tasks: frozenset[str] | None = None
    remedy: str | None = None


def when(
    key: str,
    *values: Any,
    why: str = "",
    needs: str | None = None,
    tasks: Iterable[str] | None = None,
    remedy: str | None = None,
) -> Condition:
    """Return the condition that another setting has one of the given values.

    Args:
        key: dotted path of the other setting; a key absent from the configuration counts as null.
        values: the accepted values, as in YAML.
        why: completes the refusal, such as "which has no adapter".
        needs: what would meet it; None lists the values.
        tasks: the tasks in which it is checked; None means all of them.
        remedy: advice to give instead of dropping the setting.
    """
    return Condition(
        holds=lambda config: value_at(config, key) in values,
        words=lambda config: _with(config, key, why),
        needs=needs or f"{_option(key)}={_listed(values)}",
        tasks=None if tasks is None else frozenset(tasks),
        remedy=remedy,
    )


def unless(
    key: str,
    *values: Any,
    why: str = "",
    needs: str | None = None,
    tasks: Iterable[str] | None = None,
) -> Condition:
    """Return the condition that another setting has none of the given values; see :func:`when`."""
    return Condition(
        holds=lambda config: value_at(config, key) not in values,
        words=lambda config: _with(config, key, why),
        needs=needs or f"another {_option(key)} than {_listed(values)}",
        tasks=None if tasks is None else frozenset(tasks),
    )


def value_at(config: Any, key: str) -> Any:
    """Return the value at a dotted path, as in YAML; null if the key is absent."""
    node = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return plain(node)


def plain(value: Any) -> Any:
    """Convert a value to its YAML form; enum members become strings."""
    return value.value if isinstance(value, Enum) else value


def _with(config: Any, key: str, why: str) -> str:
    return f"with {_option(key)}={shown(value_at(config, key))}{', ' if why else ''}{why}"


def _listed(values: tuple[Any, ...]) -> str:
    *others, last = map(shown, values)
    return f"{', '.join(others)} or {last}" if others else last


def _option(key: str) -> str:
    """Return the key as typed on the command line, where an option is chosen by its name."""
    return key.removesuffix(".name")


class _Unset:
    """Sentinel for "no value", since null is a value."""

    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Declaration:
    """Facts about one setting, or about a section and every setting in it.

    Attributes:
        doc: what it controls, its unit, and the source of its default.
        range: accepted interval of a number.
        changes: its effect on what is learned; None inherits that of the enclosing section.
        contract: parts of the fine-tune contract derived from it, such as ``exec.seq_len``, in
            addition to those of the enclosing section.
        label: its name in reports; None is its key, with spaces.
        aliases: its names in other fine-tuners, and the tools that use them, for messages.
        example: a value as typed, for the reference; empty if one follows from the type.
        read_by: tasks that read it, in addition to those that read the enclosing section.
        only_if: conditions without which it has no effect, in addition to the section's.
        even_if: conditions of the enclosing section that do not apply to it.
        idle: the required value if `only_if` is not met, however it was set; a tuple has several.
            A setting without one, and a section, must then not be set on the command line.
    """

    doc: str = ""
    range: Range | None = None
    changes: Effect | None = None
    contract: tuple[str, ...] = ()
    label: str | None = None
    aliases: Mapping[str, str] | None = None
    example: str = ""
    read_by: frozenset[str] = frozenset()
    only_if: tuple[Condition, ...] = ()
    even_if: tuple[Condition, ...] = ()
    idle: Any = UNSET


def setting(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    **facts: Any,
) -> Any:
    """Declare one schema field.

    Args:
        default: the default value; lists and mappings are copied for each instance.
        doc: what the field controls, its unit, and the source of its default.
        ge: smallest accepted number.
        gt: exclusive lower bound.
        le: largest accepted number.
        lt: exclusive upper bound.
        facts: the other attributes of :class:`Declaration`.

    Returns:
        A dataclass field whose metadata carries its :class:`Declaration`.
    """
    bounds = Range(ge=ge, gt=gt, le=le, lt=lt)
    about = _declaration(doc=doc, range=bounds if str(bounds) else None, **facts)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={_KEY: about})
    return dataclasses.field(default=default, metadata={_KEY: about})


def section(kind: type, doc: str | None = None, **facts: Any) -> Any:
    """Declare a field that holds a section: a group of settings with a separate class.

    Args:
        kind: the section's class.
        doc: the purpose of the section; None uses the docstring of the class.
        facts: the other attributes of :class:`Declaration`; they apply to every setting in the
            section that does not override them.
    """
    about = _declaration(doc=doc or kind.__doc__ or "", **facts)
    return dataclasses.field(default_factory=kind, metadata={_KEY: about})


def _declaration(
    *,
    only_if: Condition | tuple[Condition, ...] = (),
    even_if: Condition | tuple[Condition, ...] = (),
    read_by: Iterable[str] = (),
    **facts: Any,
) -> Declaration:
    """Build a declaration; a single condition is accepted in place of a tuple."""
    only, even = (one if isinstance(one, tuple) else (one,) for one in (only_if, even_if))
    return Declaration(only_if=only, even_if=even, read_by=frozenset(read_by), **facts)


def declared(schema: type, name: str) -> Declaration:
    """Return the declaration of a field.

    A class may give an inherited field a new default; facts that it does not restate are taken
    from its parents' declarations.
    """
    if (schema, name) in _DECLARED:
        return _DECLARED[schema, name]
    merged: dict[str, Any] = {}
    for parent in schema.__mro__:
        field = getattr(parent, "__dataclass_fields__", {}).get(name)
        about = _of(field) if field is not None else None
        for fact in dataclasses.fields(Declaration) if about else ():
            value = getattr(about, fact.name)
            if value != fact.default:
                merged.setdefault(fact.name, value)
    return _DECLARED.setdefault((schema, name), Declaration(**merged))


def range_of(field: dataclasses.Field[Any]) -> Range | None:
    """Return the accepted interval of a field declared with :func:`setting`, if it has one."""
    about = _of(field)
    return about.range if about else None


def _of(field: dataclasses.Field[Any]) -> Declaration | None:
    found = field.metadata.get(_KEY)
    return found if isinstance(found, Declaration) else None


def range_problems(node: Any, prefix: str = "") -> Iterator[ConfigError]:
    """Yield an error for every value of a typed configuration outside its declared interval.

    Args:
        node: the root, or one group.
        prefix: dotted path of the node, with a final dot, for the messages.
    """
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from range_problems(value, f"{path}.")
        elif isinstance(value, dict):
            for name, entry in value.items():
                if dataclasses.is_dataclass(entry):  # a mapping of plain values has no ranges
                    yield from range_problems(entry, f"{path}.{name}.")
        elif not in_range(field, value):
            kind = "a value" if math.isfinite(value) else "a finite value"
            yield ConfigError(
                "out of range", where=path, found=value, expected=f"{kind} {range_of(field)}"
            )


def in_range(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return whether a value is within a field's declared interval; null always is."""
    bounds = range_of(field)
    return bounds is None or value is None or bounds.accepts(value)


def shown(value: object) -> str:
    """Format a value as YAML, for a message."""
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {shown(one)}' for key, one in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"
