"""The search space, read from a command in Hydra's own sweep syntax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from mens_exp.artifacts.sweep import Dimension
from mens_exp.config.option_files import group_options
from mens_exp.config.overrides import parsed_override
from mens_exp.errors import ConfigError, MensError

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
