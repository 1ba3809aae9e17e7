"""User options in ``./conf``: discovery, schemas for user classes, and checks of untrusted configs.

Files in ``./conf`` add options to our groups and never replace ours. Two options of the same name
would give a command different meanings in different directories, so that is an error. A YAML that
names a class and inherits from nothing gets a schema made from its own keys and values, so that a
misspelled key is an error that suggests the nearest name. Hydra searches ``./conf`` after our own
directory.

A stored config.yaml may come from someone else. It may name our classes, Lightning's and torch's,
each in the place of its group. Any other class must also be named in ``./conf`` of the working
directory, which is how the user declares it trusted. The same holds for a model with remote code.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.backend import BackendConfig
from mens_exp.config.fields import setting
from mens_exp.config.logger import OwnLogger
from mens_exp.config.objective import ObjectiveConfig
from mens_exp.config.optim import OptimizerConfig, OwnSchedule
from mens_exp.config.root import MOVED
from mens_exp.config.trainer import REFUSED, CallbackConfig, ModuleConfig
from mens_exp.errors import ConfigError, DataError, Problems, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.config_source import ConfigResult

# The fields that every class of a group has; the others are the user's.
CLASS_GROUPS: dict[str, type] = {
    "backend": BackendConfig,
    "callbacks": CallbackConfig,
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
        return dict[str, Any] if all(isinstance(key, str) for key in value) else dict[Any, Any]
    if isinstance(value, list):
        kinds = {type(entry) for entry in value}
        one = kinds.pop() if len(kinds) == 1 else None
        return list[one] if one in {bool, int, float, str} else list[Any]  # type: ignore[valid-type]
    return Any


def _default(value: Any) -> Any:
    """Return the empty value of a type; the option's own file sets the actual one."""
    return [] if isinstance(value, list) else {} if isinstance(value, dict) else value


_frozen: Path | None = None


def config_directory() -> Path:
    """Return the directory of our config groups, for an installed wheel or a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def user_directory() -> Path | None:
    """Return ``./conf`` of the working directory, if it exists and is not our own."""
    if _frozen is not None:
        return _frozen
    here = Path.cwd() / "conf"
    return here if here.is_dir() and here.resolve() != config_directory().resolve() else None


@contextmanager
def frozen_as(copy: Path | None) -> Iterator[None]:
    """Read ``./conf`` from a copy within the context, whatever happens to the original."""
    global _frozen  # noqa: PLW0603  # Hydra instantiates its plugin classes itself
    before, _frozen = _frozen, copy
    try:
        yield
    finally:
        _frozen = before


@functools.cache
def our_options() -> dict[str, tuple[str, ...]]:
    """List our config groups and their options, from the files on disk."""
    root = config_directory()
    groups: dict[str, list[str]] = {}
    for file in sorted(root.rglob("*.yaml")):
        group = file.parent.relative_to(root).as_posix()
        if group not in {".", "hydra"} and not group.startswith("hydra/"):
            groups.setdefault(group, []).append(file.stem)
    return {group: tuple(options) for group, options in sorted(groups.items())}


def group_options() -> dict[str, tuple[str, ...]]:
    """List every config group and its options, ours first."""
    own: dict[str, list[str]] = {}
    for file in _own_files():
        group, _, option = file.with_suffix("").as_posix().partition("/")
        own.setdefault(group, []).append(option)
    return {
        group: (*options, *(option for option in own.get(group, ()) if option not in options))
        for group, options in our_options().items()
    }


def _own_files() -> list[Path]:
    """List the user's files, relative to their ``conf``."""
    root = user_directory()
    if root is None:
        return []
    return sorted(file.relative_to(root) for file in root.rglob("*.yaml"))


def user_fingerprint() -> tuple[Any, ...]:
    """Return a fingerprint of ``./conf``: its path, and the size and time of each file."""
    root = user_directory()
    if root is None:
        return ()
    states = [(file, (root / file).stat()) for file in _own_files()]
    return (root, *((file, state.st_size, state.st_mtime_ns) for file, state in states))


def user_config_problems() -> Iterator[ConfigError]:
    """Yield the problems that make a file of ``./conf`` ineffective or misleading."""
    root = user_directory()
    if root is None:
        return
    for file in _own_files():
        yield from _file_problems(root, file)
    for stray in sorted(root.rglob("*.yml")):
        yield ConfigError(
            "is not read",
            where=f"conf/{stray.relative_to(root).as_posix()}",
            expected="a name that ends in .yaml",
            remedy=f"rename it to {stray.stem}.yaml",
        )


def _file_problems(root: Path, file: Path) -> Iterator[ConfigError]:
    where = f"conf/{file.as_posix()}"
    ours = config_directory() / file
    group = file.parts[0]
    if ours.is_file():
        if ours.read_bytes() != (root / file).read_bytes():  # a copy of ours changes nothing
            yield ConfigError(
                "has the name of one of ours, which would win",
                where=where,
                expected="a name of its own",
                remedy=f"rename it, and choose it with {group}=<its name>"
                if len(file.parts) > 1
                else "write what it sets into conf/experiment/<name>.yaml",
            )
    elif len(file.parts) > 1 and group != "hydra" and group not in our_options():
        close = nearest(group, our_options())
        if close is not None:  # unrelated folders are ignored
            yield ConfigError(
                "is in no config group", where=where, found=group, expected=f"such as {close}"
            )
    elif isinstance(values := _read(root / file), str):
        yield ConfigError("is no YAML mapping", where=where, found=values)
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
    elif group in CLASS_GROUPS and "_target_" in values:
        yield from key_problems(values, where)


def _read(file: Path) -> dict[str, Any] | str:
    """Read a file's mapping, or return the reason why there is none."""
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    except DataError as error:
        return str(error.found)
    except (OSError, UnicodeDecodeError) as error:
        return " ".join(str(error).split())
    if values is None:
        return {}
    return values if isinstance(values, dict) else type(values).__name__


def targets_in(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of every ``_target_``, at any depth."""
    if isinstance(values, dict):
        for key, value in values.items():
            if key == "_target_":
                yield f"{prefix}{key}", value
            else:
                yield from targets_in(value, f"{prefix}{key}.")
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from targets_in(value, f"{prefix}{number}.")


@functools.cache
def our_targets() -> frozenset[str]:
    """Return every class that our own options name."""
    return _targets_under(config_directory())


def user_targets() -> frozenset[str]:
    """Return every class that ``./conf`` of the working directory names."""
    root = user_directory()
    return frozenset() if root is None else _targets_under(root) - our_targets()


def user_trusted_models() -> frozenset[str]:
    """Return the ids of models whose code ``./conf`` of the working directory trusts."""
    root = user_directory()
    files = [] if root is None else sorted(root.glob("model/*.yaml"))
    options = [values for file in files if isinstance(values := _read(file), dict)]
    return frozenset(str(o.get("id")) for o in options if o.get("trust_remote_code") is True)


def _targets_under(root: Path) -> frozenset[str]:
    return frozenset(
        str(target) for file in root.rglob("*.yaml") for _, target in targets_in(_read(file))
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
        """Return whether the file exists, or the file from which such a schema is made."""
        return super().is_config(config_path.removeprefix(_SCHEMAS))

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file and add the name of its schema, or make a schema."""
        result = super().load_config(config_path.removeprefix(_SCHEMAS))
        file = PurePosixPath(config_path.removeprefix(_SCHEMAS)).with_suffix("")
        config = result.config
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
            implied = {"name": file.name, "labels": "assistant", "sink": file.name}
            for key in implied.keys() & CLASS_GROUPS[group].__dataclass_fields__.keys():  # type: ignore[attr-defined]
                config.setdefault(key, implied[key])
        return result


def _is_class(group: str, config: DictConfig) -> bool:
    """Return whether a file names a class and inherits from no option with a schema."""
    others = [entry for entry in config.get("defaults") or [] if entry != "_self_"]
    return group in CLASS_GROUPS and "_target_" in config and not others


class UserSearchPath(SearchPathPlugin):
    """Search-path plugin that adds ``./conf`` of the working directory after our own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the directory, if it exists."""
        directory = user_directory()
        if directory is not None:
            search_path.append("./conf", f"{_SCHEME}://{directory}")


def read_user_config() -> None:
    """Add ``./conf`` to Hydra's search path; idempotent."""
    plugins = Plugins.instance()
    plugins.register(UserSource)
    plugins.register(UserSearchPath)


_TRUSTED = ("mens_exp.", "lightning.", "torch.")
_GROUPS = "|".join(sorted(CLASS_GROUPS.keys() - {"callbacks"}))
_PLACE = re.compile(
    rf"(({_GROUPS})|(callbacks|logger)\.\w+|trainer\.(strategy|profiler|plugins\.\d+))\._target_"
)


def refuse_untrusted(values: Any, file: Path) -> None:
    """Refuse a stored configuration that could run untrusted code.

    Args:
        values: the configuration as plain data, with nothing resolved.
        file: the file it was read from, for messages.

    Raises:
        ConfigError: it names an untrusted class, or refers to the environment.
        Problems: several of these.
    """
    found = [*_targets(values, file), *_references(values, file), *_remote_code(values, file)]
    found += _functions(values, file)
    Problems.raise_if(found)


def _targets(values: Any, file: Path) -> Iterator[ConfigError]:
    vouched = user_targets() | our_targets()
    for place, target in targets_in(values):
        named = target if isinstance(target, str) else ""
        trusted = named.startswith(_TRUSTED)
        if named in vouched or (trusted and _PLACE.fullmatch(place)):
            continue
        yield ConfigError(
            "a stored configuration may not name this class",
            where=f"{file}: {place}",
            found=str(target),
            expected="a class of mens_exp, lightning or torch, at its group's own place"
            if trusted
            else "a class of mens_exp, lightning or torch",
            remedy="if you know and trust it, name the same _target_ in a file of ./conf",
        )


def _remote_code(values: Any, file: Path) -> Iterator[ConfigError]:
    """Yield an error for a model's remote code, which an earlier command may have allowed."""
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, dict) or model.get("trust_remote_code") is not True:
        return
    if str(model.get("id")) not in user_trusted_models():
        yield ConfigError(
            "a stored configuration may not run a model's own code",
            where=f"{file}: model.trust_remote_code",
            found=f"true, for {model.get('id')}",
            expected="false, or a model that ./conf of the working directory trusts",
            remedy="if you trust its code, write its id and trust_remote_code: true into a file "
            "of ./conf/model",
        )


def _functions(values: Any, file: Path) -> Iterator[ConfigError]:
    """Yield an error for a suite's function: a file that would run because of another's command."""
    suite = values.get("suite") if isinstance(values, dict) else None
    if isinstance(suite, dict) and suite.get("function") is not None:
        yield ConfigError(
            "a stored configuration may not name a function to run",
            where=f"{file}: suite.function",
            found=str(suite["function"]),
            expected="null",
            remedy="name it in your own command, task=evaluate suite.function=<file>.py:<name>",
        )


def _references(values: Any, file: Path, place: str = "") -> Iterator[ConfigError]:
    """Yield the values that would be resolved when read, such as environment variables."""
    if isinstance(values, dict | list):
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in pairs:
            yield from _references(value, file, f"{place}.{key}" if place else str(key))
    elif isinstance(values, str) and "${" in values:
        yield ConfigError(
            "a stored configuration holds values, no references",
            where=f"{file}: {place}",
            found=values,
            expected="what the run wrote",
        )
