"""A schema for a class of the user's own, made of the keys and values that its YAML has.

So a setting of theirs is checked as one of ours is: a misspelled key is an error with the nearest
name, and a value must be of the type that the YAML shows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import BackendConfig
from mens_exp.config.callbacks import CallbackConfig
from mens_exp.config.fields import setting
from mens_exp.config.objective import ObjectiveConfig
from mens_exp.config.optim import OptimizerConfig
from mens_exp.errors import ConfigError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["CLASS_GROUPS", "key_problems", "own_schema"]

# What every class of a group has; the rest is the user's.
CLASS_GROUPS: dict[str, type] = {
    "backend": BackendConfig,
    "callbacks": CallbackConfig,
    "objective": ObjectiveConfig,
    "optim": OptimizerConfig,
}


def own_schema(group: str, values: Mapping[str, Any], where: str) -> type:
    """Make the schema of one option.

    Args:
        group: `backend`, `callbacks`, `objective` or `optim`.
        values: what the option's YAML, or a stored configuration, sets.
        where: the file, for messages and for the documentation of its settings.

    Raises:
        ConfigError: a key is no name, or is one that Hydra keeps for itself.
        Problems: several are.
    """
    Problems.raise_if(list(key_problems(values, where)))
    base: Any = CLASS_GROUPS[group]
    fields = []
    for key, value in values.items():
        if key in base.__dataclass_fields__:
            continue
        fields.append((key, _type_of(value), setting(_default(value), f"Set by {where}.")))
    return dataclasses.make_dataclass(
        f"Own{base.__name__}", fields, bases=(base,), kw_only=True, slots=True
    )


def key_problems(values: Mapping[str, Any], where: str) -> Iterator[ConfigError]:
    """Yield every key of an option that names no argument of a class."""
    for key in values:
        is_name = isinstance(key, str) and key.isidentifier() and not key.startswith("_")
        if not is_name and key not in {"_target_", "defaults"}:
            yield ConfigError(
                "is no setting of a class",
                where=where,
                found=str(key),
                expected="names of the class's arguments, and _target_",
            )


def _type_of(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        is_open = isinstance(value, str) and (value == "???" or "${" in value)
        return Any if is_open else type(value)
    if isinstance(value, dict):
        return dict[str, Any]
    if isinstance(value, list):
        kinds = {type(entry) for entry in value}
        one = kinds.pop() if len(kinds) == 1 else None
        return list[one] if one in {bool, int, float, str} else list[Any]  # type: ignore[valid-type]
    return Any


def _default(value: Any) -> Any:
    """Return the empty value of a type; the option's own file sets the real one."""
    return [] if isinstance(value, list) else {} if isinstance(value, dict) else value
