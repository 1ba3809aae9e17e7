"""User options in ``./conf``: discovery, and schemas for user classes.

Files in ``./conf`` add options to our groups and never replace ours. Two options of the same name
would give a command different meanings in different directories, so that is an error. A YAML that
names a class and inherits from nothing gets a schema made from its own keys and values, so that a
misspelled key is an error that suggests the nearest name. Hydra searches ``./conf`` after our own
directory.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.backend import BackendConfig
from mens_exp.config.data_sources import OwnData
from mens_exp.config.fields import setting
from mens_exp.config.logger import OwnLogger
from mens_exp.config.objective import ObjectiveConfig
from mens_exp.config.optim import OptimizerConfig
from mens_exp.config.root import MOVED
from mens_exp.config.schedule import OwnSchedule
from mens_exp.config.trainer import REFUSED, CallbackConfig, ModuleConfig
from mens_exp.errors import ConfigError, DataError, Problems, SetupError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from importlib.metadata import EntryPoint

    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.config_source import ConfigResult

# The fields that every class of a group has; the others are the user's.
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


@dataclass(frozen=True, slots=True)
class Sources:
    """The config sources that a command adds.

    Attributes:
        name: the primary config, which is ours unless the command names another.
        directories: directories of options, besides ``./conf``, in their order.
    """

    name: str = "config"
    directories: tuple[Path, ...] = ()


_sources = Sources()
_frozen: tuple[Path, ...] | None = None


@contextmanager
def reading(sources: Sources) -> Iterator[None]:
    """Read other config sources too inside the block."""
    global _sources  # noqa: PLW0603  # Hydra instantiates its plugin classes itself
    before, _sources = _sources, sources
    try:
        yield
    finally:
        _sources = before


def primary_config() -> str:
    """Return the name of the primary config."""
    return _sources.name


def sources_of(name: str | None, directory: str | None, searchpath: Sequence[str]) -> Sources:
    """Return the sources that flags and overrides of a command add.

    Args:
        name: of ``--config-name``.
        directory: of ``--config-dir``.
        searchpath: of ``hydra.searchpath`` on the command line; empty takes the primary config's.

    Raises:
        ConfigError: a source is not there.
        Problems: several of these.
    """
    problems: list[ConfigError] = []
    told = [] if directory is None else [("--config-dir", f"file://{directory}")]
    found = [one for where, text in told if (one := _source(where, text, problems)) is not None]
    stem = "config" if name is None else name.removesuffix(".yaml")
    places = [config_directory(), *filter(None, [user_directory()]), *found]
    file = next((one / f"{stem}.yaml" for one in places if (one / f"{stem}.yaml").is_file()), None)
    if file is None:
        problems.append(
            ConfigError(
                "there is no such primary config",
                where="--config-name",
                found=str(name),
                expected=f"{stem}.yaml in {', '.join(map(str, places[1:])) or './conf'}",
                remedy="name a file of ./conf, or of the directory that --config-dir names",
            )
        )
    listed = list(searchpath) or ([] if file is None else _searchpath_in(file))
    for text in listed:
        one = _source("hydra.searchpath", text, problems)
        found += [] if one is None else [one]
    Problems.raise_if(problems)
    return Sources(stem, tuple(dict.fromkeys(found)))


def _source(where: str, text: str, problems: list[ConfigError]) -> Path | None:
    """Return the directory of a source; one that is not there is added to the problems."""
    scheme, _, rest = text.rpartition("://")
    try:
        place = Path(rest).expanduser()
        if scheme == "pkg":
            place = Path(str(resources.files(rest)))
        if scheme in {"", "file", "pkg"} and place.is_dir():
            return place.absolute()
    except (ImportError, TypeError, ValueError):
        pass
    problems.append(
        ConfigError(
            "is no directory of options",
            where=where,
            found=text.removeprefix("file://"),
            expected="file://<directory>, or pkg://<importable package>",
            remedy="name one that is there; it holds a directory for each group, as ./conf does",
        )
    )
    return None


def _searchpath_in(file: Path) -> list[str]:
    """Return the search path that a primary config asks for."""
    values = read_option(file)
    hydra = values.get("hydra") if isinstance(values, dict) else None
    listed = hydra.get("searchpath") if isinstance(hydra, dict) else None
    resolved = OmegaConf.to_container(OmegaConf.create({"of": listed or []}), resolve=True)
    assert isinstance(resolved, dict)
    return [str(one) for one in resolved["of"]]


@functools.cache
def config_directory() -> Path:
    """Return the directory of our config groups, for an installed wheel or a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    found = installed if installed.is_dir() else package.parents[1] / "conf"
    return found.resolve()


def user_directory() -> Path | None:
    """Return ``./conf`` of the working directory, if it exists and is not our own."""
    here = Path.cwd() / "conf"
    return here if here.is_dir() and here.resolve() != config_directory() else None


def user_directories() -> tuple[Path, ...]:
    """Return every directory of the user's options, in the order in which Hydra searches them."""
    if _frozen is not None:
        return _frozen
    own = user_directory()
    return (*([] if own is None else [own]), *_sources.directories, *package_directories())


@functools.cache
def package_directories() -> tuple[Path, ...]:
    """Return the directories of options that installed packages add, by entry point.

    Raises:
        SetupError: a package names a directory that it does not have.
    """
    return tuple(
        _directory_of(one)
        for one in sorted(entry_points(group=PACKAGES), key=lambda one: (one.name, one.value))
    )


PACKAGES = "mens_exp.conf"
"""The entry point group of packages that hold options, each named by an importable package."""


def _directory_of(offer: EntryPoint) -> Path:
    try:
        spec = find_spec(offer.value)
    except ImportError:
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise SetupError(
            "an installed package's options are not there",
            where=f"entry point {offer.name} of {PACKAGES}",
            found=offer.value,
            expected="a package that holds a directory for each group, as ./conf does",
            remedy=f"repair or uninstall {offer.dist.name if offer.dist else 'the package'}",
        )
    return Path(places[0])


@contextmanager
def frozen_as(copies: Sequence[Path]) -> Iterator[None]:
    """Read the user's options from copies within the context, whatever becomes of the originals."""
    global _frozen  # noqa: PLW0603  # Hydra instantiates its plugin classes itself
    before, _frozen = _frozen, tuple(copies)
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
    for _, file in _own_files():
        group, _, option = file.with_suffix("").as_posix().partition("/")
        own.setdefault(group, []).append(option)
    return {
        group: (*options, *(option for option in own.get(group, ()) if option not in options))
        for group, options in our_options().items()
    }


def hydra_options(kind: str) -> frozenset[str]:
    """Return the options of `hydra/launcher` or `hydra/sweeper` that plugins or the user add.

    Args:
        kind: ``launcher`` or ``sweeper``.
    """
    Plugins.instance()  # imports the plugins, which store their options
    group = f"hydra/{kind}"
    store: Any = ConfigStore.instance().repo.get("hydra", {})
    stored = {name.removesuffix(".yaml") for name in store.get(kind, {})}
    own = {file.stem for _, file in _own_files() if file.parent.as_posix() == group}
    return frozenset(stored | own)


def _own_files() -> list[tuple[Path, Path]]:
    """List the user's files: their directory, and their path in it."""
    return [
        (root, file)
        for root in user_directories()
        for file in sorted(found.relative_to(root) for found in root.rglob("*.yaml"))
    ]


def user_fingerprint() -> tuple[Any, ...]:
    """Return a fingerprint of the user's options: each file with its size and its time."""
    states = [(root / file, (root / file).stat()) for root, file in _own_files()]
    return (_sources, *((file, state.st_size, state.st_mtime_ns) for file, state in states))


def user_config_problems() -> Iterator[ConfigError]:
    """Yield the problems that make a file of the user's ineffective or misleading."""
    for root, file in _own_files():
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
    """Return the name of a user's file in messages: short in ``./conf``, whole elsewhere."""
    return f"conf/{file.as_posix()}" if root == user_directory() else str(root / file)


def _file_problems(root: Path, file: Path) -> Iterator[ConfigError]:
    where = _place(root, file)
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
    elif isinstance(values := read_option(root / file), str):
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
    elif group in _REGISTERED and "_target_" in values:
        yield ConfigError(
            f"{_REGISTERED[group]} is registered by an installed package, and not by its class",
            where=f"{where}: _target_",
            found=values["_target_"],
            expected="an entry point, a SPEC, and this file with /schema/… in its defaults",
            remedy="see docs/how-to/extending.md, 'An installed suite, objective, …'; "
            "pip install -e . of a folder with a pyproject.toml is enough",
        )


_REGISTERED = {"suite": "a suite", "quant": "a quantizer", "lora": "an adapter method"}


def read_option(file: Path) -> dict[str, Any] | str:
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
            implied = dict.fromkeys(("name", "sink", "source"), file.name) | {"labels": "assistant"}
            for key in implied.keys() & CLASS_GROUPS[group].__dataclass_fields__.keys():  # type: ignore[attr-defined]
                config.setdefault(key, implied[key])
        return result


def _is_class(group: str, config: DictConfig) -> bool:
    """Return whether a file names a class and inherits from no option with a schema."""
    others = [entry for entry in config.get("defaults") or [] if entry != "_self_"]
    return group in CLASS_GROUPS and "_target_" in config and not others


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
