"""The schemas of each group, and the declarations of their settings.

The schema of a group is selected by its *discriminator*: the one field whose value the option sets
(``data.source``, ``logger.sink``). Groups with a single schema have none.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from mens_exp.config import (
    backend,
    data_sources,
    evaluation,
    logger,
    lora,
    model,
    objective,
    optim,
    promotion,
    quant,
    root,
    schedule,
    suite,
    task,
    trainer,
)
from mens_exp.config.fields import Declaration, Effect, declared
from mens_exp.config.option_files import SPEC_GROUPS
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.plugins import Registry

SCHEMAS: dict[str, dict[str, type]] = {
    "task": {"task": task.TaskConfig},
    "model": {
        "bundled": model.BundledModel,
        "random": model.RandomModel,
        "hf": model.HfModel,
    },
    "tokenizer": {"tokenizer": model.TokenizerConfig},
    "quant": {"quant": quant.QuantConfig},
    "lora": {
        "lora": lora.LoraConfig,
        "passthrough": lora.PassthroughConfig,
        "prompt_tuning": lora.PromptTuningConfig,
    },
    "objective": {name: spec.schema for name, spec in objective.OBJECTIVES.built_in.items()},
    "backend": {
        "qlora": backend.QloraConfig,
        "lora": backend.LoraGraphConfig,
        "full": backend.FullConfig,
        "burn": backend.BurnConfig,
        "proxy": backend.ProxyConfig,
    },
    "data": {name: spec.schema for name, spec in data_sources.SOURCES.built_in.items()},
    "optim": {**optim.OPTIMIZERS},
    "schedule": {**schedule.SCHEDULES},
    "module": {"module": trainer.ModuleConfig},
    "trainer": {"trainer": trainer.TrainerConfig},
    "logger": {
        "wandb": logger.WandbLogger,
        "csv": logger.CsvLogger,
        "tensorboard": logger.TensorboardLogger,
        "none": logger.NoLogger,
    },
    "suite": {name: spec.schema for name, spec in suite.SUITES.built_in.items()},
    "sandbox": {
        "bubblewrap": evaluation.BubblewrapSandbox,
        "unsafe": evaluation.UnsafeSandbox,
        "none": evaluation.NoSandbox,
    },
    "study": {"study": promotion.StudyConfig},
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
    "schedule": "kind",
    "logger": "sink",
    "suite": "name",
    "sandbox": "name",
    "policy": "name",
}


# Groups to which installed packages and ./conf add schemas, one per spec.
REGISTRIES: dict[str, Registry[Any]] = {
    "data": data_sources.SOURCES,
    "lora": lora.ADAPTERS,
    "objective": objective.OBJECTIVES,
    "suite": suite.SUITES,
}


# Names of schemas in the records of earlier runs.
_EARLIER = {"model": {"directory": "hf"}}


# Fields that identify the chosen option. Setting one independently of its option would make the
# record disagree with the run. A model's rate is only the default of optim.lr.
SET_BY_OPTION = frozenset(
    {"task.name", "tokenizer.name", "objective.labels", "model.default_lr"}
    | {f"{group}.{field}" for group, field in DISCRIMINATORS.items()}
)


@functools.cache
def declarations() -> dict[str, tuple[Declaration, ...]]:
    """Return the declarations of every setting and section, keyed by dotted path.

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
    """Return the declarations that apply to a setting, from the outermost section inwards."""
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
    """Return the effect of a setting, given its dotted path.

    A setting of a user's own option has the effect of its group. One outside any group counts as
    changing what is learned, so that two runs are considered different rather than wrongly
    considered equal.
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
    """Return the display names of settings in reports, keyed by the last part of their paths."""
    return {
        path.rpartition(".")[2]: about.label
        for path, several in declarations().items()
        for about in several
        if about.label is not None
    }


@functools.cache
def contract_parts(path: str) -> tuple[str, ...]:
    """Return the parts of the contract derived from a setting, given its dotted path."""
    parts: list[str] = []
    while path:
        parts += [part for one in declarations().get(path, ()) for part in one.contract]
        path = path.rpartition(".")[0]
    return tuple(dict.fromkeys(parts))


def absent_specs(stored: DictConfig, where: str) -> Iterator[ConfigError]:
    """Yield an error for each spec of a stored configuration that does not exist here.

    Args:
        stored: the values of the file.
        where: the file, for messages.
    """
    for group, key in SPEC_GROUPS.items():
        registry = quant.QUANTIZERS if group == "quant" else REGISTRIES[group]
        name = OmegaConf.select(stored, f"{group}.{key}")
        if isinstance(name, str) and name not in {*registry.built_in, *registry.added_names()}:
            yield registry.absent(name, where=f"{where}: {group}.{key}")


def is_added(group: str, values: dict[str, Any]) -> bool:
    """Return whether stored ``values`` of ``group`` belong to an added spec."""
    if group not in REGISTRIES or group not in DISCRIMINATORS:
        return False
    return values.get(DISCRIMINATORS[group]) in REGISTRIES[group].added_names()


def schema_of(group: str, values: dict[str, Any], *, name: str | None = None) -> type:
    """Return the dataclass for stored ``values`` of ``group``.

    Args:
        group: a config group.
        values: the group's stored values, as plain data.
        name: the callback's name; used for `callbacks` only.

    Raises:
        KeyError: no known schema matches the values.
        SetupError: an installed package provides the name, but its spec is unusable.
        ConfigError: a file of ``./conf`` provides the name, but its spec is unusable.
    """
    schemas = SCHEMAS[group]
    if group == "callbacks":
        return schemas.get(name or "", trainer.CallbackConfig)
    if group in DISCRIMINATORS:
        value = values[DISCRIMINATORS[group]]
        name = _EARLIER.get(group, {}).get(value, value)
        added = REGISTRIES[group].known(name) if group in REGISTRIES else None
        return schemas[name] if added is None else schema_in(added)
    if group == "lora" and (method := lora.ADAPTERS.known(values.get("variant", "lora"))):
        return schemas.get(method.name, schema_in(method))
    return schemas[group]


def schema_in(spec: Any) -> type:
    """Return the schema of a spec; an adapter method without one uses the group's."""
    found: type = spec.schema or lora.LoraConfig
    return found
