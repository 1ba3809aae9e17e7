"""User options in ``./conf``: discovery, schemas for user classes, and checks of untrusted configs.

Its files add options to our groups and never replace one of ours: two options of one name would
make a command mean another thing in another directory, so that is an error. A YAML that names a
class and inherits from nothing gets a schema made of its own keys and values, so that a misspelled
key is an error with the nearest name. Hydra reads ``./conf`` after our own directory.

A stored config.yaml may come from somebody else. It may name our classes, Lightning's and torch's,
each at its group's own place, and beyond these only what ``./conf`` of the working directory names
too, which is how the user vouches for it. The same holds for a model whose own code would run.
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
from mens_exp.config.objective import ObjectiveConfig
from mens_exp.config.optim import OptimizerConfig
from mens_exp.config.trainer import CallbackConfig
from mens_exp.errors import ConfigError, DataError, Problems, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.config_source import ConfigResult

# What every class of a group has; the rest is the user's.
CLASS_GROUPS: dict[str, type] = {
    "backend": BackendConfig,
    "callbacks": CallbackConfig,
    "objective": ObjectiveConfig,
    "optim": OptimizerConfig,
}


def user_schema(group: str, values: Mapping[str, Any], where: str) -> type:
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


_frozen: Path | None = None


def config_directory() -> Path:
    """Return the directory of our config groups, in an installed wheel or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def user_directory() -> Path | None:
    """Return ``./conf`` of the working directory, where there is one and it is not ours."""
    if _frozen is not None:
        return _frozen
    here = Path.cwd() / "conf"
    return here if here.is_dir() and here.resolve() != config_directory().resolve() else None


@contextmanager
def frozen_as(copy: Path | None) -> Iterator[None]:
    """Read ``./conf`` from a copy inside the block, whatever becomes of the original."""
    global _frozen  # noqa: PLW0603  # Hydra's plugins are classes that it makes itself
    before, _frozen = _frozen, copy
    try:
        yield
    finally:
        _frozen = before


@functools.cache
def our_options() -> dict[str, tuple[str, ...]]:
    """List our config groups, each with its options, from the files that are there."""
    root = config_directory()
    groups: dict[str, list[str]] = {}
    for file in sorted(root.rglob("*.yaml")):
        group = file.parent.relative_to(root).as_posix()
        if group not in {".", "hydra"} and not group.startswith("hydra/"):
            groups.setdefault(group, []).append(file.stem)
    return {group: tuple(options) for group, options in sorted(groups.items())}


def group_options() -> dict[str, tuple[str, ...]]:
    """List every config group with the options it has, ours first."""
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
    """Tell one state of ``./conf`` from another: where it is, and its files with size and time."""
    root = user_directory()
    if root is None:
        return ()
    states = [(file, (root / file).stat()) for file in _own_files()]
    return (root, *((file, state.st_size, state.st_mtime_ns) for file, state in states))


def user_config_problems() -> Iterator[ConfigError]:
    """Yield what would make a file of ``./conf`` do nothing, or not what it says."""
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
        if close is not None:  # any other folder is none of our business
            yield ConfigError(
                "is in no config group", where=where, found=group, expected=f"such as {close}"
            )
    elif isinstance(values := _read(root / file), str):
        yield ConfigError("is no YAML mapping", where=where, found=values)
    elif group in CLASS_GROUPS and "_target_" in values:
        yield from key_problems(values, where)


def _read(file: Path) -> dict[str, Any] | str:
    """Read a file's mapping, or say why there is none."""
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
    """Yield the dotted place and the value of every ``_target_``, however deep."""
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
    """The files of ``./conf``, and under ``schema/own`` the schemas made of them."""

    @staticmethod
    def scheme() -> str:
        """Name the kind of source."""
        return _SCHEME

    def is_config(self, config_path: str) -> bool:
        """Tell whether there is such a file, or the file that such a schema is made of."""
        return super().is_config(config_path.removeprefix(_SCHEMAS))

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file and name its schema in it, or make a schema."""
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
            implied = {"name": file.name, "labels": "assistant"}
            for key in implied.keys() & CLASS_GROUPS[group].__dataclass_fields__.keys():  # type: ignore[attr-defined]
                config.setdefault(key, implied[key])
        return result


def _is_class(group: str, config: DictConfig) -> bool:
    """Tell whether a file names a class and inherits from no option, whose schema would hold."""
    others = [entry for entry in config.get("defaults") or [] if entry != "_self_"]
    return group in CLASS_GROUPS and "_target_" in config and not others


class UserSearchPath(SearchPathPlugin):
    """Puts ``./conf`` of the working directory behind ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the directory, where there is one."""
        directory = user_directory()
        if directory is not None:
            search_path.append("./conf", f"{_SCHEME}://{directory}")


def read_user_config() -> None:
    """Let Hydra look into ``./conf`` from now on; doing so again changes nothing."""
    plugins = Plugins.instance()
    plugins.register(UserSource)
    plugins.register(UserSearchPath)


_TRUSTED = ("mens_exp.", "lightning.", "torch.")
_GROUPS = "|".join(sorted(CLASS_GROUPS.keys() - {"callbacks"}))
_PLACE = re.compile(rf"(({_GROUPS})|callbacks\.\w+)\._target_")


def refuse_untrusted(values: Any, file: Path) -> None:
    """Refuse a stored configuration that could run something nobody here has vouched for.

    Args:
        values: the configuration, as plain data, nothing of it resolved.
        file: where it was read from, for messages.

    Raises:
        ConfigError: it names such a class, or refers to the environment.
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
    """Yield the code of a model that would run because another's command once allowed it."""
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
    """Yield a suite's own function: a file that would be run because another's command named it."""
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
    """Yield what would be looked up when read, such as a variable of the environment."""
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
