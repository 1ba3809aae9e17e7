"""The schemas under Hydra's ``/schema``, and the way back from stored values to a schema.

A group's schema is found by its *discriminator*: the one field whose value the option sets
(``data.source``, ``logger.sink``); groups with a single schema have none.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from mens_exp.config import (
    backend,
    callbacks,
    data,
    launcher,
    logger,
    lora,
    model,
    objective,
    optim,
    policy,
    quant,
    root,
    sandbox,
    schedule,
    search,
    suite,
    task,
    tokenizer,
    trainer,
)
from mens_exp.config.fields import Declaration, Effect, declared

__all__ = [
    "DISCRIMINATORS",
    "SCHEMAS",
    "SET_BY_OPTION",
    "contract_parts",
    "declarations",
    "declarations_of",
    "effect_of",
    "is_open",
    "labels",
    "register",
    "schema_of",
]

SCHEMAS: dict[str, dict[str, type]] = {
    "task": {"task": task.TaskConfig},
    "model": {
        "bundled": model.BundledModel,
        "random": model.RandomModel,
        "hf": model.HfModel,
    },
    "tokenizer": {"tokenizer": tokenizer.TokenizerConfig},
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
    "schedule": {"schedule": schedule.ScheduleConfig},
    "trainer": {"trainer": trainer.TrainerConfig},
    "logger": {
        "wandb": logger.WandbLogger,
        "csv": logger.CsvLogger,
        "tensorboard": logger.TensorboardLogger,
        "none": logger.NoLogger,
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
        "bubblewrap": sandbox.BubblewrapSandbox,
        "unsafe": sandbox.UnsafeSandbox,
        "none": sandbox.NoSandbox,
    },
    "policy": {
        "burn_production": policy.BurnProductionPolicy,
        "qlora_plateau": policy.QloraPlateauPolicy,
        "burn_rnd": policy.BurnRndPolicy,
        "eval_gate": policy.EvalGatePolicy,
    },
    "callbacks": {
        "callback": callbacks.CallbackConfig,
        "early_stopping": callbacks.EarlyStoppingConfig,
        "finite_guard": callbacks.FiniteGuardConfig,
        "memory": callbacks.MemoryConfig,
        "progress": callbacks.ProgressConfig,
        "scorecard": callbacks.ScorecardConfig,
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
    earlier = {name: launcher.LAUNCHERS[now] for name, now in launcher.EARLIER.items()}
    for name, launcher_schema in {**launcher.LAUNCHERS, **earlier}.items():
        store.store(group="hydra/launcher", name=name, node=launcher_schema)
    store.store(group="hydra/sweeper", name=search.OPTUNA, node=search.OptunaSweeper)
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
        return schemas.get(name or "", callbacks.CallbackConfig)
    if group in DISCRIMINATORS:
        value = values[DISCRIMINATORS[group]]
        return schemas[_EARLIER.get(group, {}).get(value, value)]
    return schemas[group]
