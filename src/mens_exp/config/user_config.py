"""User options in ``./conf``: discovery, and schemas for user classes.

Files in ``./conf`` add options to our groups and never replace ours: a second option of the same
name would change the meaning of a command between directories, and is an error. A YAML that names a
class and inherits from nothing gets a schema built from its keys and values, so that a misspelled
key is an error with a suggestion. Hydra searches ``./conf`` after our own directory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from mens_exp.config.backend import BackendConfig
from mens_exp.config.data_sources import OwnData
from mens_exp.config.fields import setting
from mens_exp.config.logger import OwnLogger
from mens_exp.config.objective import ObjectiveConfig
from mens_exp.config.optim import OptimizerConfig
from mens_exp.config.option_files import (
    SPEC_GROUPS,
    config_directory,
    our_options,
    own_files,
    read_option,
    user_directories,
    user_directory,
)
from mens_exp.config.root import MOVED
from mens_exp.config.schedule import OwnSchedule
from mens_exp.config.trainer import REFUSED, CallbackConfig, ModuleConfig
from mens_exp.errors import ConfigError, Problems, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.config_source import ConfigResult

# Fields common to all classes of a group; other fields are the user's.
CLASS_GROUPS: dict[str, type] = {
    "backend": BackendConfig,
    "callbacks": CallbackConfig,
    "data": OwnData,
    "logger": OwnLogger,
    "objective": ObjectiveConfig,
    "module": ModuleConfig,
    "optim": OptimizerConfig,
    "schedule": OwnSchedule,
}


def user_schema(group: str, values: Mapping[str, Any], where: str) -> type:
    """Build the schema of a user's option.

    Args:
        group: one of :data:`CLASS_GROUPS`.
        values: the values set by the option's YAML or by a stored configuration.
        where: the file, for messages and for the documentation of its settings.

    Raises:
        ConfigError: a key is not a valid name, or is reserved by Hydra.
        Problems: several of these.
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
    """Yield an error for every key of an option that is not a valid argument name."""
    for key in values:
        is_name = isinstance(key, str) and key.isidentifier() and not key.startswith("_")
        if not is_name and key not in {"_target_", "defaults"}:
            yield ConfigError(
                "is not a setting of a class",
                where=where,
                found=str(key),
                expected="names of the class's arguments, and _target_",
            )


def _type_of(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        is_open = isinstance(value, str) and (value == "???" or "${" in value)
        return Any if is_open else type(value)
    if isinstance(value, dict):
        return dict[str, Any] if all(isinstance(key, str) for key in value) else dict[Any, Any]
    if isinstance(value, list):
        kinds = {type(entry) for entry in value}
        one = kinds.pop() if len(kinds) == 1 else None
        return list[one] if one in {bool, int, float, str} else list[Any]  # type: ignore[valid-type]
    return Any


def _default(value: Any) -> Any:
    """Return an empty value of the same type; the option's file sets the actual one."""
    return [] if isinstance(value, list) else {} if isinstance(value, dict) else value


def user_config_problems() -> Iterator[ConfigError]:
    """Yield problems that make a user's file ineffective or misleading."""
    for root, file in own_files():
        yield from _file_problems(root, file)
    for root in user_directories():
        for stray in sorted(root.rglob("*.yml")):
            yield ConfigError(
                "is not read",
                where=_place(root, stray.relative_to(root)),
                expected="a name that ends in .yaml",
                remedy=f"rename it to {stray.stem}.yaml",
            )


def _place(root: Path, file: Path) -> str:
    """Return a user's file for messages: relative in ``./conf``, the full path elsewhere."""
    return f"conf/{file.as_posix()}" if root == user_directory() else str(root / file)


def _file_problems(root: Path, file: Path) -> Iterator[ConfigError]:
    where = _place(root, file)
    ours = config_directory() / file
    group = file.parts[0]
    if ours.is_file():
        if ours.read_bytes() != (root / file).read_bytes():  # an identical copy is harmless
            yield ConfigError(
                "has the name of a built-in option, which would take precedence",
                where=where,
                expected="a different name",
                remedy=f"rename it, and choose it with {group}=<its name>"
                if len(file.parts) > 1
                else "write what it sets into conf/experiment/<name>.yaml",
            )
    elif len(file.parts) > 1 and group != "hydra" and group not in our_options():
        close = nearest(group, our_options())
        if close is not None:  # unrelated folders are ignored
            yield ConfigError(
                "is not in a config group", where=where, found=group, expected=f"such as {close}"
            )
    elif isinstance(values := read_option(root / file), str):
        yield ConfigError("is not a YAML mapping", where=where, found=values)
    elif group in {"experiment", "preset"}:
        yield from (
            ConfigError(f"{key} is now {' or '.join(MOVED[key])}", where=where)
            for key in values
            if key in MOVED
        )
    elif group == "trainer":
        yield from (
            REFUSED[key].error(f"{where}: {key}", values[key]) for key in values if key in REFUSED
        )
    elif group in {*CLASS_GROUPS, *SPEC_GROUPS} and "_target_" in values:
        yield from key_problems(values, where)
        if group in SPEC_GROUPS and _parents(values):
            yield ConfigError(
                "a file that names a spec inherits from no other",
                where=f"{where}: defaults",
                found=values["defaults"],
                expected="_target_ without defaults; another option may inherit from this one",
                remedy="see docs/how-to/extending.md",
            )


_SCHEME = "mens-own"
_SCHEMAS = "schema/own/"


class UserSource(FileConfigSource):
    """Config source for the files of ``./conf``, with their schemas under ``schema/own``."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source."""
        return _SCHEME

    def is_config(self, config_path: str) -> bool:
        """Return whether the file exists, or the file from which its schema is built."""
        return super().is_config(config_path.removeprefix(_SCHEMAS))

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file and add the name of its schema, or build a schema."""
        result = super().load_config(config_path.removeprefix(_SCHEMAS))
        file = PurePosixPath(config_path.removeprefix(_SCHEMAS)).with_suffix("")
        config = result.config
        if isinstance(config, DictConfig) and _is_spec(file.parts[0], config):
            return _of_spec(result, config, file)
        if not isinstance(config, DictConfig) or not _is_class(file.parts[0], config):
            return result
        if config_path.startswith(_SCHEMAS):
            values = OmegaConf.to_container(config)
            assert isinstance(values, dict)
            own = {str(key): value for key, value in values.items() if key != "defaults"}
            schema = user_schema(file.parts[0], own, f"conf/{file}.yaml")
            return dataclasses.replace(
                result, config=OmegaConf.structured(schema), header={"package": None}
            )
        config["defaults"] = [f"/{_SCHEMAS}{file}@_here_", "_self_"]
        group = file.parts[0]
        if group == "callbacks":
            result.header["package"] = result.header.get("package") or f"callbacks.{file.name}"
        else:
            implied = dict.fromkeys(("name", "sink", "source"), file.name) | {"labels": "assistant"}
            for key in implied.keys() & CLASS_GROUPS[group].__dataclass_fields__.keys():  # type: ignore[attr-defined]
                config.setdefault(key, implied[key])
        return result


def _is_class(group: str, config: DictConfig) -> bool:
    """Return whether a file names a class and inherits from no option with a schema."""
    return group in CLASS_GROUPS and "_target_" in config and not _parents(config)


def _is_spec(group: str, config: DictConfig) -> bool:
    """Return whether a file names the spec of a suite, a quantizer or an adapter method."""
    return group in SPEC_GROUPS and "_target_" in config and not _parents(config)


def _parents(values: Mapping[Any, Any]) -> list[Any]:
    listed = values.get("defaults")
    return [entry for entry in listed if entry != "_self_"] if isinstance(listed, Sequence) else []


def _of_spec(result: ConfigResult, config: DictConfig, file: PurePosixPath) -> ConfigResult:
    """Merge the file's settings into the spec's schema, and select the spec."""
    group = file.parts[0]
    schema = group if group == "quant" else file.name  # quantizers share one schema
    del config["_target_"]
    config["defaults"] = [f"/schema/{group}/{schema}@_here_", "_self_"]
    config.setdefault(SPEC_GROUPS[group], file.name)
    if group == "lora":  # its options also have a name
        config.setdefault("name", file.name)
    return result


class UserSearchPath(SearchPathPlugin):
    """Search-path plugin that adds the user's directories after our own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the directories of the user's options."""
        for directory in user_directories():
            name = "./conf" if directory == user_directory() else directory.name
            search_path.append(name, f"{_SCHEME}://{directory}")


def read_user_config() -> None:
    """Add ``./conf`` to Hydra's search path; idempotent."""
    plugins = Plugins.instance()
    plugins.register(UserSource)
    plugins.register(UserSearchPath)
