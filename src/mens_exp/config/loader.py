"""Schemas under Hydra's ``/schema``, and a config loader that reads each choice of options once.

A group's schema is found by its *discriminator*: the one field whose value the option sets
(``data.source``, ``logger.sink``); groups with a single schema have none.

Hydra reads some two hundred small files for one configuration and merges them, and does it again
for the next. The cells of a sweep differ in values more than in options, so each starts from a copy
of the merged options.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mens_exp.config import (
    backend,
    data,
    lora,
    model,
    objective,
    optim,
    promotion,
    quant,
    root,
    suite,
    sweep,
    task,
    trainer,
)
from mens_exp.config.fields import Declaration, Effect, declared
from mens_exp.config.user_config import user_fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra._internal.config_repository import IConfigRepository
    from hydra.core.default_element import ResultDefault
    from hydra.core.override_parser.types import Override
    from hydra.plugins.config_source import ConfigResult
    from omegaconf import Container

SCHEMAS: dict[str, dict[str, type]] = {
    "task": {"task": task.TaskConfig},
    "model": {
        "bundled": model.BundledModel,
        "random": model.RandomModel,
        "hf": model.HfModel,
    },
    "tokenizer": {"tokenizer": model.TokenizerConfig},
    "quant": {"quant": quant.QuantConfig},
    "lora": {"lora": lora.LoraConfig},
    "objective": {
        "causal": objective.CausalObjective,
        "assistant": objective.AssistantObjective,
        "last_k": objective.LastKObjective,
    },
    "backend": {
        "qlora": backend.QloraConfig,
        "lora": backend.LoraGraphConfig,
        "full": backend.FullConfig,
        "burn": backend.BurnConfig,
        "proxy": backend.ProxyConfig,
    },
    "data": {
        "stdlib": data.StdlibData,
        "jsonl": data.JsonlData,
        "hub": data.HubData,
        "mix": data.MixData,
        "synthetic": data.SyntheticData,
    },
    "optim": {
        "adamw": optim.AdamwConfig,
        "adamw_8bit": optim.Adamw8bitConfig,
        "paged_adamw_8bit": optim.PagedAdamw8bitConfig,
        "lion": optim.LionConfig,
    },
    "schedule": {"schedule": optim.ScheduleConfig},
    "trainer": {"trainer": trainer.TrainerConfig},
    "logger": {
        "wandb": trainer.WandbLogger,
        "csv": trainer.CsvLogger,
        "tensorboard": trainer.TensorboardLogger,
        "none": trainer.NoLogger,
    },
    "suite": {
        "heldout_syntax": suite.HeldoutSyntaxSuite,
        "mini_python": suite.MiniPythonSuite,
        "humaneval": suite.HumanEvalSuite,
        "rust": suite.RustSuite,
        "jsonl": suite.JsonlSuite,
        "lm_eval": suite.LmEvalSuite,
        "scorecard_spec": suite.ScorecardSpecSuite,
        "none": suite.NoSuite,
    },
    "sandbox": {
        "bubblewrap": suite.BubblewrapSandbox,
        "unsafe": suite.UnsafeSandbox,
        "none": suite.NoSandbox,
    },
    "policy": {
        "burn_production": promotion.BurnProductionPolicy,
        "qlora_plateau": promotion.QloraPlateauPolicy,
        "burn_rnd": promotion.BurnRndPolicy,
        "eval_gate": promotion.EvalGatePolicy,
    },
    "callbacks": {
        "callback": trainer.CallbackConfig,
        "early_stopping": trainer.EarlyStoppingConfig,
        "finite_guard": trainer.FiniteGuardConfig,
        "memory": trainer.MemoryConfig,
        "progress": trainer.ProgressConfig,
        "scorecard": trainer.ScorecardConfig,
    },
}

DISCRIMINATORS = {
    "model": "source",
    "objective": "name",
    "backend": "name",
    "data": "source",
    "optim": "name",
    "logger": "sink",
    "suite": "name",
    "sandbox": "name",
    "policy": "name",
}

# What the records of earlier runs call a schema.
_EARLIER = {"model": {"directory": "hf"}}

# Fields that say which option is in force: to set one apart from its option would make the
# record say one thing and the run do another. A model's rate is only the default of optim.lr.
SET_BY_OPTION = frozenset(
    {"task.name", "tokenizer.name", "objective.labels", "model.default_lr"}
    | {f"{group}.{field}" for group, field in DISCRIMINATORS.items()}
)


@functools.cache
def declarations() -> dict[str, tuple[Declaration, ...]]:
    """Return the declarations of every setting and section by its dotted path.

    Several schemas of a group may declare one path.
    """
    found: dict[str, list[Declaration]] = {}
    _collect(root.RunConfig, "", found)
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            _collect(schema, f"{group}.{name}." if group == "callbacks" else f"{group}.", found)
    return {path: tuple(several) for path, several in found.items()}


def _collect(schema: type, prefix: str, found: dict[str, list[Declaration]]) -> None:
    for one in dataclasses.fields(schema):
        path = f"{prefix}{one.name}"
        found.setdefault(path, []).append(declared(schema, one.name))
        kind = one.default_factory
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            _collect(kind, f"{path}.", found)


def declarations_of(config: root.RunConfig, key: str) -> list[Declaration]:
    """Return the declarations of a setting of a configuration, those around it first."""
    found: list[Declaration] = []
    node: Any = config
    for part in key.split("."):
        if isinstance(node, dict):
            node = node.get(part)
        elif dataclasses.is_dataclass(node) and hasattr(node, part):
            found.append(declared(type(node), part))
            node = getattr(node, part)
        else:
            break
    return found


@functools.cache
def effect_of(path: str) -> Effect:
    """Return the effect of a setting by its dotted path.

    A setting that is not ours (of a user's own option) has that of its group. One that is of no
    group counts as one that changes what is learned: two runs are then told apart rather than
    taken for one.
    """
    while path:
        stated = {one.changes for one in declarations().get(path, ())} - {None}
        if stated:
            (effect,) = stated
            assert effect is not None
            return effect
        path = path.rpartition(".")[0]
    return Effect.TRAINING


@functools.cache
def labels() -> dict[str, str]:
    """Return the names that reports give to settings, by the last part of their paths."""
    return {
        path.rpartition(".")[2]: about.label
        for path, several in declarations().items()
        for about in several
        if about.label is not None
    }


@functools.cache
def contract_parts(path: str) -> tuple[str, ...]:
    """Return the parts of the contract that are made of a setting, by its dotted path."""
    parts: list[str] = []
    while path:
        parts += [part for one in declarations().get(path, ()) for part in one.contract]
        path = path.rpartition(".")[0]
    return tuple(dict.fromkeys(parts))


_LAST = "root"  # where it is, the others are


def register() -> None:
    """Put every schema into Hydra's config store, once; each composition asks for it."""
    store = ConfigStore.instance()
    if f"{_LAST}.yaml" in store.repo.get("schema", {}):
        return
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=_open(schema))
    # Plugins that are installed store theirs when Hydra first looks for them; ours come after.
    Plugins.instance()
    earlier = {name: sweep.LAUNCHERS[now] for name, now in sweep.EARLIER.items()}
    for name, launcher_schema in {**sweep.LAUNCHERS, **earlier}.items():
        store.store(group="hydra/launcher", name=name, node=launcher_schema)
    store.store(group="hydra/sweeper", name=sweep.OPTUNA, node=sweep.OptunaSweeper)
    store.store(group="schema", name=_LAST, node=_open(root.RunConfig))


def _open(schema: type) -> DictConfig:
    """Let overrides add keys to the mappings whose keys the user chooses; no other takes any."""
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
    """Tell whether a node is a mapping whose keys the user chooses, such as lora.rank_pattern."""
    if not isinstance(node, DictConfig):
        return False
    return node._metadata.element_type in (int, float, str)  # noqa: SLF001  # the annotation


def schema_of(group: str, values: dict[str, Any], *, name: str | None = None) -> type:
    """Return the dataclass that stored ``values`` of ``group`` belong to.

    Args:
        group: a config group.
        values: the group's stored values, as plain data.
        name: for `callbacks`, the callback's own name.

    Raises:
        KeyError: the values name no known schema.
    """
    schemas = SCHEMAS[group]
    if group == "callbacks":
        return schemas.get(name or "", trainer.CallbackConfig)
    if group in DISCRIMINATORS:
        value = values[DISCRIMINATORS[group]]
        return schemas[_EARLIER.get(group, {}).get(value, value)]
    return schemas[group]


_MOST = 32  # choices of options that are kept, some hundred kilobytes each
# Settings of Hydra's own that nothing else in its node is made of.
_LEAVES = ("hydra.run.", "hydra.sweep.", "hydra.launcher.", "hydra.sweeper.")


@dataclass(slots=True)
class _Memory:
    """Results of reading and merging under one fingerprint of ``./conf``; ours never change."""

    fingerprint: Any = None
    files: dict[str, ConfigResult | None] = field(default_factory=dict)
    chosen: dict[tuple[str, ...], bytes] = field(default_factory=dict)


_memory = _Memory()


def copied(config: Container) -> Any:
    """Return a copy of a node with all that it holds, in less than half of deepcopy's time."""
    return pickle.loads(_pickled(config))  # noqa: S301  # written here


def _pickled(config: Container) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(config)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles the schemas of a user's own options too, which are in no module."""

    def reducer_override(self, value: Any) -> Any:
        """Return what such a class is found by in this process; all else is pickled as usual."""
        if not isinstance(value, type) or value.__module__ != "types":  # as make_dataclass has it
            return NotImplemented
        _own[id(value)] = value
        return _own_class, (id(value),)


_own: dict[int, type] = {}


def _own_class(number: int) -> type:
    return _own[number]


def _remembered() -> _Memory:
    """Return the memory, a new one where ``./conf`` has changed."""
    global _memory  # noqa: PLW0603  # one for the process: Hydra makes a loader for each command
    fingerprint = user_fingerprint()
    if _memory.fingerprint != fingerprint:
        _memory = _Memory(fingerprint)
    return _memory


class CachingLoader(ConfigLoaderImpl):
    """Composes as Hydra does, from copies of what it has composed before."""

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,  # Hydra's signature
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Return the configuration of the overrides; a known choice of options is only copied."""
        parsed = OverridesParser.create().parse_overrides(overrides)
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
        parsed = OverridesParser.create().parse_overrides(overrides)
        if any(one.get_key_element() == "hydra.searchpath" for one in parsed):  # other files
            return super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        return parsed, _Files(self.repository, _remembered().files)

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        own = _Copies(repo, {}) if isinstance(repo, _Files) else repo
        return super()._compose_config_from_defaults_list(defaults, own)


def _is_plain(override: Override) -> bool:
    """Tell whether an override sets one value that nothing but its own key is made of."""
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
    """Write what Hydra's node says of the command, and of the environment now."""
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
    """A repository that keeps what it reads in ``cache``, without copying the one behind it."""

    def __init__(
        self, repository: IConfigRepository, cache: dict[str, ConfigResult | None]
    ) -> None:
        self.delegate = repository
        self.cache = cache


class _Copies(_Files):
    """Hands out copies: merging changes what it merges."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a copy of what the file holds."""
        read = self.delegate.load_config(config_path)
        return None if read is None else replace(read, config=copied(read.config))
