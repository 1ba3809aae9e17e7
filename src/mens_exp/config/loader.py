"""The config loader: schemas under Hydra's ``/schema``, and a cache of each choice of options.

Hydra reads and merges about two hundred small files for every configuration it composes. The cells
of a sweep differ in values more often than in options, so each cell starts from a copy of the
merged options.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import pickle
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hydra._internal import defaults_list as hydra_defaults
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from mens_exp.config import logger, lora, quant, root, sweep
from mens_exp.config.option_files import user_fingerprint
from mens_exp.config.schemas import REGISTRIES, SCHEMAS, schema_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra._internal.config_repository import IConfigRepository
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.default_element import InputDefault
    from hydra.core.override_parser.types import Override
    from omegaconf import Container

    from mens_exp.config.plugins import Registry

_SCHEME = "mens-specs"


class SpecSource(ConfigSource):
    """Config source of the specs' schemas; a spec is imported when its schema is read."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source."""
        return _SCHEME

    def available(self) -> bool:
        """Return true: the registries always exist."""
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the schema of a spec."""
        group, name = _schema_at(config_path) or ("", "")
        node = _open(schema_in(REGISTRIES[group].named(name)))
        return ConfigResult(
            self.provider, config_path, node, {"package": None}, is_schema_source=True
        )

    def is_config(self, config_path: str) -> bool:
        """Return whether a package or ``./conf`` adds such a schema."""
        return _schema_at(config_path) is not None

    def is_group(self, config_path: str) -> bool:
        """Return whether the path is that of a group with added schemas."""
        group = config_path.removeprefix("schema/")
        return group in REGISTRIES and bool(REGISTRIES[group].added_names())

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the schemas of a group."""
        group = config_path.removeprefix("schema/")
        if results_filter is ObjectType.GROUP or group not in REGISTRIES:
            return []
        return sorted(REGISTRIES[group].added_names())


def _schema_at(config_path: str) -> tuple[str, str] | None:
    """Return the group and the name of an added schema."""
    first, _, rest = config_path.removesuffix(".yaml").partition("/")
    group, _, name = rest.partition("/")
    is_one = first == "schema" and group in REGISTRIES
    return (group, name) if is_one and name in REGISTRIES[group].added_names() else None


class SpecSearchPath(SearchPathPlugin):
    """Search-path plugin that adds the schemas of packages and of ``./conf``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the schemas, if there are any."""
        if any(registry.added_names() for registry in REGISTRIES.values()):
            search_path.append("specs", f"{_SCHEME}://")


_map_of_choices = hydra_defaults._create_interpolation_map  # noqa: SLF001  # as below


def _map_where_interpolated(
    overrides: Any, defaults_list: list[InputDefault], self_added: bool
) -> DictConfig:
    """Build Hydra's map of choices only if a defaults list uses it; Hydra does for every file."""
    if any(one.is_interpolation() for one in defaults_list):
        return _map_of_choices(overrides, defaults_list, self_added)
    return OmegaConf.create()


def admit_named() -> None:
    """Add the names of added specs to the enumerations of the settings.

    An enumeration is fixed at import, but ``./conf`` depends on the working directory. An added
    member stays for the life of the process; the registry refuses it if no file adds the name.
    """
    registries: list[tuple[Any, Registry[Any]]] = [
        (quant.QuantType, quant.QUANTIZERS),
        (lora.LoraVariant, lora.ADAPTERS),
    ]
    for choices, registry in registries:
        for name in registry.added_names():
            if name not in choices.__members__:
                member = object.__new__(choices)
                member._name_ = member._value_ = name
                choices._member_names_.append(name)
                choices._member_map_[name] = choices._value2member_map_[name] = member


_LAST = "root"  # registered last, so its presence means that all are registered


def register() -> None:
    """Add every schema to Hydra's config store once; called before each composition."""
    admit_named()
    hydra_defaults._create_interpolation_map = _map_where_interpolated  # noqa: SLF001
    store = ConfigStore.instance()
    if f"{_LAST}.yaml" in store.repo.get("schema", {}):
        return
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=_open(schema))
    # Installed plugins register schemas at Hydra's first plugin search; ours must come later.
    plugins = Plugins.instance()
    plugins.register(SpecSource)
    plugins.register(SpecSearchPath)
    earlier = {name: sweep.LAUNCHERS[now] for name, now in sweep.EARLIER.items()}
    for name, launcher_schema in {**sweep.LAUNCHERS, **earlier}.items():
        store.store(group="hydra/launcher", name=name, node=launcher_schema)
    store.store(group="hydra/sweeper", name=sweep.OPTUNA, node=sweep.OptunaSweeper)
    store.store(group="schema", name=_LAST, node=_open(root.RunConfig))


def _open(schema: type) -> DictConfig:
    """Allow new keys only in mappings whose keys the user chooses."""
    node = OmegaConf.structured(schema)
    assert isinstance(node, DictConfig)
    _open_within(node)
    return node


def _open_within(node: DictConfig) -> None:
    for name in node:
        child = node._get_node(name)  # noqa: SLF001  # a missing value must not raise
        if not isinstance(child, DictConfig):
            continue
        if is_open(child):
            OmegaConf.set_struct(child, value=False)
        elif not (child._is_none() or child._is_missing()):  # noqa: SLF001  # as above
            _open_within(child)


def is_open(node: Any) -> bool:
    """Return whether a node is a mapping with user-chosen keys, such as lora.rank_pattern."""
    if not isinstance(node, DictConfig):
        return False
    annotated = node._metadata  # noqa: SLF001  # OmegaConf offers no public access
    return annotated.key_type is str and not dataclasses.is_dataclass(annotated.element_type)


@functools.lru_cache(maxsize=1024)
def shared_override(text: str) -> Override:
    """Parse an override with a cache (parsing takes a millisecond); do not modify the result.

    Raises:
        hydra.errors.HydraException: the text is not a valid override.
    """
    override: Override = OverridesParser.create().parse_overrides([text])[0]
    return override


_MERGED = "merged"
_MOST = 32  # cached option choices, a few hundred kilobytes each
# Settings of Hydra's own node that no other part of the node depends on.
_LEAVES = ("hydra.run.", "hydra.sweep.", "hydra.launcher.", "hydra.sweeper.")


@dataclass(slots=True)
class _Memory:
    """Cached reads and merges for one fingerprint of ``./conf``; our own files never change."""

    fingerprint: Any = None
    files: dict[str, ConfigResult | None] = field(default_factory=dict)
    chosen: dict[tuple[str, ...], bytes] = field(default_factory=dict)


_memory = _Memory()


def copied(config: Container) -> Any:
    """Return a deep copy of a node, in less than half the time of deepcopy."""
    return pickle.loads(_pickled(config))  # noqa: S301  # written here


def _pickled(config: Container) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(config)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickler that also handles the schemas of user options, which belong to no module."""

    def reducer_override(self, value: Any) -> Any:
        """Return a process-local reference for such a class; pickle everything else as usual."""
        if not isinstance(value, type) or _is_importable(value):
            return NotImplemented
        _own[id(value)] = value
        return _own_class, (id(value),)


def _is_importable(value: type) -> bool:
    # make_dataclass sets the calling module since Python 3.12, and `types` before.
    return getattr(sys.modules.get(value.__module__), value.__name__, None) is value


_own: dict[int, type] = {}


def _own_class(number: int) -> type:
    return _own[number]


def _remembered() -> _Memory:
    """Return the cache, replaced by an empty one if ``./conf`` has changed."""
    global _memory  # noqa: PLW0603  # per process: Hydra makes a loader for each command
    fingerprint = user_fingerprint()
    if _memory.fingerprint != fingerprint:
        _memory = _Memory(fingerprint)
    return _memory


class CachingLoader(ConfigLoaderImpl):
    """Config loader that composes like Hydra, starting from cached compositions."""

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,  # Hydra's signature
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Return the composed configuration; a cached choice of options is copied."""
        parsed = [shared_override(text) for text in overrides]
        choices = [one for one in parsed if self._is_choice(one)]
        values = [one for one in parsed if not self._is_choice(one)]
        rest = (config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        if run_mode is not RunMode.RUN or not all(map(_is_plain, [*choices, *values])):
            return super().load_configuration(*rest)
        key = (str(config_name), *map(_line, choices))
        chosen = _remembered().chosen
        if key not in chosen:
            while len(chosen) >= _MOST:
                del chosen[next(iter(chosen))]
            options = list(key[1:])
            composed = super().load_configuration(config_name, options, *rest[2:])
            chosen[key] = _pickled(composed)
        config: DictConfig = pickle.loads(chosen[key])  # noqa: S301  # written above
        self._apply_overrides_to_config(values, config)
        _record(parsed, config)
        return config

    def _is_choice(self, override: Override) -> bool:
        is_group = bool(self.repository.group_exists(override.key_or_group))
        return is_group and not isinstance(override.value(), dict)

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed = [shared_override(text) for text in overrides]
        if any(one.get_key_element() == "hydra.searchpath" for one in parsed):  # other files
            return super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        return parsed, _Files(self.repository, _remembered().files)

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        defaults = logger.apart(defaults)
        if not isinstance(repo, _Files):
            return super()._compose_config_from_defaults_list(defaults, repo)
        own = _Copies(repo, {})
        try:
            merged = self._merged(defaults, own)
        except OmegaConfBaseException:  # merging one by one gives a message with the file
            return super()._compose_config_from_defaults_list(defaults, own)
        made = ConfigResult(_MERGED, _MERGED, merged, {"package": None}, is_schema_source=True)
        alone: Any = SimpleNamespace(load_config=lambda **_: made)
        only = ResultDefault(config_path=_MERGED, package="", primary=True)
        return super()._compose_config_from_defaults_list([only], alone)

    def _merged(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        """Merge the files in one call: after each call, omegaconf visits every node."""
        merged = OmegaConf.create()
        with flag_override(merged, "no_deepcopy_set_nodes", True):
            merged.merge_with(*(self._load_single_config(one, repo).config for one in defaults))
        return merged


def _is_plain(override: Override) -> bool:
    """Return whether an override sets a single value that nothing else depends on."""
    key = override.key_or_group
    is_change = not (override.is_add() or override.is_force_add() or override.is_delete())
    theirs = override.is_hydra_override() and "/" not in key
    return (
        is_change
        and not override.is_sweep_override()
        and override.package is None
        and (not theirs or key.startswith(_LEAVES))
    )


def _line(override: Override) -> str:
    assert override.input_line is not None, "the parser keeps what it read"
    return override.input_line


def _record(overrides: Sequence[Override], config: DictConfig) -> None:
    """Record the command and the current environment in Hydra's node."""
    ours = [one for one in overrides if not one.is_hydra_override()]
    node, naming = config.hydra, config.hydra.job.config.override_dirname
    node.overrides.hydra = [_line(one) for one in overrides if one.is_hydra_override()]
    node.overrides.task = [_line(one) for one in ours]
    node.runtime.cwd = str(Path.cwd())
    for name in node.job.env_copy:
        node.job.env_set[name] = os.environ[name]
    node.job.override_dirname = get_overrides_dirname(
        ours, list(naming.exclude_keys), item_sep=naming.item_sep, kv_sep=naming.kv_sep
    )


class _Files(CachingConfigRepository):
    """Config repository that caches what it reads in ``cache``, without copying its source."""

    def __init__(
        self, repository: IConfigRepository, cache: dict[str, ConfigResult | None]
    ) -> None:
        self.delegate = repository
        self.cache = cache


class _Copies(_Files):
    """Repository that returns copies, because merging modifies its inputs."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a copy of the file's contents."""
        read = self.delegate.load_config(config_path)
        return None if read is None else replace(read, config=copied(read.config))
