"""Check every override of a command and report all problems at once.

Hydra alone stops at the first error, accepts ``+key`` until the typed objects are created, and
exits with 1. Here each override is first checked individually against the schemas of the chosen
options. Accepted overrides are then composed cell by cell, and their values are checked.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from mens_exp.config.compose import Composed, compose, typed, unknown_key_in
from mens_exp.config.fields import shown
from mens_exp.config.option_files import Sources, sources_of
from mens_exp.config.override_parsing import (
    OFF,
    credentials_in,
    first_line,
    group_problems,
    is_group,
    is_hydra,
    line_of,
    parse_one,
    parsed_override,
)
from mens_exp.config.override_values import (
    MAY_BE_UNSET,
    exists,
    launcher_of,
    spelled_out,
    sweep_override_problems,
    value_problems,
    with_moved_keys,
    with_nodes,
    without_joblib,
)
from mens_exp.config.root import RunConfig
from mens_exp.config.sweep import IN_ORDER, sweeper_of
from mens_exp.config.user_config import user_config_problems
from mens_exp.config.validate import ineffective_overrides, overrides_not_read, problems_of
from mens_exp.errors import ConfigError, MensError, NoEffectError, listed, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of a command, composed and typed; its values may still have known problems.

    Attributes:
        composed: the composed configuration.
        config: the same configuration, typed.
        number: its index in the sweep, from 0.
        dropped: swept overrides that were left out because they have no effect in this cell.
    """

    composed: Composed
    config: RunConfig
    number: int = 0
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Faulty:
    """A cell of a sweep that cannot run."""

    overrides: tuple[str, ...]
    problems: tuple[MensError, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The checked request of a command, with all its problems.

    Attributes:
        cells: the cells that could be typed.
        problems: all problems, each once.
        general: problems of the command itself, independent of its cells.
        faulty: the cells that cannot run, keyed by number.
    """

    cells: tuple[Cell, ...]
    problems: tuple[MensError, ...]
    general: tuple[MensError, ...] = ()
    faulty: dict[int, Faulty] = field(default_factory=dict)


def check(
    texts: Sequence[str],
    *,
    multirun: bool = False,
    drawn: Collection[str] = (),
    first: int = 0,
) -> Checked:
    """Check the overrides of one command.

    Args:
        texts: overrides as typed.
        multirun: whether several values of a key mean several runs.
        drawn: keys whose value was sampled by a search. Such a key is dropped from a cell where it
            has no effect, even if that is the only cell.
        first: number of the first cell.

    Returns:
        The cells that could be composed, in Hydra's order, and all problems: first those of the
        overrides, in order, then those of the composed values.
    """
    own = tuple(user_config_problems())
    if own:  # what ./conf adds is unknown until it is valid
        return Checked(cells=(), problems=own, general=own)
    texts = spelled_out(texts, multirun=multirun)
    secrets = tuple(error for text in texts for error in credentials_in(text))
    if secrets:  # any other message would print the value
        return Checked(cells=(), problems=secrets, general=secrets)
    texts, moved = with_moved_keys(texts, multirun=multirun)
    texts, late = without_joblib(texts, multirun=multirun)
    late = [*moved, *late]
    texts = with_nodes(texts, multirun=multirun)
    if multirun:
        texts, listed = _without_listed_params(texts)
        late += listed
        texts = [*swept_by_config(texts, IN_ORDER), *texts]
    found: dict[str, list[MensError]] = {text: [] for text in texts}
    overrides = [o for text in texts for o in parse_one(text, found[text], multirun=multirun)]
    groups = [o for o in overrides if is_group(o)]
    for override in groups:
        found[line_of(override)] += group_problems(override)
    made = _references([o for o in groups if not found[line_of(o)]])
    references = [one.values for one in made]
    unsure = {o.key_or_group for o in groups if found[line_of(o)]}
    launcher = launcher_of(texts, multirun=multirun)
    good = []
    for override in overrides:
        problems = found[line_of(override)]
        problems += sweep_override_problems(override, launcher=launcher, sweeper=sweeper_of(texts))
        if not (is_group(override) or is_hydra(override)):
            problems += value_problems(override, references, unsure)
        if not problems and _has_place(override, references):
            good.append(override)
    given = _Given(
        overrides=tuple(good),
        named=frozenset(o.key_or_group for o in overrides),
        swept=frozenset(o.key_or_group for o in overrides if o.is_sweep_override()),
        drawn=frozenset(drawn),
        first=first,
    )
    cells, faulty = _cells(given, late, made)
    general = _unique([*itertools.chain(*found.values()), *late])
    of_cells = itertools.chain(*(faulty[number].problems for number in sorted(faulty)))
    return Checked(
        cells=tuple(cells),
        problems=_unique([*general, *of_cells]),
        general=general,
        faulty=faulty,
    )


def sources_in(
    texts: Sequence[str], *, name: str | None = None, directory: str | None = None
) -> Sources:
    """Return the config sources that a command adds.

    Args:
        texts: its overrides; the last ``hydra.searchpath`` counts.
        name: value of ``--config-name``.
        directory: value of ``--config-dir``.

    Raises:
        ConfigError: a source does not exist.
        Problems: several of these.
    """
    paths = [text for text in texts if text.lstrip("+").startswith("hydra.searchpath=")]
    override = parsed_override(paths[-1], []) if paths else None
    value = None if override is None else override.value()
    listed = [str(one) for one in value] if isinstance(value, list) else []
    return sources_of(name, directory, listed)


def swept_by_config(texts: Sequence[str], name: str) -> list[str]:
    """Return the overrides in ``hydra.sweeper.params``; the command line takes precedence.

    As in Hydra, an option that is itself swept contributes none.

    Args:
        texts: overrides as typed.
        name: the hydra/sweeper option that reads them; any other has none.
    """
    sweeper = _composed_sweeper(texts)
    params = sweeper.get("params") if sweeper["name"] == name else None
    given = {_key(text) for text in texts}
    return [f"{key}={shown(value)}" for key, value in (params or {}).items() if key not in given]


_PARAMS = "hydra.sweeper.params"


def _without_listed_params(texts: Sequence[str]) -> tuple[list[str], list[MensError]]:
    """Refuse the mapping of swept keys on the command line, unless another sweeper reads it.

    Hydra itself ends in a traceback there: the mapping is null until a YAML sets it.

    Returns:
        The other overrides, and the refusal.
    """
    listed = [text for text in texts if _key(text) == _PARAMS]
    others = [text for text in texts if text not in listed]
    if not listed or chosen_sweeper(others) != IN_ORDER:
        return list(texts), []
    override = parsed_override(listed[-1], [])
    value = None if override is None else override.value()
    keys = value if isinstance(value, dict) else {"lora.r": "8,16"}
    refusal = ConfigError(
        "is for the YAML of an experiment",
        where=_PARAMS,
        found=listed[-1],
        expected="the swept keys themselves on the command line",
        remedy=f"write {' '.join(f'{key}={shown(one)}' for key, one in keys.items())}",
    )
    return others, [refusal]


def chosen_sweeper(texts: Sequence[str]) -> str:
    """Return the hydra/sweeper option that a command selects, directly or by its experiment."""
    if any(text.startswith("hydra/sweeper=") for text in texts):
        return sweeper_of(texts)
    return str(_composed_sweeper(texts)["name"])


def _composed_sweeper(texts: Sequence[str]) -> dict[str, Any]:
    """Compose a command without sweep overrides; return Hydra's sweeper node and its ``name``."""
    parsed = [override for text in texts if (override := parsed_override(text, [])) is not None]
    plain = [line_of(override) for override in parsed if not override.is_sweep_override()]
    try:
        return compose([plain])[0].sweeper
    except Exception:  # noqa: BLE001  # whatever is wrong is reported when the command is checked
        return {"name": IN_ORDER}


def _unique(problems: Iterable[MensError]) -> tuple[MensError, ...]:
    return tuple({str(problem): problem for problem in problems}.values())


def _has_place(override: Override, references: Sequence[DictConfig]) -> bool:
    """Return whether the key can be set; keys of a refused option may not exist."""
    if is_group(override) or is_hydra(override):
        return True
    return all(exists(reference, override.key_or_group) for reference in references)


def _split(overrides: Sequence[Override]) -> list[list[str]]:
    """Expand the overrides into one list per cell, in the order of Hydra's own sweeper."""
    given: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if override.is_sweep_override():
            given[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            given[key] = [line_of(override)]
    return [list(cell) for cell in itertools.product(*given.values())]


def _unknown_in_file(error: BaseException) -> ConfigError | None:
    """Return the error for a key of an option's file that does not exist; None for any other."""
    cause, in_file = error.__cause__ or error.__context__, _IN_FILE.match(str(error))
    if not (isinstance(cause, ConfigKeyError) and is_dataclass(cause.object_type) and in_file):
        return None
    return unknown_key_in(f"conf/{in_file[1]}.yaml", cause)


_IN_FILE = re.compile(r"In '([^']+)'")  # from Hydra's messages


def _references(groups: Sequence[Override]) -> list[Composed]:
    """Compose every combination of options, as references for checking the command's values."""
    try:
        return compose(_split([o for o in groups if not is_hydra(o)]))
    except (HydraException, OmegaConfBaseException, OverflowError) as error:
        raise _unknown_in_file(error) or ConfigError(
            "the chosen options do not go together",
            found=_of_composing(error.__cause__ or error),
            remedy="choose other options, or change the experiment's YAML",
        ) from error


def _without_refused_hydra(
    overrides: tuple[Override, ...], problems: list[MensError]
) -> tuple[Override, ...]:
    """Drop the Hydra settings that Hydra rejects, so that the rest can still be checked."""
    theirs = [o for o in overrides if is_hydra(o)]
    try:
        compose(_split(theirs)[:1])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        problems.append(_refused_by_hydra(error))
        return tuple(o for o in overrides if not is_hydra(o))
    return overrides


def _composed(given: _Given, made: list[Composed]) -> list[Composed]:
    """Compose the cells; reuse ``made`` if the command overrides nothing but options."""
    cells = _split(given.overrides)
    are_these = given.first == 0 and [list(one.overrides) for one in made] == cells
    return made if are_these else compose(cells, first=given.first)


def _sound(
    given: _Given, problems: list[MensError], made: list[Composed]
) -> tuple[_Given, list[Composed]]:
    """Compose the cells; if Hydra's own settings prevent it, compose without them."""
    try:
        return given, _composed(given, made)
    except (HydraException, OmegaConfBaseException):
        kept = replace(given, overrides=_without_refused_hydra(given.overrides, problems))
        return kept, _composed(kept, made)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """The accepted overrides, and every key that the command names.

    ``named`` keys are never reported as missing. ``swept`` keys may have no effect in some cells,
    and ``drawn`` keys in all of them.
    """

    overrides: tuple[Override, ...]
    named: frozenset[str]
    swept: frozenset[str]
    drawn: frozenset[str]
    first: int

    @property
    def texts(self) -> list[str]:
        """The overrides, as typed."""
        return [line_of(override) for override in self.overrides]


def _cells(
    given: _Given, general: list[MensError], made: list[Composed]
) -> tuple[list[Cell], dict[int, Faulty]]:
    """Compose the cells and check the values of each."""
    cells: list[Cell] = []
    faulty: dict[int, Faulty] = {}
    idle: dict[int, tuple[str, ...]] = {}
    try:
        given, composed = _sound(given, general, made)
        for number, one in enumerate(composed, start=given.first):
            cell, problems = _judged(given, one, number)
            cells += [cell] if cell else []
            idle[number] = _without_effect(problems, given.swept | given.drawn)
            if problems:
                faulty[number] = Faulty(overrides=one.overrides, problems=tuple(problems))
        everywhere = set.intersection(*map(set, idle.values())) if idle else set()
        everywhere -= given.drawn
        for place, cell in enumerate(cells):
            keys = [key for key in idle[cell.number] if key not in everywhere]
            if keys:
                cells[place] = _reduced(given, cell, keys, faulty)
    except (HydraException, OmegaConfBaseException) as error:
        general.append(_refused_by_hydra(error))
    return cells, faulty


def _judged(
    given: _Given, one: Composed, number: int, dropped: tuple[str, ...] = ()
) -> tuple[Cell | None, list[MensError]]:
    """Type a composed cell, and list the problems of its values."""
    missing = sorted(OmegaConf.missing_keys(one.values))
    if missing:
        return None, [_required(key) for key in missing if key not in given.named]
    config = typed(one.values)
    idle = {_key(text) for text in dropped}
    keys = [o.key_or_group for o in given.overrides if o.key_or_group not in idle]
    told = [o.key_or_group for o in given.overrides if not _switches_off(o)]
    refused = given.named - {o.key_or_group for o in given.overrides}  # already reported
    problems = [problem for problem in problems_of(config) if problem.where not in refused]
    problems += overrides_not_read(
        config.task.name, [key for key in told if key not in idle], given.texts, path=config.path
    )
    problems += ineffective_overrides(config, keys)
    return Cell(composed=one, config=config, number=number, dropped=dropped), problems


def _switches_off(override: Override) -> bool:
    """Return whether an override disables something, which is valid even without effect."""
    key = override.key_or_group
    if override.is_delete():
        return key in MAY_BE_UNSET
    return not override.is_sweep_override() and override.value() == OFF.get(key, override)


def _without_effect(problems: list[MensError], swept: frozenset[str]) -> tuple[str, ...]:
    """Return the swept keys refused only because they have no effect in a cell."""
    keys = [str(p.where) for p in problems if isinstance(p, NoEffectError)]
    return tuple(dict.fromkeys(key for key in keys if key in swept))


def _reduced(given: _Given, cell: Cell, keys: Sequence[str], faulty: dict[int, Faulty]) -> Cell:
    """Recompose a cell without the swept keys that have no effect in it, and check the result."""
    kept = [text for text in cell.composed.overrides if _key(text) not in keys]
    dropped = tuple(text for text in cell.composed.overrides if _key(text) in keys)
    one = compose([kept], first=cell.number)[0]
    made, problems = _judged(given, one, cell.number, dropped)
    faulty.pop(cell.number, None)
    if problems:
        faulty[cell.number] = Faulty(overrides=cell.composed.overrides, problems=tuple(problems))
    return made or cell


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def _refused_by_hydra(error: Exception) -> ConfigError:
    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None)
    if not key:
        return ConfigError(first_line(cause))
    if not isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return ConfigError(first_line(cause), where=key)
    parent, _, name = key.rpartition(".")
    names = sorted(map(str, getattr(cause, "parent_node", None) or ()))
    close = nearest(name, names)
    return ConfigError(
        "is not a setting of Hydra",
        where=key,
        expected=f"{listed(names)}{f'; the nearest is {close}' if close else ''}"
        if names
        else None,
        remedy=f"write {parent}.{close}" if close else f"drop {key}",
    )


def _of_composing(error: BaseException) -> str:
    """Return an error's first line, and the next one if the first only announces it."""
    first, *more = [*str(error).splitlines(), ""]
    return f"{first} {more[0]}".strip() if first.endswith(":") else first


def _required(key: str) -> ConfigError:
    return ConfigError("a required value is missing", where=key, remedy=f"add {key}=…")
