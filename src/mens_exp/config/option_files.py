"""Directories and files of options: built-in, of the user, and of installed packages.

User directories are ``./conf`` and those in ``--config-dir`` and ``hydra.searchpath``. Each has one
subdirectory per config group. A sweep freezes them: its jobs read copies.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.errors import ConfigError, DataError, Problems, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.metadata import EntryPoint


@dataclass(frozen=True, slots=True)
class Sources:
    """The config sources that a command adds.

    Attributes:
        name: the primary config; ours unless the command names another.
        directories: option directories other than ``./conf``, in order.
    """

    name: str = "config"
    directories: tuple[Path, ...] = ()


_sources = Sources()
_frozen: tuple[Path, ...] | None = None


@contextmanager
def reading(sources: Sources) -> Iterator[None]:
    """Add config sources inside the block."""
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
        name: value of ``--config-name``.
        directory: value of ``--config-dir``.
        searchpath: ``hydra.searchpath`` on the command line; if empty, the primary config's.

    Raises:
        ConfigError: a source does not exist.
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
                "primary config not found",
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
    """Return the directory of a source; append to `problems` if it does not exist."""
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
            "is not a config directory",
            where=where,
            found=text.removeprefix("file://"),
            expected="file://<directory>, or pkg://<importable package>",
            remedy="name an existing directory with one subdirectory for each group, like ./conf",
        )
    )
    return None


def _searchpath_in(file: Path) -> list[str]:
    """Return the search path of a primary config."""
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
    """Return every directory of user options, in Hydra's search order."""
    if _frozen is not None:
        return _frozen
    own = user_directory()
    return (*([] if own is None else [own]), *_sources.directories, *package_directories())


@functools.cache
def package_directories() -> tuple[Path, ...]:
    """Return the directories of options that installed packages add, by entry point.

    Raises:
        SetupError: a package names a directory that does not exist.
    """
    return tuple(
        _directory_of(one)
        for one in sorted(entry_points(group=PACKAGES), key=lambda one: (one.name, one.value))
    )


PACKAGES = "mens_exp.conf"
"""The entry point group of option directories; each entry names an importable package."""


def _directory_of(offer: EntryPoint) -> Path:
    try:
        spec = find_spec(offer.value)
    except ImportError:
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise SetupError(
            "the config directory of an installed package is missing",
            where=f"entry point {offer.name} of {PACKAGES}",
            found=offer.value,
            expected="a package with one directory for each group, like ./conf",
            remedy=f"repair or uninstall {offer.dist.name if offer.dist else 'the package'}",
        )
    return Path(places[0])


@contextmanager
def frozen_as(copies: Sequence[Path]) -> Iterator[None]:
    """Read the user's options from copies inside the block, even if the originals change."""
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
    for _, file in own_files():
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
    own = {file.stem for _, file in own_files() if file.parent.as_posix() == group}
    return frozenset(stored | own)


def own_files() -> list[tuple[Path, Path]]:
    """List the user's files as directory and relative path."""
    return [
        (root, file)
        for root in user_directories()
        for file in sorted(found.relative_to(root) for found in root.rglob("*.yaml"))
    ]


def user_fingerprint() -> tuple[Any, ...]:
    """Return a fingerprint of the user's options: each file with size and modification time."""
    states = [(root / file, (root / file).stat()) for root, file in own_files()]
    return (_sources, *((file, state.st_size, state.st_mtime_ns) for file, state in states))


SPEC_GROUPS = {"lora": "variant", "quant": "quant_type", "suite": "name"}
"""Groups whose options may name a spec by ``_target_`` (the spec has the option's name), and the
setting that selects the spec."""


def named_specs(group: str) -> dict[str, tuple[Path, str]]:
    """Return the specs named in the user's options: name -> (file, ``module.SPEC``).

    Args:
        group: one of :data:`SPEC_GROUPS`.
    """
    found: dict[str, tuple[Path, str]] = {}
    for root in user_directories():
        for file in sorted((root / group).glob("*.yaml")):
            state = file.stat()
            target = _target_in(file, state.st_mtime_ns, state.st_size)
            if target is not None:
                found.setdefault(file.stem, (file, target))
    return found


@functools.lru_cache(maxsize=256)
def _target_in(file: Path, _written_ns: int, _size: int) -> str | None:
    values = read_option(file)
    target = values.get("_target_") if isinstance(values, dict) else None
    return target if isinstance(target, str) else None


def read_option(file: Path) -> dict[str, Any] | str:
    """Read a file's mapping, or return the reason why it cannot be read."""
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    except DataError as error:
        return str(error.found)
    except (OSError, UnicodeDecodeError) as error:
        return " ".join(str(error).split())
    if values is None:
        return {}
    return values if isinstance(values, dict) else type(values).__name__
