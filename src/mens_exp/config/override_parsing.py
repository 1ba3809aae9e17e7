"""Parse overrides one by one, and search spaces in Hydra's sweep syntax."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from mens_exp.artifacts.credentials import looks_like_one
from mens_exp.artifacts.sweep import Dimension
from mens_exp.config.fields import shown
from mens_exp.config.option_files import group_options
from mens_exp.config.override_values import MAY_BE_UNSET, values_of
from mens_exp.config.suggestions import meant_by
from mens_exp.errors import ConfigError, MensError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

OFF = {"logger": "none", "suite": "none", "sandbox": "none"}  # options that disable a group


def credentials_in(text: str) -> Iterator[ConfigError]:
    """Yield an error for an override with a credential, because every setting is recorded."""
    told = looks_like_one(text)
    if told is not None:
        yield ConfigError(
            "contains what looks like a credential",
            where=text.partition("=")[0].lstrip("+~"),
            found=told,
            expected="no credential: every record of a run contains its settings",
            remedy="give it in the environment, as HF_TOKEN, WANDB_API_KEY or OPENAI_API_KEY",
        )


_QUOTED_KEY = re.compile(r"""(['"])([^'"]*)\1\s*:""")


def parse_one(text: str, problems: list[MensError], *, multirun: bool) -> list[Override]:
    """Parse one override; invalid syntax, or a sweep without ``-m``, is added to the problems."""
    override = parsed_override(text, problems)
    if override is None:
        return []
    if override.is_sweep_override():
        problems += _sweep_problems(override, multirun=multirun)
    if "/" in override.key_or_group:
        for value in values_of(override):
            if isinstance(value, int | float | dict):
                where, found = override.key_or_group, shown(value)
                expected = "the name of an option"
                problems.append(
                    ConfigError("unknown option", where=where, found=found, expected=expected)
                )
    return [override]


def parsed_override(text: str, problems: list[MensError]) -> Override | None:
    """Parse one override; if it is invalid, add the problem and return None."""
    try:
        override: Override = _parser().parse_overrides([text])[0]
    except HydraException as error:
        quoted = f"quote special characters in the value ({first_line(error)})"
        bare = _QUOTED_KEY.sub(r"\2:", text)
        if bare != text:
            quoted = f"leave the keys of a mapping unquoted: {shlex.quote(bare)}"
        remedy = quoted if "=" in text.lstrip("=") else meant_by(text)
        expected = "key=value or group=option"
        problems.append(
            ConfigError("not an override", found=text, expected=expected, remedy=remedy)
        )
        return None
    value = override.value()
    if isinstance(value, RangeSweep) and value.step == 0:
        where = override.key_or_group
        problems.append(ConfigError("a range needs a step other than 0", where=where, found=text))
        return None
    return override


@functools.cache
def _parser() -> Any:
    def options(group: str, results_filter: object = None) -> list[str]:
        del results_filter
        return list(group_options().get(group, ()))

    # The only part of a config loader that an override needs, to expand glob(…).
    loader: Any = SimpleNamespace(get_group_options=options)
    return OverridesParser.create(config_loader=loader)


def _sweep_problems(override: Override, *, multirun: bool) -> Iterator[ConfigError]:
    where, found = override.key_or_group, line_of(override)
    value = found.partition("=")[2]
    spelled = "" if '"' in value else ": " + shlex.quote(f'{where}="{value}"')
    if not multirun:
        yield ConfigError(
            "several values need a sweep",
            where=where,
            found=found,
            expected="one value, or -m to run them all",
            remedy=f"add -m, or quote a value that contains a comma{spelled}",
        )
    elif not override.is_discrete_sweep() or getattr(override.value(), "shuffle", False):
        # An interval has no list of values; Hydra would shuffle a list differently at run time.
        yield ConfigError(
            "a sweep must list its values, in order",
            where=where,
            found=found,
            expected="a,b or choice(a,b), range(first,end), glob(pattern)",
            remedy="draw from an interval with hydra/sweeper=optuna",
        )
    elif next(override.sweep_string_iterator(), None) is None:
        yield without_values(override)


def without_values(override: Override) -> ConfigError:
    """Refuse a range that is empty, or a pattern that matches no option."""
    where, expected = override.key_or_group, "at least one value"
    if isinstance(override.value(), Glob):
        options = group_options().get(where)
        expected = (
            f"a pattern that matches an option, such as one of {', '.join(options)}"
            if options
            else "a list of values: glob(…) matches options of a group, and this is none"
        )
    return ConfigError(
        "has no value to sweep over", where=where, found=line_of(override), expected=expected
    )


def line_of(override: Override) -> str:
    """Return an override as typed."""
    assert override.input_line is not None, "the parser keeps what it read"
    return override.input_line


def is_group(override: Override) -> bool:
    """Return whether an override selects an option of a group."""
    is_mapping = isinstance(override.value(), dict)  # lora={r:8} sets values
    return override.key_or_group in group_options() and not is_mapping


def is_hydra(override: Override) -> bool:
    """Return whether an override belongs to Hydra's own node."""
    return override.key_or_group == "hydra" or override.is_hydra_override()


def group_problems(override: Override) -> list[ConfigError]:
    """Return the problems of an override that selects an option."""
    group, line = override.key_or_group, line_of(override)
    if override.is_delete():
        if group in MAY_BE_UNSET:
            return []
        off = OFF.get(group)
        remedy = f"write {group}={off}" if off else f"choose an option, {group}=…"
        return [ConfigError("every run needs this group", where=group, found=line, remedy=remedy)]
    if override.is_add() or override.is_force_add() or override.package is not None:
        listed = f"{group}=[default,{override.value()}]" if group == "callbacks" else f"{group}=…"
        return [ConfigError("already exists", where=group, found=line, remedy=f"write {listed}")]
    options = group_options()[group]
    if override.value() == []:
        off = {**OFF, "callbacks": "minimal"}.get(group)
        remedy = f"drop {line}" if off is None else f"write {group}={off}"
        return [ConfigError("does not name an option", where=group, found=line, remedy=remedy)]
    given = _options_given(override)
    return [
        ConfigError(
            "unknown option",
            where=group,
            found=shown(value),
            expected=_expected_option(shown(value), options),
            remedy=_option_remedy(group, shown(value), nearest(shown(value), options))
            if len(given) == 1 or not isinstance(override.value(), list)
            else _list_remedy(group, given, value, nearest(shown(value), options)),
        )
        for value in given
        if value not in options
    ]


def _options_given(override: Override) -> list[Any]:
    """Return every option that the override names; a list composes several."""
    if override.is_sweep_override():
        if not override.is_discrete_sweep():
            return []
        return [text.strip("'\"") for text in override.sweep_string_iterator()]
    value = override.value()
    return list(value) if isinstance(value, list) else [value]


_CLOSED = {"task", "sandbox"}  # groups without user classes


def _option_remedy(group: str, value: str, close: str | None) -> str:
    if group == "model" and "/" in value:  # a directory, or an id of the hub
        return f"write {group}=hf {group}.id={value}"
    if group == "data" and PurePath(value).suffix:
        return f"write {group}=jsonl {group}.path={value}"
    if group == "data" and value.count("/") == 1 and value[0] not in "./~":
        return f"write {group}=hub {group}.id={value}"
    if close is not None:
        return f"write {group}={close}"
    if group in _CLOSED:
        return f"write {group}=<one of them>"
    return f"write {group}=<one of them>, or add your own as ./conf/{group}/<name>.yaml"


def _list_remedy(group: str, given: Sequence[Any], value: Any, close: str | None) -> str:
    """Return the list with the unknown option replaced by the nearest one, or removed."""
    others = [close if one == value else shown(one) for one in given]
    return f"write {group}=[{','.join(one for one in others if one is not None)}]"


def _expected_option(value: str, options: Sequence[str]) -> str:
    close = nearest(value, options)
    listed = f"one of {', '.join(options)}"
    return f"{listed}; the nearest is {close}" if close else listed


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


_TAGS = frozenset({"log"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The sampled dimensions of a search, and its fixed overrides.

    Attributes:
        dimensions: one per sampled key: first the groups, then choices, then numbers.
        fixed: the other overrides.
        problems: problems of overrides that cannot be sampled.
    """

    dimensions: tuple[Dimension, ...]
    fixed: tuple[str, ...]
    problems: tuple[MensError, ...]


def read_space(texts: Sequence[str]) -> Space:
    """Split a command into sampled dimensions and overrides fixed for all trials.

    ``a,b``, ``choice(a,b)`` and ``glob(…)`` are choices. ``range(1,9)`` is a range of integers
    without its end, as in Hydra. ``interval(0.1,1)`` is a range of reals and
    ``int(interval(1,64))`` a range of integers, both with their ends. ``tag(log,…)`` samples
    log-uniformly.
    """
    dimensions: list[Dimension] = []
    fixed: list[str] = []
    problems: list[MensError] = []
    for text in texts:
        override = parsed_override(text, problems)
        if override is None:
            continue
        if not override.is_sweep_override():
            fixed.append(text)
            continue
        made, wrong = _dimension(override)
        problems += wrong
        dimensions += [made] if made and not wrong else []
    order = {"group": 0, "choice": 1, "int": 2, "float": 2}
    dimensions.sort(key=lambda one: order[one["kind"]])
    return Space(dimensions=tuple(dimensions), fixed=tuple(fixed), problems=tuple(problems))


def written(dimension: Dimension, value: str | float) -> str:
    """Format a sampled value as an override."""
    return f"{dimension['key']}={_digits(dimension, value)}"


def _digits(dimension: Dimension, value: str | float) -> str:
    """Format a number with few digits, unless rounding leaves the interval."""
    if not isinstance(value, float):
        return str(value)
    low, high = dimension["low"], dimension["high"]
    assert low is not None, "a number has two ends"
    assert high is not None, "a number has two ends"
    # Multiples of a step are inexact in binary; twelve digits give the intended number.
    short = f"{value:.12g}" if dimension["step"] is not None else f"{value:.6g}"
    return short if low <= float(short) <= high else repr(value)


def _dimension(override: Override) -> tuple[Dimension | None, list[MensError]]:
    value = override.value()
    tags = set(getattr(value, "tags", ())) - {"float", "int"}
    unknown = sorted(tags - _TAGS)
    wrong: list[MensError] = [
        _wrong(override, f"the tag {name} means nothing here", "tag(log,…)") for name in unknown
    ]
    key, log = override.get_key_element(), "log" in tags
    if isinstance(value, IntervalSweep):
        return _interval(override, value, key, log=log, wrong=wrong)
    if isinstance(value, RangeSweep):
        made = _range(value, key, log=log)
        if made is not None:
            if log:
                wrong += _log_problems(override, made)
            return made, wrong
    if getattr(value, "shuffle", False):
        wrong.append(_wrong(override, "a search draws in no order", "the values alone"))
        return None, wrong
    try:
        texts = list(dict.fromkeys(override.sweep_string_iterator()))
    except HydraException as error:
        return None, [_wrong(override, str(error).splitlines()[0], "a list of values")]
    if not texts:
        return None, [without_values(override)]
    if log:
        wrong.append(_wrong(override, "choices have no logarithm", "tag(log,interval(a,b))"))
    kind = "group" if override.key_or_group in group_options() else "choice"
    return _made(key, kind, values=texts), wrong


def _interval(
    override: Override, value: IntervalSweep, key: str, *, log: bool, wrong: list[MensError]
) -> tuple[Dimension | None, list[MensError]]:
    low, high = value.start, value.end
    assert low is not None, "the parser gives both ends"
    assert high is not None, "the parser gives both ends"
    whole = isinstance(low, int) and isinstance(high, int)
    made = _made(key, "int" if whole else "float", low=low, high=high, log=log)
    if low >= high:
        return None, [*wrong, _wrong(override, "an empty interval", "interval(low,high)")]
    return made, [*wrong, *(_log_problems(override, made) if log else [])]


def _range(value: RangeSweep, key: str, *, log: bool) -> Dimension | None:
    """Return the dimension of an ascending range; None if it should be treated as a list."""
    numbers = list(value.range())
    if len(numbers) < 2 or numbers[0] > numbers[-1]:  # noqa: PLR2004  # one value is no range
        return None
    kind = "int" if all(isinstance(one, int) for one in numbers) else "float"
    low, high, step = float(numbers[0]), float(numbers[-1]), float(value.step)
    return _made(key, kind, low=low, high=high, step=step, log=log)


def _log_problems(override: Override, made: Dimension) -> list[MensError]:
    if made["low"] is not None and made["low"] <= 0:
        return [_wrong(override, "only what is above 0 has a logarithm", "a lower end above 0")]
    if made["step"] not in {None, 1.0}:
        return [_wrong(override, "steps are not even in the logarithm", "tag(log,interval(a,b))")]
    return []


def _made(
    key: str,
    kind: str,
    *,
    values: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    log: bool = False,
) -> Dimension:
    return Dimension(
        key=key, kind=kind, values=list(values), low=low, high=high, step=step, log=log
    )


def _wrong(override: Override, what: str, expected: str) -> ConfigError:
    return ConfigError(
        what, where=override.key_or_group, found=str(override.input_line), expected=expected
    )
