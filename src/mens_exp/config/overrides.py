"""Check every override of a command and report all that is wrong with it at once.

Hydra alone stops at the first error, lets ``+key`` through until the typed objects are made,
and exits with 1. Here each override is judged by itself, against the schemas of the options
chosen; what is left is then composed cell by cell and judged by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import (
    BooleanNode,
    DictConfig,
    EnumNode,
    FloatNode,
    IntegerNode,
    ListConfig,
    OmegaConf,
    StringNode,
)
from omegaconf.errors import OmegaConfBaseException

from mens_exp.artifacts.nearest import expected_name, nearest
from mens_exp.config.compose import Composed, compose, group_options, typed
from mens_exp.config.root import RunConfig
from mens_exp.config.store import SCHEMAS
from mens_exp.config.validate import problems_of, unread_overrides
from mens_exp.errors import ConfigError, MensError

__all__ = ["Cell", "Checked", "check"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of a command: composed, typed, without a known problem of its values."""

    composed: Composed
    config: RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What a command asks for, and everything wrong with it."""

    cells: tuple[Cell, ...]
    problems: tuple[MensError, ...]


def check(texts: Sequence[str], *, multirun: bool = False) -> Checked:
    """Judge the overrides of one command.

    Args:
        texts: overrides as typed.
        multirun: whether several values of one key mean several runs.

    Returns:
        The cells that composed, and all problems found, in the order of the overrides.
    """
    problems: list[MensError] = []
    overrides = _parse(texts, problems)
    if not multirun:
        overrides = _without_sweeps(overrides, problems)
    groups = [o for o in overrides if _is_group(o)]
    values = [o for o in overrides if not _is_group(o)]
    good = [o for o in groups if _group_is_known(o, problems)]
    reference = compose([_first_cell(good)])[0].values
    good += [o for o in values if _value_is_accepted(o, reference, problems)]
    cells = _cells(good, problems)
    return Checked(cells=tuple(cells), problems=tuple(_unique(problems)))


def _parse(texts: Sequence[str], problems: list[MensError]) -> list[Override]:
    parser = OverridesParser.create()
    overrides = []
    for text in texts:
        try:
            overrides.append(parser.parse_override(text))
        except OverrideParseException as error:
            problems.append(
                ConfigError(
                    "not an override",
                    found=text,
                    expected="key=value or group=option",
                    remedy=str(error).splitlines()[0],
                )
            )
    return overrides


def _without_sweeps(overrides: list[Override], problems: list[MensError]) -> list[Override]:
    single = []
    for override in overrides:
        if override.is_sweep_override():
            problems.append(
                ConfigError(
                    "several values need a sweep",
                    where=override.key_or_group,
                    found=override.input_line,
                    expected="one value, or -m to run them all",
                    remedy="add -m, or quote a value that contains a comma",
                )
            )
        else:
            single.append(override)
    return single


def _is_group(override: Override) -> bool:
    key = override.key_or_group
    return key in group_options() or (key.startswith("hydra/") and "." not in key)


def _group_is_known(override: Override, problems: list[MensError]) -> bool:
    group = override.key_or_group
    if group.startswith("hydra/"):
        return True  # Hydra's own groups, and those of its installed plugins
    if group in RunConfig.__dataclass_fields__ and override.is_delete():
        problems.append(ConfigError("every run needs this group", where=group, found=f"~{group}"))
        return False
    options = group_options()[group]
    accepted = True
    for value in _values(override):
        if value not in options and not (group == "experiment" and value in {None, "null"}):
            problems.append(
                ConfigError(
                    "unknown option",
                    where=group,
                    found=str(value),
                    expected=_expected_option(str(value), options),
                )
            )
            accepted = False
    return accepted


def _expected_option(value: str, options: Sequence[str]) -> str:
    close = nearest(value, options)
    listed = f"one of {', '.join(options)}"
    return f"{listed}; the nearest is {close}" if close else listed


def _values(override: Override) -> list[Any]:
    """Return each value the override gives its key, as text where it is a sweep."""
    if override.is_sweep_override():
        if not override.is_discrete_sweep():
            return []
        return [text.strip("'\"") for text in override.sweep_string_iterator()]
    return [override.value()]


def _first_cell(overrides: Sequence[Override]) -> list[str]:
    """Write the overrides with the first of several values."""
    cells = BasicSweeper.split_arguments(list(overrides), None)[0]
    return list(cells[0])


def _value_is_accepted(
    override: Override, reference: DictConfig, problems: list[MensError]
) -> bool:
    key = override.key_or_group
    if key == "hydra" or key.startswith("hydra."):
        return True
    if not _exists(reference, key):
        problems.append(_unknown_key(override, reference))
        return False
    if override.is_delete():
        return _may_be_deleted(key, problems)
    if override.is_add():
        problems.append(
            ConfigError("is there already", where=key, found=f"+{key}", remedy=f"write {key}=…")
        )
        return False
    return all([_has_type(key, value, reference, problems) for value in _values(override)])


def _may_be_deleted(key: str, problems: list[MensError]) -> bool:
    parts = key.split(".")
    if parts[0] == "callbacks" and len(parts) == 2:  # noqa: PLR2004  # callbacks.<name>
        return True
    problems.append(
        ConfigError("cannot be removed", where=key, found=f"~{key}", expected="a value")
    )
    return False


def _exists(config: DictConfig, key: str) -> bool:
    return any(leaf == key or leaf.startswith(f"{key}.") for leaf in _leaves(config))


def _leaves(config: Any, prefix: str = "") -> list[str]:
    leaves: list[str] = []
    for name in config.keys():  # noqa: SIM118  # iterating a DictConfig skips missing values
        node = config._get_node(name)  # noqa: SLF001  # a missing value must not raise here
        path = f"{prefix}{name}"
        leaves += _leaves(node, f"{path}.") if isinstance(node, DictConfig) else [path]
    return leaves


def _unknown_key(override: Override, reference: DictConfig) -> ConfigError:
    key, found = override.key_or_group, override.input_line
    group, _, field = key.partition(".")
    owners = _options_with(group, field)
    if owners:
        return ConfigError(
            f"is no key of the chosen {group}",
            where=key,
            found=found,
            expected=f"{group}={' or '.join(owners)}, which has it",
            remedy=f"add {group}={owners[0]}, or drop {key}",
        )
    leaves = _leaves(reference)
    group_leaves = [leaf for leaf in leaves if leaf.startswith(f"{group}.")]
    if not field and not group_leaves:
        known = [*RunConfig.__dataclass_fields__, "experiment"]
        return ConfigError(
            "unknown key", where=key, found=found, expected=expected_name(key, known)
        )
    close = nearest(key, group_leaves or leaves)
    accepted = ", ".join(group_leaves) if group_leaves else "a key that --cfg job shows"
    hint = f"; the nearest is {close}" if close else ""
    return ConfigError("unknown key", where=key, found=found, expected=f"one of {accepted}{hint}")


def _options_with(group: str, field: str) -> list[str]:
    """Return the group's options whose schema has the field, where the group has several."""
    schemas = SCHEMAS.get(group, {})
    if len(schemas) < 2 or group == "callbacks":  # noqa: PLR2004
        return []
    having = {name for name, cls in schemas.items() if field in cls.__dataclass_fields__}  # type: ignore[attr-defined]
    if not having:
        return []
    cells = compose([[f"{group}={option}"] for option in group_options()[group]])
    return [c.choices[group] or "" for c in cells if field in c.values[group].keys()]  # noqa: SIM118


def _has_type(key: str, value: Any, reference: DictConfig, problems: list[MensError]) -> bool:
    node = _node_at(reference, key)
    is_mapping = isinstance(node, DictConfig)
    try:
        if isinstance(value, str) and not isinstance(node, StringNode):
            value = OmegaConf.create(f"value: {value}").value  # a sweep's values are text
        if is_mapping and not isinstance(value, dict):
            raise ConfigError("not a mapping")  # noqa: TRY301  # reported like the others, below
        OmegaConf.update(reference.copy(), key, value, merge=True)
    except (OmegaConfBaseException, ConfigError):
        problems.append(
            ConfigError("wrong type", where=key, found=str(value), expected=_accepted(node))
        )
        return False
    return True


def _node_at(config: DictConfig, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node._get_node(part)  # noqa: SLF001  # select() would resolve a missing value
    return node


def _accepted(node: Any) -> str:
    """Say in words what a node of the configuration accepts."""
    if isinstance(node, EnumNode):
        return f"one of {', '.join(node.enum_type.__members__)}"
    if isinstance(node, DictConfig):
        return f"a mapping with {', '.join(map(str, node.keys()))}"
    if isinstance(node, ListConfig):
        return "a list, such as [a,b]"
    words = {
        IntegerNode: "a whole number",
        FloatNode: "a number",
        BooleanNode: "true or false",
        StringNode: "text",
    }
    word = words.get(type(node), "another value")
    return f"{word}, or null" if node._is_optional() else word  # noqa: SLF001


def _cells(overrides: list[Override], problems: list[MensError]) -> list[Cell]:
    cells: list[Cell] = []
    try:
        split = BasicSweeper.split_arguments(overrides, None)[0]
        composed = compose(split)
    except (HydraException, OmegaConfBaseException) as error:
        problems.append(ConfigError(str(error.__cause__ or error).splitlines()[0]))
        return cells
    keys = [o.key_or_group for o in overrides]
    for one in composed:
        missing = sorted(OmegaConf.missing_keys(one.values))
        problems += [_required(key) for key in missing]
        if missing:
            continue
        config = typed(one.values)
        problems += problems_of(config)
        problems += unread_overrides(config.task.name, keys)
        cells.append(Cell(composed=one, config=config))
    return cells


def _required(key: str) -> ConfigError:
    return ConfigError("a required value is missing", where=key, remedy=f"add {key}=…")


def _unique(problems: Sequence[MensError]) -> list[MensError]:
    return list({str(problem): problem for problem in problems}.values())
