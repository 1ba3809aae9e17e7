"""The schemas under Hydra's ``/schema``, and the way back from stored values to a schema.

A group's schema is found by its *discriminator*: the one field whose value the option sets
(``data.source``, ``logger.sink``); groups with a single schema have none.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore

from mens_exp.config import (
    backend,
    callbacks,
    data,
    logger,
    lora,
    model,
    objective,
    optim,
    quant,
    root,
    schedule,
    suite,
    task,
    tokenizer,
    trainer,
)

__all__ = ["DISCRIMINATORS", "SCHEMAS", "SET_BY_OPTION", "register", "schema_of"]

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
    "objective": {"objective": objective.ObjectiveConfig},
    "backend": {"backend": backend.BackendConfig},
    "data": {"stdlib": data.StdlibData, "jsonl": data.JsonlData},
    "optim": {"optim": optim.OptimConfig},
    "schedule": {"schedule": schedule.ScheduleConfig},
    "trainer": {"trainer": trainer.TrainerConfig},
    "logger": {"wandb": logger.WandbLogger, "none": logger.NoLogger},
    "suite": {"heldout_syntax": suite.HeldoutSyntaxSuite, "none": suite.NoSuite},
    "callbacks": {
        "callback": callbacks.CallbackConfig,
        "checkpoint": callbacks.CheckpointConfig,
        "finite_guard": callbacks.FiniteGuardConfig,
        "memory": callbacks.MemoryConfig,
        "progress": callbacks.ProgressConfig,
    },
}

DISCRIMINATORS = {"model": "source", "data": "source", "logger": "sink", "suite": "name"}

# What the records of earlier runs call a schema.
_EARLIER = {"model": {"directory": "hf"}}

# Fields that say which option is in force: to set one apart from its option would make the
# record say one thing and the run do another.
SET_BY_OPTION = frozenset(
    {"task.name", "tokenizer.name", "objective.name"}
    | {f"{group}.{field}" for group, field in DISCRIMINATORS.items()}
)


def register() -> None:
    """Put every schema into Hydra's config store; doing so again changes nothing."""
    store = ConfigStore.instance()
    store.store(group="schema", name="root", node=root.RunConfig)
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=schema)


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
