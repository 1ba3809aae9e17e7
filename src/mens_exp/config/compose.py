"""From override strings to a frozen, typed configuration, through Hydra's compose API."""

from __future__ import annotations

import functools
import io
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.loader import SCHEMAS, CachingLoader, copied, register, schema_of
from mens_exp.config.model import default_tokenizer_of_random
from mens_exp.config.optim import lr_beside
from mens_exp.config.root import RunConfig
from mens_exp.config.trainer import steps_beside
from mens_exp.config.user_config import (
    CLASS_GROUPS,
    config_directory,
    group_options,
    our_targets,
    read_user_config,
    refuse_untrusted,
    user_schema,
)
from mens_exp.errors import ConfigError, DataError, SetupError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator, Sequence

VERSION_BASE = "1.3"
CONFIG_NAME = "config"
# Settings that our options make of other settings.
_DEPENDENT = (
    ("trainer", "max_steps"),
    ("tokenizer", "name"),
    ("tokenizer", "allow_control_text"),
    ("optim", "lr"),
)
_PERMISSION = "allow_unrelated_rows"  # which runs of vox needed none before there was one


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """One composed cell: the values, and which option each group took.

    Attributes:
        overrides: what made it, as typed.
        values: the configuration, without Hydra's own node.
        choices: the option of each group; of several, their names with commas between.
        whole: the same with Hydra's node, as Hydra composed it; None of a frozen cell.
        number: of the cell in its sweep.
        launcher: Hydra's node of the launcher.
        launcher_option: the option of hydra/launcher.
        sweeper: Hydra's node of the sweeper, with the chosen option under ``name``.
    """

    overrides: tuple[str, ...]
    values: DictConfig
    choices: dict[str, str | None]
    whole: DictConfig | None = field(default=None, repr=False)
    number: int = 0
    launcher: dict[str, Any] = field(default_factory=dict)
    launcher_option: str | None = None
    sweeper: dict[str, Any] = field(default_factory=dict)

    # Asked for, not stored: each hashes the whole configuration, and few cells are asked.

    @property
    def run_dir(self) -> str | None:
        """The directory where Hydra would run it alone; None if it cannot be known."""
        return _directory(self.whole, self.number, "run.dir")

    @property
    def sweep_dir(self) -> str | None:
        """The directory where it runs as a cell of a sweep."""
        return _directory(self.whole, self.number, "sweep.dir", "sweep.subdir")

    @property
    def sweep_root(self) -> str | None:
        """The directory of that sweep."""
        return _directory(self.whole, self.number, "sweep.dir")


def without_hydra(config: DictConfig) -> DictConfig:
    """Copy the configuration without Hydra's own node, interpolations resolved."""
    ours = _visible(config)
    OmegaConf.resolve(ours)
    return ours


def config_digest(config: DictConfig) -> str:
    """Hash the composed values: SHA-256 over canonical JSON, 64 hexadecimal digits."""
    return digest(_plain(without_hydra(config)))


def _plain(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def begin_command() -> None:
    """Let the run directories of the command to come bear its own time."""
    _start_utc.cache_clear()


@functools.cache
def _start_utc() -> str:
    """Return the moment this command first named a directory, to the millisecond."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3] + "Z"


def prepare_hydra() -> None:
    """Register the schemas, ``./conf``, and the resolvers that conf/config.yaml uses."""
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
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_directory()), version_base=VERSION_BASE):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        hydra.config_loader = CachingLoader(hydra.config_loader.get_search_path())
        yield


def show_help(parser: ArgumentParser, parsed: Namespace) -> None:
    """Print Hydra's answer to ``--help`` or ``--hydra-help``.

    ``hydra.main`` would print the same, but copy all of its config groups for each of their
    options, which takes longer than a plan.

    Args:
        parser: of Hydra's flags.
        parsed: the command, with ``help`` or ``hydra_help`` set.

    Raises:
        hydra.errors.HydraException: an override that Hydra refuses.
    """
    with _hydra():
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        show = hydra.app_help if parsed.help else hydra.hydra_help
        show(config_name=CONFIG_NAME, args_parser=parser, args=parsed)


def run_composed(one: Composed, task: Callable[[Path], int]) -> int:
    """Run a task as Hydra runs one job: its directory, its logging, its callbacks.

    What was composed and checked is what runs. ``hydra.main`` would compose it twice more, which
    is a third of the time of a plan.

    Args:
        one: a composed configuration that is no cell of a sweep.
        task: given the directory, which is there; returns an exit code.

    Raises:
        SetupError: the directory cannot be made.
    """
    config = one.whole
    assert config is not None, "a frozen cell is run by its sweep"
    if one.run_dir is not None:
        try:
            Path(one.run_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                "the run directory cannot be made",
                where="hydra.run.dir",
                found=str(error),
                remedy="name a directory that you may write to",
            ) from error
    with _hydra():
        with read_write(config):
            config.hydra.mode = RunMode.RUN
        callbacks = Callbacks(config)
        callbacks.on_run_start(config=config, config_name=CONFIG_NAME)
        done = run_job(
            hydra_context=HydraContext(
                config_loader=GlobalHydra.instance().config_loader(), callbacks=callbacks
            ),
            task_function=lambda _: task(Path(HydraConfig.get().runtime.output_dir)),
            config=config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
        )
        callbacks.on_run_end(config=config, config_name=CONFIG_NAME, job_return=done)
    return int(done.return_value)


def compose(cells: Sequence[Sequence[str]], *, first: int = 0) -> list[Composed]:
    """Compose one configuration for each list of overrides.

    Args:
        cells: the lists.
        first: the number of the first one in its sweep.

    Raises:
        hydra.errors.HydraException: an override that Hydra itself refuses.
        omegaconf.errors.OmegaConfBaseException: a value that its schema refuses.
    """
    composed = []
    with _hydra():
        for number, overrides in enumerate(cells, start=first):
            config = hydra_compose(CONFIG_NAME, list(overrides), return_hydra_config=True)
            composed.append(
                Composed(
                    overrides=tuple(overrides),
                    values=_settled(_visible(config)),
                    choices={**_choices(config), **_lists(overrides)},
                    whole=config,
                    number=number,
                    launcher=_plugin(config, "launcher"),
                    launcher_option=_option(config, "launcher"),
                    sweeper={"name": _option(config, "sweeper"), **_plugin(config, "sweeper")},
                )
            )
    return composed


def _settled(values: DictConfig) -> DictConfig:
    """Resolve what depends on another setting, in place: processes that get it have no resolver."""
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
    """Return the groups that took a list of options, which Hydra leaves out of its choices."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return {
        one.key_or_group: ",".join(map(str, value))
        for one in parsed
        if one.key_or_group in group_options() and isinstance(value := one.value(), list)
    }


def _directory(config: DictConfig | None, number: int, *parts: str) -> str | None:
    """Resolve a run directory as Hydra will, for the job of that number."""
    if config is None:
        return None
    try:
        with open_dict(config):
            config.hydra.job.num = number
        return str(Path(*(str(OmegaConf.select(config.hydra, part)) for part in parts)))
    except OmegaConfBaseException:  # Hydra will tell
        return None


def _visible(config: DictConfig) -> DictConfig:
    """Copy without Hydra's node, keeping missing values missing."""
    visible: DictConfig = copied(config)
    visible._content.pop("hydra", None)  # type: ignore[union-attr]  # noqa: SLF001
    OmegaConf.set_struct(visible, None)
    return visible


def typed(values: DictConfig) -> RunConfig:
    """Turn composed values into typed objects; nothing after this sees a DictConfig."""
    run = OmegaConf.to_object(values)
    assert isinstance(run, RunConfig)
    return run


def to_yaml(values: DictConfig) -> str:
    """Write composed values as YAML, interpolations resolved."""
    return OmegaConf.to_yaml(values, resolve=True)


def from_yaml(path: Path) -> DictConfig:
    """Read a run's own config.yaml back into the schemas.

    Raises:
        ConfigError: the file cannot be read, holds what the schemas do not accept, or names a
            class that nobody here has vouched for.
    """
    try:
        stored = _mapping_in(path)
        refuse_untrusted(OmegaConf.to_container(stored), path)
        root = _under_schemas(stored)
        missing = OmegaConf.missing_keys(root)
    except DataError as error:
        raise ConfigError(
            "the stored configuration cannot be read",
            where=str(path),
            found=f"{error.what}: {error.found}",
        ) from error
    except (OmegaConfBaseException, YAMLError, KeyError, OSError, TypeError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ConfigError(
            "the stored configuration cannot be read", where=str(path), found=lines[0]
        ) from error
    if missing:
        raise ConfigError(
            "the stored configuration cannot be read",
            where=str(path),
            found=f"no {', '.join(sorted(missing))}",
        )
    return root


def _mapping_in(path: Path) -> DictConfig:
    """Read a file once, and give OmegaConf only bytes that the bounded parser took as a mapping.

    OmegaConf parses a file that holds nothing but a text once more, without bounds.
    """
    data = path.read_bytes()
    bounded = parse_yaml(data, str(path))
    stored = OmegaConf.load(io.BytesIO(data)) if isinstance(bounded, dict) else None
    if not isinstance(stored, DictConfig):
        raise TypeError("the file holds no mapping")
    return stored


def _under_schemas(stored: DictConfig) -> DictConfig:
    """Put stored values under the schemas that their groups' discriminators name."""
    root = copied(_structured(RunConfig))
    assert isinstance(root, DictConfig)
    for group in stored:
        node = stored[group]
        if group == "callbacks":
            if not isinstance(node, DictConfig):
                raise TypeError("callbacks holds no mapping")
            root[group] = {
                name: _under(_schema("callbacks", values, name=str(name)), values)
                for name, values in node.items()
            }
        elif isinstance(node, DictConfig) and group not in SCHEMAS:
            if not isinstance(root.get(group), DictConfig):
                raise TypeError(f"{group!s} is no mapping")
            root[group].merge_with(node)
        elif isinstance(node, DictConfig):
            root[group] = _under(_schema(str(group), node), node)
        else:
            root[group] = node
    if "sandbox" not in stored:  # written before there was one
        root["sandbox"] = SCHEMAS["sandbox"]["none"]
    tokenizer = stored.get("tokenizer")
    if isinstance(tokenizer, DictConfig) and _PERMISSION not in tokenizer:  # as above
        root["tokenizer"][_PERMISSION] = tokenizer.get("name") == "vox"
    return root


def _under(schema: DictConfig, values: DictConfig) -> DictConfig:
    node: DictConfig = copied(schema)
    node.merge_with(values)
    return node


def _schema(group: str, node: DictConfig, *, name: str | None = None) -> DictConfig:
    """Return the schema of stored values; a class that is not ours has one of its own keys."""
    values = _plain(node)
    if group in CLASS_GROUPS and values.get("_target_") not in our_targets():
        return DictConfig(user_schema(group, values, name or group))
    return _structured(schema_of(group, values, name=name))


@functools.cache
def _structured(schema: type) -> DictConfig:
    """Return the node of a schema, to be copied: making one takes longer than all else here."""
    return DictConfig(schema)
