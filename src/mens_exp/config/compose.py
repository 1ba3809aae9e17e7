"""Compose override strings into a frozen, typed configuration with Hydra's compose API."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.loader import CachingLoader, admit_named, copied, register, shared_override
from mens_exp.config.model import default_tokenizer_of_random
from mens_exp.config.optim import lr_beside
from mens_exp.config.option_files import (
    config_directory,
    group_options,
    primary_config,
    user_fingerprint,
)
from mens_exp.config.promotion import StudyConfig
from mens_exp.config.root import MOVED, RunConfig, moved_to
from mens_exp.config.schemas import SCHEMAS, absent_specs, is_added, schema_of
from mens_exp.config.trainer import steps_beside
from mens_exp.config.untrusted_config import our_targets, refuse_untrusted
from mens_exp.config.user_config import CLASS_GROUPS, read_user_config, user_schema
from mens_exp.errors import ConfigError, DataError, Problems, SetupError, expected_name

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator, Sequence

VERSION_BASE = "1.3"
# Settings that our options derive from other settings.
_DEPENDENT = (
    ("trainer", "max_steps"),
    ("tokenizer", "name"),
    ("tokenizer", "allow_control_text"),
    ("optim", "lr"),
)
_PERMISSION = "allow_unrelated_rows"  # older vox runs predate this setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """One composed cell: its values, and the option chosen for each group.

    Attributes:
        overrides: the overrides it was composed from, as typed.
        values: the configuration, without Hydra's own node.
        choices: the option of each group; several options are joined by commas.
        whole: the configuration as Hydra composed it, with Hydra's node; None for a frozen cell.
        number: index of the cell in its sweep.
        launcher: Hydra's launcher node.
        launcher_option: the chosen option of hydra/launcher.
        sweeper: Hydra's sweeper node, with the chosen option under ``name``.
    """

    overrides: tuple[str, ...]
    values: DictConfig
    choices: dict[str, str | None]
    whole: DictConfig | None = field(default=None, repr=False)
    number: int = 0
    launcher: dict[str, Any] = field(default_factory=dict)
    launcher_option: str | None = None
    sweeper: dict[str, Any] = field(default_factory=dict)

    # Computed on demand: each hashes the whole configuration, and few cells need one.

    @property
    def run_dir(self) -> str | None:
        """The run directory that Hydra would use for a single run; None if unresolvable."""
        return _directory(self.whole, self.number, "run.dir")

    @property
    def sweep_dir(self) -> str | None:
        """The run directory of this cell within a sweep."""
        return _directory(self.whole, self.number, "sweep.dir", "sweep.subdir")

    @property
    def sweep_root(self) -> str | None:
        """The directory of the whole sweep."""
        return _directory(self.whole, self.number, "sweep.dir")


def without_hydra(config: DictConfig) -> DictConfig:
    """Return a copy without Hydra's own node, with interpolations resolved."""
    ours = _visible(config)
    OmegaConf.resolve(ours)
    return ours


def config_digest(config: DictConfig) -> str:
    """Hash the composed values: SHA-256 over canonical JSON, 64 hexadecimal digits."""
    return digest(_plain(without_hydra(config)))


def stored_digest(path: Path) -> str:
    """Hash the values in a run's config.yaml; its record holds their :func:`config_digest`.

    Keys that later releases added, moved or renamed do not change the hash.

    Args:
        path: a file that :func:`from_yaml` accepts.
    """
    stored = _mapping_in(path, path.read_bytes())
    return digest(OmegaConf.to_container(stored, resolve=False))


def _plain(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    if not isinstance(plain, dict):  # a file not written by a run
        raise TypeError("a section is not a mapping")
    return {str(key): value for key, value in plain.items()}


def begin_command() -> None:
    """Forget the start time, which names run directories, and the configurations read so far."""
    _start_utc.cache_clear()
    _loaded.cache_clear()


@functools.cache
def _start_utc() -> str:
    """Return the time of this command's first directory name, to the millisecond."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3] + "Z"


def prepare_hydra() -> None:
    """Register the schemas, ``./conf``, and the resolvers used by conf/config.yaml."""
    register()
    read_user_config()
    resolvers: dict[str, Any] = {
        "mens.utc": _start_utc,
        "mens.digest8": lambda *, _root_: config_digest(_root_)[:8],
        "mens.experiment": _experiment_directory,
        "mens.steps": steps_beside,
        "mens.if_random": default_tokenizer_of_random,
        "mens.lr": lr_beside,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _experiment_directory(*, _root_: DictConfig) -> str:
    choice = OmegaConf.select(_root_, "hydra.runtime.choices.experiment")
    return str(choice) if choice else "default"


@contextmanager
def _hydra() -> Iterator[None]:
    prepare_hydra()
    theirs = GlobalHydra.instance().hydra  # belongs to an application that uses this package
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_directory()), version_base=VERSION_BASE):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            hydra.config_loader = CachingLoader(hydra.config_loader.get_search_path())
            yield
    finally:
        GlobalHydra.instance().hydra = theirs


def show_help(parser: ArgumentParser, parsed: Namespace) -> None:
    """Print Hydra's output for ``--help`` or ``--hydra-help``.

    ``hydra.main`` would print the same text, but it copies every config group once per option,
    which takes longer than computing a plan.

    Args:
        parser: the parser of Hydra's flags.
        parsed: the parsed command, with ``help`` or ``hydra_help`` set.

    Raises:
        hydra.errors.HydraException: Hydra rejects an override.
    """
    with _hydra():
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        show = hydra.app_help if parsed.help else hydra.hydra_help
        show(config_name=primary_config(), args_parser=parser, args=parsed)


@contextmanager
def hydra_context(config: DictConfig) -> Iterator[HydraContext]:
    """Return the context for Hydra's plugins: our config loader and the configured callbacks.

    Args:
        config: a composed configuration with Hydra's node.
    """
    with _hydra():
        loader = GlobalHydra.instance().config_loader()
        yield HydraContext(config_loader=loader, callbacks=Callbacks(config))


def run_composed(
    one: Composed, task: Callable[[Path], int], *, configures_logging: bool = True
) -> int:
    """Run a task as Hydra runs a single job, with its directory, logging and callbacks.

    The configuration is exactly the one that was composed and checked. ``hydra.main`` would compose
    it twice more, which takes a third of the time of a plan.

    Args:
        one: a composed configuration that is not a cell of a sweep.
        task: called with the run directory, which already exists; returns an exit code.
        configures_logging: whether Hydra configures Python's logging for the whole process.

    Raises:
        SetupError: the directory cannot be created.
    """
    config = one.whole
    assert config is not None, "a frozen cell is run by its sweep"
    if one.run_dir is not None:
        try:
            Path(one.run_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                "the run directory cannot be created",
                where="hydra.run.dir",
                found=str(error),
                remedy="name a directory that you may write to",
            ) from error
    with hydra_context(config) as context:
        with read_write(config):
            config.hydra.mode = RunMode.RUN
        callbacks = context.callbacks
        callbacks.on_run_start(config=config, config_name=primary_config())
        done = run_job(
            hydra_context=context,
            task_function=lambda _: task(Path(HydraConfig.get().runtime.output_dir)),
            config=config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
            configure_logging=configures_logging,
        )
        callbacks.on_run_end(config=config, config_name=primary_config(), job_return=done)
    return int(done.return_value)


def compose(cells: Sequence[Sequence[str]], *, first: int = 0) -> list[Composed]:
    """Compose one configuration for each list of overrides.

    Args:
        cells: one list of overrides per cell.
        first: index of the first cell in its sweep.

    Raises:
        hydra.errors.HydraException: Hydra itself rejects an override.
        omegaconf.errors.OmegaConfBaseException: a schema rejects a value.
    """
    composed = []
    with _hydra():
        for number, overrides in enumerate(cells, start=first):
            config = hydra_compose(primary_config(), list(overrides), return_hydra_config=True)
            composed.append(
                Composed(
                    overrides=tuple(overrides),
                    values=_with_resolved_values(_visible(config)),
                    choices={**_choices(config), **_lists(overrides)},
                    whole=config,
                    number=number,
                    launcher=_plugin(config, "launcher"),
                    launcher_option=_option(config, "launcher"),
                    sweeper={"name": _option(config, "sweeper"), **_plugin(config, "sweeper")},
                )
            )
    return composed


def _with_resolved_values(values: DictConfig) -> DictConfig:
    """Resolve interpolations in place, because the processes that receive it have no resolvers."""
    for group, key in _DEPENDENT:
        if OmegaConf.is_interpolation(values[group], key):
            values[group][key] = values[group][key]
    return values


def _choices(config: DictConfig) -> dict[str, str | None]:
    choices = OmegaConf.to_container(config.hydra.runtime.choices)
    assert isinstance(choices, dict)
    return {
        str(group): None if option is None else str(option)
        for group, option in choices.items()
        if not str(group).startswith(("hydra/", "schema/", "/schema", "callbacks/"))
        and "@" not in str(group)
    }


def _plugin(config: DictConfig, kind: str) -> dict[str, Any]:
    """Return the node of Hydra's launcher or sweeper."""
    node = OmegaConf.to_container(config.hydra[kind])
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def _option(config: DictConfig, kind: str) -> str | None:
    option = config.hydra.runtime.choices.get(f"hydra/{kind}")
    return None if option is None else str(option)


def _lists(overrides: Sequence[str]) -> dict[str, str]:
    """Return the groups set to a list of options, which Hydra omits from its choices."""
    parsed = [shared_override(text) for text in overrides if "[" in text]
    return {
        one.key_or_group: ",".join(map(str, value))
        for one in parsed
        if one.key_or_group in group_options() and isinstance(value := one.value(), list)
    }


def _directory(config: DictConfig | None, number: int, *parts: str) -> str | None:
    """Resolve the run directory that Hydra will use for the job with this number."""
    if config is None:
        return None
    try:
        with open_dict(config):
            config.hydra.job.num = number
        return str(Path(*(str(OmegaConf.select(config.hydra, part)) for part in parts)))
    except OmegaConfBaseException:  # Hydra will report it
        return None


def _visible(config: DictConfig) -> DictConfig:
    """Return a copy without Hydra's node; missing values stay missing."""
    own = vars(config)  # the only way to copy all nodes but one
    whole = own["_content"]
    own["_content"] = {key: node for key, node in whole.items() if key != "hydra"}
    try:
        visible: DictConfig = copied(config)
    finally:
        own["_content"] = whole
    OmegaConf.set_struct(visible, None)
    return visible


def typed(values: DictConfig) -> RunConfig:
    """Convert composed values to typed objects; no later code handles a DictConfig."""
    run = OmegaConf.to_object(values)
    assert isinstance(run, RunConfig)
    return run


def to_yaml(values: DictConfig) -> str:
    """Serialize composed values as YAML, with interpolations resolved."""
    return OmegaConf.to_yaml(values, resolve=True)


# Errors of a stored value that no schema accepts; an int beyond f64 overflows.
_UNREADABLE = (
    OmegaConfBaseException,
    yaml.YAMLError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
)


def from_yaml(path: Path) -> DictConfig:
    """Load a run's stored config.yaml into the schemas.

    Raises:
        ConfigError: the file cannot be read, does not match the schemas, or names a class that
            is not trusted.
    """
    try:
        root: DictConfig = copied(_loaded(path, path.read_bytes(), user_fingerprint()))
    except DataError as error:
        raise _unreadable(path, f"{error.what}: {error.found}") from error
    except (*_UNREADABLE, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise _unreadable(path, lines[0]) from error
    return root


@functools.lru_cache(maxsize=64)  # a merge asks five times; a study has many runs
def _loaded(path: Path, data: bytes, _own_options: Any) -> DictConfig:
    """Load a stored configuration into the schemas, which the user's own options extend."""
    stored = _mapping_in(path, data)
    refuse_untrusted(OmegaConf.to_container(stored), path)
    _move_keys(stored)
    Problems.raise_if(list(absent_specs(stored, str(path))))
    root = _under_schemas(stored)
    missing = OmegaConf.missing_keys(root)
    if missing:
        raise _unreadable(path, f"no {', '.join(sorted(missing))}")
    return root


def _unreadable(path: Path, found: str) -> ConfigError:
    return ConfigError(
        "the stored configuration cannot be read",
        where=str(path),
        found=found,
        remedy="restore the file that its run wrote",
    )


def study_in(path: Path) -> StudyConfig:
    """Read a study from a file outside the config groups, with the keys of ``conf/study``.

    Raises:
        ConfigError: the file cannot be read, or has invalid keys or values.
    """
    try:
        values = _mapping_in(path, path.read_bytes())
        values.pop("defaults", None)  # present if the file also serves as an option
        node = copied(_structured(StudyConfig))
        node.merge_with(values)
        missing = sorted(OmegaConf.missing_keys(node))
        study = None if missing else OmegaConf.to_object(node)
    except DataError as error:
        raise ConfigError("cannot be read", where=str(path), found=error.found) from error
    except OSError as error:
        raise ConfigError(
            "cannot be read",
            where=str(path),
            found=error.strerror,
            expected="the file of a study, or study=<name> of ./conf/study/<name>.yaml",
            remedy="correct the path",
        ) from error
    except ConfigKeyError as error:
        raise unknown_key_in(str(path), error) from error
    except _UNREADABLE as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(
            "is not a study",
            where=f"{path}: {key}" if key else str(path),
            found=(str(error).splitlines() or [type(error).__name__])[0],
            expected="the keys of a file of conf/study; docs/how-to/studies.md lists them",
        ) from error
    if missing:
        raise ConfigError("is not a study", where=str(path), found=f"no {', '.join(missing)}")
    assert isinstance(study, StudyConfig)
    return study


def unknown_key_in(file: str, error: ConfigKeyError) -> ConfigError:
    """Return the error for a key in a file that is not in the schema.

    Args:
        file: the file, for the message.
        error: the error of OmegaConf.
    """
    assert error.object_type is not None, "the schema that lacks the key"
    known = [one.name for one in dataclasses.fields(error.object_type)]
    return ConfigError(
        "unknown key",
        where=f"{file}: {error.full_key}",
        expected=expected_name(str(error.key), known),
        remedy="correct the file",
    )


def _mapping_in(path: Path, data: bytes) -> DictConfig:
    """Create an OmegaConf mapping from a file's content."""
    stored = parse_yaml(data, str(path), _yaml_loader())
    if not isinstance(stored, dict):
        raise TypeError("the file does not contain a mapping")
    created: DictConfig = OmegaConf.create(stored)
    return created


@functools.cache
def _yaml_loader() -> Any:
    """Return OmegaConf's YAML loader, with libyaml's parser if PyYAML has it."""
    loader = get_yaml_loader()
    if not yaml.__with_libyaml__:
        return loader
    from yaml._yaml import CParser

    class WithLibyaml(CParser, loader):  # type: ignore[misc,valid-type]
        def __init__(self, stream: Any) -> None:
            CParser.__init__(self, stream)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    return WithLibyaml


def _move_keys(stored: DictConfig) -> None:
    """Move values from keys of earlier releases to the current keys, in place."""
    task = stored.get("task")
    name = task.get("name") if isinstance(task, DictConfig) else None
    for old in MOVED.keys() & stored.keys():
        section, _, key = moved_to(old, name).partition(".")
        if section not in stored:
            stored[section] = {}
        node = stored[section]
        if isinstance(node, DictConfig) and key not in node:  # otherwise it is refused later
            node[key] = stored.pop(old)


def _under_schemas(stored: DictConfig) -> DictConfig:
    """Merge stored values into the schemas selected by the groups' discriminators."""
    admit_named()
    root = copied(_structured(RunConfig))
    assert isinstance(root, DictConfig)
    for group in stored:
        node = stored[group]
        if group == "callbacks" and not isinstance(node, DictConfig):
            raise TypeError("callbacks is not a mapping")
        if group == "callbacks" or _is_several_loggers(group, node):
            root[group] = {
                name: _under(_schema(str(group), values, name=str(name)), values)
                for name, values in node.items()
            }
        elif isinstance(node, DictConfig) and group not in SCHEMAS:
            if not isinstance(root.get(group), DictConfig):
                raise TypeError(f"{group!s} is not a mapping")
            root[group].merge_with(node)
        elif isinstance(node, DictConfig):
            root[group] = _under(_schema(str(group), node), node)
        else:
            root[group] = node
    if "sandbox" not in stored:  # written before this group existed
        root["sandbox"] = SCHEMAS["sandbox"]["none"]
    if "module" not in stored:  # as above
        root["module"] = SCHEMAS["module"]["module"]
    tokenizer = stored.get("tokenizer")
    if isinstance(tokenizer, DictConfig) and _PERMISSION not in tokenizer:  # as above
        root["tokenizer"][_PERMISSION] = tokenizer.get("name") == "vox"
    return root


def _is_several_loggers(group: Any, node: Any) -> bool:
    return group == "logger" and isinstance(node, DictConfig) and "sink" not in node


def _under(schema: DictConfig, values: DictConfig) -> DictConfig:
    node: DictConfig = copied(schema)
    node.merge_with(values)
    return node


def _schema(group: str, node: DictConfig, *, name: str | None = None) -> DictConfig:
    """Return the schema of stored values; the schema of a user's class is built from its keys."""
    values = _plain(node)
    # In these groups, only user options name a class.
    is_ours = group in {"data", "logger", "schedule"} and "_target_" not in values
    is_own = group in CLASS_GROUPS and values.get("_target_") not in our_targets()
    # Both our options and user options may name a class of torch.
    is_own |= group == "optim" and values.get("name") not in SCHEMAS["optim"]
    if is_own and not is_ours and not is_added(group, values):
        return DictConfig(user_schema(group, values, name or group))
    return _structured(schema_of(group, values, name=name))


@functools.cache
def _structured(schema: type) -> DictConfig:
    """Return the cached node of a schema, to be copied; creating one is the slowest step here."""
    return DictConfig(schema)
